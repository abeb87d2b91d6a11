"""The cost of agreement: what members say to each other during a round, and what it takes them.

Real peers exchange one round of a mean on the simulated network. They hold shards of a kilobyte,
and the lines take as long for each as for a whole one. Everything but pieces of content counts as
control: requests for pieces, too.

`control.N` is the round of a billion int8 values, in bytes a second. `control.round.N.S` and its
parts are a round of S shards and the rest of the interval until the next one, in bytes a round,
where all members vote: then most sign, and the certificates are the longest.
"""

import asyncio
import collections
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

from farflock.experiments.bench.workers.control_meter import (
    Meter,
    Replacement,
    Work,
    acting,
    replaced,
    signature_s,
)
from farflock.experiments.measure.metric import Metric, NotMeasured, Options, load
from farflock.experiments.measure.threads import one_thread
from farflock.swarm import batch, chunk_server, chunks
from farflock.swarm.frame import unpack
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Reduction, RoundOutcome, Stream
from farflock.swarm.protocol.votes import EARNED, VoteTerms
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.tickets import ticket_of
from farflock.swarm.sim.virtual_time import run_virtual

RUN, STREAM = "control", "weights"
RATE_BITS = 100e6
SHARD_BYTES = 1024 * 1024  # of the product (node/train/shards.py)
SMALL_BYTES = 1024  # of a shard here: much longer than its entry in a list, as in the product
VIEW_S = 5.0
DEADLINE_S = 600.0
MEET_TIMEOUT_S = 600.0
MAX_CORE = 0.01  # the goal: of one core, for everything but content
MAX_SIGNATURE_BYTES = 2000  # the goal, a peer and round among 16
INTERVAL_S = 60.0  # from the begin of a round to the next one's; longer if the round takes longer
SETTLE_S = 30.0  # after the last admission, for what only newcomers say
DEADLINE_PER_CONTENT = 4.0  # times the transfer of one contribution, where that is longer
# Members times shards: more take so long that they are measured by name only.
MAX_BY_DEFAULT = 16 * 4096
PARTS = ("", ".signatures", ".cpu", ".signing")
ALL_VOTE = VoteTerms(after_rounds=0, per=0, at_once_below=MAX_MEMBERS)
SCALE = SHARD_BYTES // SMALL_BYTES
PIECES = SHARD_BYTES // chunk_server.PIECE_BYTES  # of the product, for each piece here


@dataclass(frozen=True, slots=True)
class Size:
    """The swarms, and the shards of their contributions; those of the grid are combined."""

    members: tuple[int, ...] = (4, 16, 64, 128)
    shards: int = 954  # one billion bytes
    grid_members: tuple[int, ...] = (2, 8, 16, 32, 64)
    grid_shards: tuple[int, ...] = (1, 256, 4096)

    def cells(self) -> Iterator[tuple[int, int]]:
        """Yield each swarm of the grid with each number of shards, the small ones first."""
        for shards in self.grid_shards:
            for members in self.grid_members:
                yield members, shards


QUICK = Size((2, 4), 20, (2, 3), (1, 8))


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


@dataclass(frozen=True, slots=True)
class IntervalCost:
    """The cost of one interval between the begins of two rounds, of all members together."""

    members: int
    bundles: int
    interval_s: float
    round_s: float
    processor_s: float
    meter: Meter

    def each(self, count: float) -> float:
        """Return one member's share."""
        return count / self.members

    def core(self, *work: Work) -> float:
        """Return the part of a core that these kinds of work take of a member."""
        return self.each(sum(self.meter.watch.spent_s[one] for one in work)) / self.interval_s


def run(options: Options) -> Iterator[Metric]:
    """Yield `control.N` and `control.N.cpu` for each number of members that a run may have, and the
    four lines of each `control.round.N.S`."""
    size = QUICK if options.quick else Size()
    rate = (options.rate_bits or RATE_BITS) / 8
    for members in (each for each in size.members if each <= MAX_MEMBERS):
        name = f"control.{members}"
        if options.wants(name) or options.wants(f"{name}.cpu"):
            with one_thread(), small_shards():
                cost = run_virtual(round_cost(members, size.shards, rate))
            yield from metrics(name, cost, rate)
    for members, shards in size.cells():
        name = f"control.round.{members}.{shards}"
        lines = {name + part for part in PARTS}
        is_short = members * shards <= MAX_BY_DEFAULT and any(map(options.wants, lines))
        if is_short or options.only in lines:
            with one_thread(), small_shards():
                interval = run_virtual(interval_cost(members, shards, rate))
            yield from interval_metrics(name, interval, left_out(size, shards))


def left_out(size: Size, shards: int) -> str:
    """Return which swarms with so many shards are measured by name only, in words."""
    names = [
        f"control.round.{members}.{each}"
        for members, each in size.cells()
        if each == shards and members * shards > MAX_BY_DEFAULT
    ]
    return f"; only by name, since they take long: {', '.join(names)}" if names else ""


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


def interval_metrics(name: str, cost: IntervalCost, remark: str = "") -> Iterator[Metric]:
    """Yield the bytes of control and, of them, of signatures; the protocol's part of a core and,
    of it, that of signatures."""
    meter, each = cost.meter, cost.each
    kinds, signed = (
        ", ".join(f"{kind} {each(count):.0f}" for kind, count in counts.most_common(5) if count)
        for counts in (meter.control, meter.signatures)
    )
    yield _beside(
        name,
        each(meter.control.total()),
        each(meter.content_bytes),
        "bytes a peer and round",
        f"{cost.bundles} bundles; a round of {cost.round_s:.1f} s in an interval of "
        f"{cost.interval_s:.0f} s; the yardstick is the content that a member sends; most are "
        f"{kinds}{remark}",
    )
    yield _beside(
        f"{name}.signatures",
        each(meter.signatures.total()),
        MAX_SIGNATURE_BYTES,
        "bytes a peer and round",
        f"all decisions' certificates included: {signed}; one member alone sends "
        f"{max(meter.signers.values())}; the yardstick is the goal with 16",
    )
    protocol_s, content_s, links_s = (
        each(meter.watch.spent_s[work]) for work in ("protocol", "content", "links")
    )
    yield _beside(
        f"{name}.cpu",
        cost.core("protocol", "signing", "checking"),
        MAX_CORE,
        "cores a peer",
        f"{protocol_s:.3f} s of handling messages and ticks a round, signatures besides; "
        f"without work on pieces {content_s:.3f}, the simulated links "
        f"{links_s:.3f}; the whole process took {each(cost.processor_s):.3f}",
    )
    yield _signing(f"{name}.signing", cost)


def _signing(name: str, cost: IntervalCost) -> Metric:
    """Return the part of a core that signatures take, measured and by their number."""
    sign_s, check_s = signature_s()
    made = cost.each(cost.meter.watch.calls["signing"])
    checked = cost.each(cost.meter.remembered.checks)
    asked = cost.each(cost.meter.watch.calls["checking"])
    return _beside(
        name,
        cost.core("signing", "checking"),
        MAX_CORE,
        "cores a peer",
        f"a round, {made:.1f} signed and {checked:.1f} checked, of {asked:.1f} shown; one takes "
        f"{sign_s * 1e6:.0f} and {check_s * 1e6:.0f} us, so by number "
        f"{(made * sign_s + checked * check_s) / cost.interval_s:.6f} cores",
    )


def _beside(name: str, value: float, yardstick: float, unit: str, note: str) -> Metric:
    ratio = round(value / yardstick, 6)
    return Metric(name, value, yardstick, ratio, 1, load(), unit, note)


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
    with replaced([_scaled(*each) for each in scaled]):
        yield


def _scaled(module: ModuleType, name: str, scale: float) -> Replacement:
    value = getattr(module, name)
    return module, name, type(value)(value * scale)


async def round_cost(members: int, shards: int, rate: float) -> RoundCost:
    """Measure one round of a new swarm, with lines of `rate` bytes a second."""
    swarm = Swarm(members, shards, rate)
    async with swarm.running():
        return await swarm.round()


async def interval_cost(members: int, shards: int, rate: float) -> IntervalCost:
    """Measure the interval from the begin of a new swarm's first round on, where all vote."""
    swarm = Swarm(members, shards, rate, ALL_VOTE)
    with swarm.meter.on():
        async with swarm.running():
            swarm.require_voters()
            return await swarm.interval()


class Swarm:
    """Peers that are members of one run, on lines of `rate` bytes a second."""

    def __init__(self, members: int, shards: int, rate: float, votes: VoteTerms = EARNED) -> None:
        self._stream = stream_of(shards, rate)
        self.meter = Meter()
        self._network = SimNetwork(1, LinkModel(rate, rate))
        self._network.line_bytes, self._network.tap = line_bytes, self._count
        self._peers = [self._peer(number, votes) for number in range(members)]

    def _peer(self, number: int, votes: VoteTerms) -> Peer:
        identity = _identity(number)
        record = seal(identity, Record(RUN, identity.peer, 1, 1, curve=bytes(32)))
        founder = _identity(0)
        peer = Peer(
            RunTerms(RUN, 1, founder.peer, VIEW_S, votes=votes),
            identity,
            self._network.links(identity.peer),
            None,
            incarnation=1,
            record=lambda: record,
        )
        peer.membership.bring(ticket_of(founder, RUN))
        return peer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the peers, all members from the begin of the block on."""
        async with contextlib.AsyncExitStack() as stack:
            for peer in self._peers:
                with acting(peer.me):
                    await stack.enter_async_context(peer.running())
            await self._gather_members()
            yield

    def require_voters(self) -> None:
        """Raise `NotMeasured` unless all members vote."""
        voters = len(self._peers[0].context.views.newest.electorate.voters)
        if voters != len(self._peers):
            raise NotMeasured(f"{voters} of {len(self._peers)} members vote")

    async def round(self) -> RoundCost:
        """Exchange one round together."""
        loop = asyncio.get_running_loop()
        self._open()
        begun_s, processor_s = loop.time(), time.process_time()
        await self._exchange_all()
        round_s, processor_s = loop.time() - begun_s, time.process_time() - processor_s
        meter, kinds = self.meter, dict(self.meter.control)
        return RoundCost(
            len(self._peers), sum(kinds.values()), meter.content_bytes, round_s, processor_s, kinds
        )

    async def interval(self) -> IntervalCost:
        """Exchange one round together, and wait until the next one would begin.

        Peers rest between rounds, as those of the product do."""
        for peer in self._peers:
            peer.ticks.rests = True
        await asyncio.sleep(SETTLE_S)
        loop = asyncio.get_running_loop()
        self._open()
        begun_s, processor_s = loop.time(), time.process_time()
        await self._exchange_all()
        round_s = loop.time() - begun_s
        await asyncio.sleep(max(0.0, INTERVAL_S - round_s))
        return IntervalCost(
            len(self._peers),
            self._stream.terms.bundles,
            loop.time() - begun_s,
            round_s,
            time.process_time() - processor_s,
            self.meter,
        )

    def _open(self) -> None:
        """Open the stream at all members, and begin to count."""
        for peer in self._peers:
            peer.open(self._stream)
        self.meter.clear()

    async def _exchange_all(self) -> None:
        outcomes = await asyncio.gather(*map(self._exchange, self._peers))
        require_complete(outcomes, len(self._peers))

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
        count = self._stream.terms.shards
        shards = [small_shard(f"{peer.me}/{shard}".encode()) for shard in range(count)]
        with acting(peer.me):
            return await peer.exchange(STREAM, 0, shards)

    def _count(self, now_s: float, sender: PeerId, receiver: PeerId, frame: bytes) -> bytes:
        self.meter.count(sender, frame, line_bytes)
        return frame


def _identity(number: int) -> Identity:
    return Identity.from_seed(hashlib.sha256(f"control/{number}".encode()).digest())


def line_bytes(frame: bytes) -> int:
    """Return the bytes of a frame on the line, with a whole shard in place of a small one."""
    body = len(unpack(frame).body)
    return SHARD_BYTES if body == SMALL_BYTES else len(frame)


def small_shard(text: bytes) -> bytes:
    """Return a shard that depends on the text."""
    digest = hashlib.sha256(text).digest()
    return digest * (SMALL_BYTES // len(digest))


def stream_of(shards: int, rate: float) -> Stream:
    """Return the stream of a mean; a reduction depends on its inputs only."""
    deadline_s = max(DEADLINE_S, DEADLINE_PER_CONTENT * shards * SHARD_BYTES / rate)

    def reduce(number: int, shard: int, inputs: Sequence[tuple[PeerId, float, bytes]]) -> Reduction:
        return Reduction(small_shard(b"".join(payload for _, _, payload in inputs)))

    terms = RoundTerms("mean", shards, deadline_s)
    return Stream(STREAM, terms, SMALL_BYTES, reduce, lambda number, shard, payload: True)


def require_complete(outcomes: Sequence[RoundOutcome], members: int) -> None:
    """Raise `NotMeasured` unless all members completed the round together."""
    ends = collections.Counter((each.status, len(each.participants)) for each in outcomes)
    if set(ends) != {("ok", members)}:
        raise NotMeasured(f"a round of {members} members ended with (status, members): {ends}")
