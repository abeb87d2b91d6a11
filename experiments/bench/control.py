"""The cost of agreement: what members say to each other during a round of a billion parameters.

Real peers exchange one round of a mean on the simulated network. They hold shards of sixteen bytes,
as many as a billion int8 values have, and the lines take as long for each as for a whole one.
Everything but pieces of content counts as control: requests for pieces, too.
"""

import asyncio
import collections
import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load
from farflock.experiments.measure.threads import one_thread
from farflock.node.simulate.lives import SimPeers
from farflock.swarm import batch, chunk_server, chunks
from farflock.swarm.frame import message_kind, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Reduction, RoundOutcome, Stream
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

RUN, STREAM = "control", "weights"
RATE_BITS = 100e6
SHARD_BYTES = 1024 * 1024  # of the product (node/train/shards.py)
SMALL_BYTES = 1024  # of a shard here: much longer than its entry in a list, as in the product
VIEW_S = 5.0
DEADLINE_S = 600.0
MEET_TIMEOUT_S = 600.0
MAX_CORE = 0.01  # the goal: of one core, for everything but content
SCALE = SHARD_BYTES // SMALL_BYTES
PIECES = SHARD_BYTES // chunk_server.PIECE_BYTES  # of the product, for each piece here


@dataclass(frozen=True, slots=True)
class Size:
    """The swarms, and the shards of their contributions."""

    members: tuple[int, ...] = (4, 16, 64, 128)
    shards: int = 954  # one billion bytes


QUICK = Size((2, 4), 20)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """The cost of one round: bytes of control and of content that all members sent together,
    virtual seconds, and processor seconds."""

    members: int
    control_bytes: int
    content_bytes: int
    round_s: float
    processor_s: float
    kinds: dict[str, int]  # bytes of control, by message


def run(options: Options) -> Iterator[Metric]:
    """Yield `control.N` and `control.N.cpu` for each number of members that a run may have."""
    size = QUICK if options.quick else Size()
    rate = (options.rate_bits or RATE_BITS) / 8
    for members in (each for each in size.members if each <= MAX_MEMBERS):
        name = f"control.{members}"
        if options.wants(name) or options.wants(f"{name}.cpu"):
            with one_thread(), small_shards():
                cost = run_virtual(round_cost(members, size.shards, rate))
            yield from metrics(name, cost, rate)


def metrics(name: str, cost: RoundCost, rate: float) -> Iterator[Metric]:
    """Yield the bytes of control next to those of content, and the processor's time."""
    each = cost.members * cost.round_s
    most = ", ".join(
        f"{kind} {count / each:.0f}"
        for kind, count in sorted(cost.kinds.items(), key=lambda entry: -entry[1])[:5]
    )
    note = (
        f"one round of {cost.round_s:.0f} s at {rate * 8 / 1e6:g} Mbit/s; the yardstick is the "
        f"content that a member sends; most are {most}"
    )
    control, content = cost.control_bytes / each, cost.content_bytes / each
    share = round(control / content, 6)
    yield Metric(name, control, content, share, 1, load(), "bytes a second a peer", note)
    core = cost.processor_s / each
    note = "all work but codecs, the simulator's and that on pieces included; the goal beside it"
    ratio = round(core / MAX_CORE, 4)
    yield Metric(f"{name}.cpu", core, MAX_CORE, ratio, 1, load(), "cores a peer", note)


@contextlib.contextmanager
def small_shards() -> Iterator[None]:
    """Let fetches count a small shard as a whole one, which comes in one long piece here."""
    scales = dict.fromkeys(("STALL_S", "GAP_S"), float(PIECES))
    sizes = ("ASK_BYTES", "INBOUND_BYTES", "SHARE_BYTES")
    scales |= dict.fromkeys(sizes, 1 / SCALE)
    scales["WINDOW_BYTES"] = 2 / SCALE  # of which room comes back by shards, not by pieces
    scaled = [(chunks, name, scale) for name, scale in scales.items()]
    scaled.append((chunk_server, "SERVE_TIMEOUT_S", float(PIECES)))
    scaled.append((batch, "SMALL_BYTES", 1 / SCALE))
    kept = [(module, name, getattr(module, name)) for module, name, _ in scaled]
    try:
        for (module, name, value), (_, _, scale) in zip(kept, scaled, strict=True):
            setattr(module, name, type(value)(value * scale))
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


async def round_cost(members: int, shards: int, rate: float) -> RoundCost:
    """Measure one round of a new swarm, with lines of `rate` bytes a second."""
    return await Swarm(members, shards, rate).round()


class Swarm:
    """Peers that are members of one run, on lines of `rate` bytes a second."""

    def __init__(self, members: int, shards: int, rate: float) -> None:
        self._shards = shards
        self._network = SimNetwork(1, LinkModel(rate, rate))
        self._network.line_bytes, self._network.tap = line_bytes, self._count
        seeds = [hashlib.sha256(f"control/{number}".encode()) for number in range(members)]
        identities = [Identity.from_seed(seed.digest()) for seed in seeds]
        peers = SimPeers(RunTerms(RUN, 1, VIEW_S), self._network, identities)
        self._peers = [peers.born(number) for number in range(members)]
        self._bytes: collections.Counter[str] = collections.Counter()

    async def round(self) -> RoundCost:
        """Let all peers join, then exchange one round together."""
        async with contextlib.AsyncExitStack() as stack:
            for peer in self._peers:
                await stack.enter_async_context(peer.running())
            await self._gather_members()
            for peer in self._peers:
                peer.open(stream_of(self._shards))
            self._bytes.clear()
            loop = asyncio.get_running_loop()
            begun_s, processor_s = loop.time(), time.process_time()
            outcomes = await asyncio.gather(*map(self._exchange, self._peers))
            round_s, processor_s = loop.time() - begun_s, time.process_time() - processor_s
            require_complete(outcomes, len(self._peers))
            kinds = dict(self._bytes)
        content = kinds.pop("piece")
        return RoundCost(
            len(self._peers), sum(kinds.values()), content, round_s, processor_s, kinds
        )

    async def _gather_members(self) -> None:
        founder, *others = self._peers
        founder.found()
        record = [founder.membership.book.mine]
        await asyncio.gather(*(peer.join(record, MEET_TIMEOUT_S) for peer in others))
        async with asyncio.timeout(MEET_TIMEOUT_S):
            while not all(self._knows_all(peer) for peer in self._peers):  # noqa: ASYNC110
                await asyncio.sleep(1.0)

    def _knows_all(self, peer: Peer) -> bool:
        return len(peer.context.views.newest.members) == len(self._peers)

    async def _exchange(self, peer: Peer) -> RoundOutcome:
        shards = [small_shard(f"{peer.me}/{shard}".encode()) for shard in range(self._shards)]
        return await peer.exchange(STREAM, 0, shards)

    def _count(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        kind = message_kind(frame).decode()
        self._bytes[kind] += line_bytes(frame) if kind == "piece" else len(frame)
        return frame


def line_bytes(frame: bytes) -> int:
    """Return the bytes of a frame on the line, with a whole shard in place of a small one."""
    body = len(unpack(frame).body)
    return SHARD_BYTES if body == SMALL_BYTES else len(frame)


def small_shard(text: bytes) -> bytes:
    """Return a shard that depends on the text."""
    digest = hashlib.sha256(text).digest()
    return digest * (SMALL_BYTES // len(digest))


def stream_of(shards: int) -> Stream:
    """Return the stream of a mean; a reduction depends on its inputs only."""

    def reduce(number: int, shard: int, inputs: Sequence[tuple[PeerId, float, bytes]]) -> Reduction:
        return Reduction(small_shard(b"".join(payload for _, _, payload in inputs)))

    terms = RoundTerms("mean", shards, DEADLINE_S)
    return Stream(STREAM, terms, SMALL_BYTES, reduce, lambda number, shard, payload: True)


def require_complete(outcomes: Sequence[RoundOutcome], members: int) -> None:
    """Raise `NotMeasured` unless all members completed the round together."""
    ends = collections.Counter((each.status, len(each.participants)) for each in outcomes)
    if set(ends) != {("ok", members)}:
        raise NotMeasured(f"a round of {members} members ended with (status, members): {ends}")
