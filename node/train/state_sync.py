"""A node's state in the run: the state it serves and adopts, what it missed, and how far the run is.

Everything here is the same in a process and in the simulator; what computes goes through the injected `compute`.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import safetensors.torch
import torch

from farflock.node.train.driver import Driver
from farflock.node.train.exchange_client import ExchangeClient
from farflock.optimizers.method import Exchange, ExchangeKey, Progress, RandomGroups, Result, State
from farflock.optimizers.parts.state import WrongState, counter, state_hash
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import DownloadProgress, Snapshot

STATE = "state"  # the name under which a method's whole state is served
MARK = "mark."  # in a snapshot, before a name of `StateSync.marks`
NEXT = "next."  # in a snapshot, before a stream's name: its first round that is not in the state
CHUNK_BYTES = 1024 * 1024
STATE_COPIES = 8  # of the model in fp32: methods keep one to four, with moments and anchors
HEAD_BYTES = 1024 * 1024  # names, shapes and counters

log = logging.getLogger(__name__)


class CorruptSnapshot(Exception):
    """A downloaded snapshot that is not what its hash says, or not a state at all."""


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How far a node is in its run: by stream, the last round in its method's state; the run's agreed tokens after them, this
    node's own tokens since then, and how many members it last knew."""

    rounds: dict[str, int] = field(default_factory=dict)
    agreed_tokens: int = 0
    own_tokens: int = 0
    members: int = 1


class ContributionLog(Protocol):
    """What a stage's contributions are made of: the first stream's notes (node/train/microbatch_ids.py)."""

    def brought(self, number: int) -> bytes:
        """The notes of my contribution to this round, which is being made now."""
        ...

    def closing(self, number: int, noted: bytes) -> None:
        """A round with these notes is about to be applied, by who calls this."""
        ...

    def closed(self, number: int, noted: bytes) -> None:
        """A round is over, and these are its notes; called by whoever applied it."""
        ...


class StateSync:
    """One node's place in one run, for one method; of one stage of the model with its `contributions`, or of all of it."""

    def __init__(
        self,
        peer: Peer,
        driver: Driver,
        exchange_client: ExchangeClient,
        compute: Callable[[Callable[[], Any]], Awaitable[Any]],
        stage: int | None = None,
        contributions: ContributionLog | None = None,
    ) -> None:
        self._peer, self._driver, self._exchange_client, self._compute = peer, driver, exchange_client, compute
        self._stage, self._contributions = stage, contributions
        self._state_name = STATE if stage is None else f"{STATE}/{stage}"
        self._streams = driver.method.streams(driver.replica)
        self._before = {entry.key.stream: entry.key.round - entry.stride for entry in self._streams}
        self._applied = self._before.copy()  # by stream, the last round in the method's state
        self._agreed_tokens = 0
        self._own_tokens = 0  # mine since those
        self._offered: dict[ExchangeKey, int] = {}
        self.members = 1
        self.marks: dict[str, int] = {}  # numbers that go with the state: who adopts it has them too

    def open(self, rounds: Mapping[str, int] | None = None, tokens: int = 0) -> None:
        """Begin all streams of the method, after these rounds of them, and serve its state to joiners."""
        self._applied, self._agreed_tokens, self._own_tokens = {**self._before, **(rounds or {})}, tokens, 0
        for number, template in enumerate(self._streams):
            noted = self._contributions is not None and not number
            self._exchange_client.open(
                template, self._applied[template.key.stream], 0 if number else tokens, noted=noted
            )
        self._peer.context.progress_tokens = self._estimate
        self._peer.snapshots.serve(self._state_name, self._snapshot)

    @property
    def place(self) -> RunPosition:
        """What a checkpoint remembers of the run."""
        return RunPosition(dict(self._applied), self._agreed_tokens, self._own_tokens, self.members)

    @property
    def feedback(self) -> State:
        """What a checkpoint remembers of what this node owes the others as their reducer."""
        return self._exchange_client.memory()

    def load_state(self, place: RunPosition, feedback: State) -> None:
        """Open the streams again where a checkpoint was written."""
        self.open(place.rounds, place.agreed_tokens)
        self._exchange_client.load_state(feedback)
        self._own_tokens, self.members = place.own_tokens, place.members

    @property
    def applied_round(self) -> int:
        """The last round of any stream in the method's state; below 0 before the first."""
        return max(self._applied.values(), default=-1)

    def trained(self, tokens: int) -> None:
        """Count tokens of a local step. The dead train none, although the view still lists them."""
        self._own_tokens += tokens
        port = self._peer.context
        newest = port.chain.newest if port.chain is not None else None
        peers = [newest.peers[index] for index in newest.serving(self._stage)] if newest else [port.me]
        self.members = sum(port.life(peer) != "dead" for peer in peers)

    def progress(self, step: int) -> Progress:
        """Where the run is: the agreed tokens, and what everybody has presumably trained since."""
        return Progress(step, self._estimate(), self._peer.run_s())

    def _estimate(self) -> int:
        return self._agreed_tokens + self._own_tokens * self.members

    async def run_exchange(self, exchange: Exchange) -> Result:
        """Take an exchange to the swarm; `OutOfStep` if this node must adopt a snapshot first. The tokens go with the
        method's first stream: members of a collective offer those since the last one that was taken, pairs compare
        what they believe of the whole run."""
        method, replica, key = self._driver.method, self._driver.replica, exchange.key
        first = key.stream == self._streams[0].key.stream
        noted = self._contributions.brought(key.round) if self._contributions is not None and first else b""
        exact, pairs = method.equality == "exact", isinstance(exchange.group, RandomGroups)
        state = await self._compute(lambda: state_hash(method.agreed(replica, key.stream))) if exact else b""
        own = self._own_tokens if first else 0
        self._offered[key] = own
        return await self._exchange_client.run_exchange(exchange, self._estimate() if pairs else own, state, noted)

    def applying(self, key: ExchangeKey, result: Result) -> None:
        """Called by the worker before it applies a result."""
        if self._contributions is not None and key.stream == self._streams[0].key.stream:
            self._contributions.closing(key.round, result.notes)

    def applied(self, key: ExchangeKey, result: Result) -> None:
        """Note what a result, which is in the method's state now, says of the run's progress. Called by the worker that applied
        it, so that no snapshot has the one without the other."""
        (template,) = [entry for entry in self._streams if entry.key.stream == key.stream]
        pairs = isinstance(template.group, RandomGroups)
        offered = self._offered.pop(key, 0)
        self._applied[key.stream] = max(self._applied[key.stream], result.next_round - template.stride)
        if self._contributions is not None and template is self._streams[0]:
            self._contributions.closed(key.round, result.notes)
        if result.status == "failed" and not result.tokens:
            return
        self._agreed_tokens = max(self._agreed_tokens, result.tokens)
        if result.taken or pairs:
            self._own_tokens -= offered

    @property
    def next_rounds(self) -> dict[str, int]:
        """The first round of each stream that is not in the method's state, by the name that the swarm has for the stream."""
        applied = self._applied
        return {
            self._exchange_client.name(entry.key.stream): applied[entry.key.stream] + entry.stride
            for entry in self._streams
        }

    @property
    def patience_s(self) -> float:
        """How long an exchange of this method may take that can be had in time."""
        return max((entry.deadline_s for entry in self._streams), default=0.0)

    @property
    def is_busy(self) -> bool:
        """Whether an exchange of this node's has no applied result yet."""
        return bool(self._driver.pending)

    @property
    def is_behind(self) -> bool:
        """Whether a round is known to be decided that is not in the method's state, and no exchange of its stream is open."""
        busy = {pending.stream for pending in self._driver.pending}
        names = [entry.key.stream for entry in self._streams if entry.key.stream not in busy]
        return any(self._exchange_client.newest(name) > self._applied[name] for name in names)

    def missed(self) -> tuple[ExchangeKey, Result] | None:
        """The next round that was decided without this node, if its stream is idle and the content is here; of several streams'
        the first on their axis."""
        busy = {pending.stream for pending in self._driver.pending}
        idle = [template for template in self._streams if template.key.stream not in busy]
        keys = [ExchangeKey(entry.key.stream, self._applied[entry.key.stream] + entry.stride) for entry in idle]
        for key in sorted(keys, key=lambda key: key.round):
            result = self._exchange_client.replay(key.stream, key.round)
            if result is not None:
                return key, result
        return None

    async def adopt(self, timeout_s: float, downloaded: DownloadProgress = lambda here, total: None) -> None:
        """Download the run's state, verify it and make it ours: pending exchanges and local work are given up.

        A snapshot that is not what its hash says, or fits another model, is not used, and another one is asked for."""
        method, replica = self._driver.method, self._driver.replica
        async with asyncio.timeout(timeout_s):
            while True:
                least, most = self._peer.reach(self._stage), most_state_bytes(replica.shapes)
                snapshot = await self._peer.snapshots.fetch(
                    self._state_name, timeout_s, downloaded, least, self._stage, most
                )
                try:
                    state = decode_state(snapshot)
                    rounds = self._rounds_in(state)
                    await self._compute(lambda: method.restore(replica, state, "adopt"))  # noqa: B023 - awaited here
                    break
                except (CorruptSnapshot, WrongState) as error:
                    log.warning("a snapshot is not used: %s", error)
                    self._peer.snapshots.distrust(self._state_name)
        self._driver.forget()
        self._offered.clear()
        self.open(rounds, snapshot.tokens)

    def _rounds_in(self, state: State) -> dict[str, int]:
        """By stream, the last round in a snapshot; its entries are taken out, for no method knows them."""
        found = {entry.key.stream: counter(NEXT + entry.key.stream, state) - entry.stride for entry in self._streams}
        for name in found:
            del state[NEXT + name]
        self.marks = {name[len(MARK) :]: int(state.pop(name)) for name in list(state) if name.startswith(MARK)}
        return found

    async def _snapshot(self) -> Snapshot:
        return await self._compute(self._snapshot_now)  # type: ignore[no-any-return]

    def _snapshot_now(self) -> Snapshot:
        """In the worker that applies results: the state and the rounds that are in it belong together."""
        driver = self._driver
        state = driver.method.snapshot(driver.replica)
        for entry in self._streams:
            state[NEXT + entry.key.stream] = torch.tensor(self._applied[entry.key.stream] + entry.stride)
        state |= {MARK + name: torch.tensor(number) for name, number in self.marks.items()}
        return encode_state(state, min(self._applied.values(), default=-1), self._agreed_tokens)


def most_state_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What the state of any method takes at most for parameters of these shapes: whoever serves more is not downloaded."""
    return HEAD_BYTES + STATE_COPIES * 4 * sum(math.prod(shape) for shape in shapes.values())


def encode_state(state: State, round_number: int, tokens: int) -> Snapshot:
    """These tensors as they are served, as of a round (less than 0: before the first)."""
    encoded = safetensors.torch.save(dict(state))
    chunks = tuple(encoded[at : at + CHUNK_BYTES] for at in range(0, len(encoded), CHUNK_BYTES))
    return Snapshot(max(round_number, -1), state_hash(state), tokens, chunks)


def decode_state(snapshot: Snapshot) -> State:
    """A snapshot's tensors, verified against its hash; `CorruptSnapshot` otherwise. safetensors runs no code."""
    try:
        state = safetensors.torch.load(b"".join(snapshot.chunks))
    except (safetensors.SafetensorError, ValueError) as error:
        raise CorruptSnapshot(f"the snapshot of round {snapshot.round} cannot be read: {error}") from None
    if state_hash(state) != snapshot.state:
        raise CorruptSnapshot(f"the snapshot of round {snapshot.round} is not what its hash says; ask another member")
    return state
