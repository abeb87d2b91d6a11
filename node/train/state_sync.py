"""A node's state in a run: it is served to newcomers, replaced by another peer's, and brought up to
date by replaying missed rounds.

The code is the same in a process and in the simulator; long work goes through the injected
`compute`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from farflock.node.model.replica import Storage, drop_spoiled, in_memory
from farflock.node.state.cut import Cut
from farflock.node.state.spool import Malformed, room, spooled, tensors_of
from farflock.node.train.absence import STALL_S
from farflock.node.train.driver import Apply, Driver, RunPosition
from farflock.node.train.ending import EndingLoop, drop, replay
from farflock.node.train.exchange_client import ExchangeClient, OutOfStep
from farflock.node.train.held_state import OwnHeldState
from farflock.optimizers.method import Exchange, ExchangeKey, Result, State
from farflock.optimizers.parts.state import WrongState, counter, state_hash
from farflock.optimizers.parts.stateful import live_state
from farflock.swarm.compute import Compute
from farflock.swarm.peer.absences import Absences
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.pairing import Pairing
from farflock.swarm.peer.round_log import KeptRounds, traffic_of
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.peer.snapshots import DownloadProgress, Snapshot, Snapshots
from farflock.swarm.peer.state_download import SILENT_S
from farflock.swarm.protocol.exchange.streams import Cadence
from farflock.swarm.tasks import cancel

STATE = "state"  # the name under which a method's whole state is served
MARK = "mark."  # prefix of `StateSync.marks` in a snapshot
NEXT = "next."  # prefix of a stream's first round that is not in the snapshot
# Nothing may come to a member for so long: it waits for the end of a partition, where a newcomer
# ends and is started again.
MEMBER_SILENT_S = 300.0
LOOK_EVERY_S = 0.05  # for the count that a state waits for
MAX_WRONG_STATES = 8  # downloaded one after the other, before a peer gives up
STATE_COPIES = 8  # of the model in fp32: methods keep one to four, with moments and anchors
HEAD_BYTES = 1024 * 1024  # names, shapes and counters
WhatLeaves = TypeVar("WhatLeaves")
UNKNOWN = b""  # hash of a state that is not written yet
# Members cut an exact state after the same rounds, each of which ends so many, so that a newcomer
# reads the same chunks from all of them; or where they are, if none comes so soon.
COMMON_ROUNDS = 4
COMMON_S = 5.0
LOOK_S = 0.05
# Looks at which nothing was missing, after which a node has caught up although nobody said so: a
# newcomer's, and a member's, which hears of rounds as they begin.
CALM_LOOKS, MEMBER_CALM_LOOKS = 100, 4

log = logging.getLogger(__name__)


class CorruptSnapshot(Exception):
    """A downloaded snapshot that does not match its hash or does not hold a state."""


class StatePeer(Protocol):
    """A peer, as its node's state sync sees it (swarm/peer/peer.py)."""

    context: PeerContext
    snapshots: Snapshots
    absences: Absences
    pairing: Pairing
    rounds: Rounds

    def reach(self, stage: int | None = None) -> int:
        """Return the earliest round whose snapshot the logs of a stage's streams can continue;
        -1 if there are no streams."""
        ...


@dataclass(frozen=True, slots=True)
class Spool:
    """Where snapshots for joiners are kept, and the worker that writes them: one at a time, since
    whoever changes the state waits for it."""

    compute: Compute
    storage: Storage = in_memory
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Landing:
    """The memory that a download is in."""

    storage: Storage
    file: memoryview = field(default_factory=lambda: memoryview(b""))

    def room(self, size: int) -> memoryview:
        """Return memory for the next attempt."""
        self.file = room(size, self.storage)
        return self.file


@dataclass(slots=True)
class _CommonCut:
    """A cut that is waited for."""

    made: tuple[Cut, Snapshot] | None = None


class StateSync:
    """One node's state in one run: that of its exchange client's stage, or of the whole model."""

    def __init__(
        self,
        peer: StatePeer,
        driver: Driver,
        client: ExchangeClient,
        compute: Compute,
        spool: Spool | None = None,
    ) -> None:
        self._peer, self._driver, self._client, self._compute = peer, driver, client, compute
        self.spool = spool or Spool(compute)
        self._state_name = STATE if client.stage is None else f"{STATE}/{client.stage}"
        self._opened = False
        self._common: _CommonCut | None = None
        driver.applied = self._cut_if_common
        self.loop: EndingLoop | None = None  # which applies rounds
        self._rounds = KeptRounds(peer.rounds.streams, client.stage)
        self.marks: dict[str, int] = {}  # numbers that a peer adopts with the state
        self.may_leave: Callable[[], bool] | None = None  # None: always; asked in the worker
        self._readers = 0  # that wait until it may
        self.held = OwnHeldState(peer.context, driver, client.stage, compute, self._state)

    def open(self, rounds: Mapping[str, int] | None = None, tokens: int = 0) -> None:
        """Open all streams of the method after these rounds, and serve this node's state to
        newcomers."""
        self._opened = True
        self._driver.begin(rounds or {}, tokens)
        begun = self._driver.position.rounds
        for number, template in enumerate(self._driver.streams):
            noted = self._driver.contributions is not None and not number
            self._client.open(
                template, begun[template.key.stream], 0 if number else tokens, noted=noted
            )
        self.held.open()
        later = self._rounds if self._is_exact else None
        traffic = partial(traffic_of, self._peer.rounds.streams, self._client.stage)
        self._peer.snapshots.serve(self._state_name, self._snapshot, rounds=later, traffic=traffic)

    @property
    def _is_exact(self) -> bool:
        """True if all members hold the same state."""
        return self._driver.method.equality == "exact"

    @property
    def feedback(self) -> State:
        """This node's residuals as a reducer, for a checkpoint."""
        return self._client.feedback()

    def load_state(self, position: RunPosition, feedback: State) -> None:
        """Open the streams where a checkpoint was written, and restore the residuals. A round whose
        result is in it, and has yet to be applied, is over: nobody decides it again."""
        known, strides = position, {each.key.stream: each.stride for each in self._driver.streams}
        for pending in self._driver.table:
            if pending.result is not None:
                name = pending.exchange.key.stream
                known = known.after(name, strides[name], pending.result)
        self.open(known.rounds, known.agreed_tokens)
        self._client.load_state(feedback)
        self._driver.load_position(position)

    @property
    def applied_round(self) -> int:
        """The last applied round of any stream; negative before the first."""
        return max(self._driver.position.rounds.values(), default=-1)

    @property
    def next_rounds(self) -> dict[str, int]:
        """The first round of each stream that is not applied, by the stream's name in the swarm."""
        return {self._client.name(key.stream): key.round for key in self._next_keys()}

    @property
    def is_behind(self) -> bool:
        """True if a decided round is not applied and no exchange of its stream is open."""
        return any(self._client.has_passed(key) for key in self._next_keys(idle=True))

    def missed(self) -> Apply | None:
        """Return the next round that was decided without this node, or None. Its stream has no
        open exchange and its content is here; of several streams, the one with the lowest round
        comes first."""
        for key in sorted(self._next_keys(idle=True), key=lambda key: key.round):
            result = self._client.replay(key.stream, key.round)
            if result is not None:
                return self._driver.missed(key, result)
        return None

    def _next_keys(self, *, idle: bool = False) -> list[ExchangeKey]:
        busy = {pending.stream for pending in self._driver.pending} if idle else set()
        rounds = self._driver.position.rounds
        keys = [
            ExchangeKey(entry.key.stream, rounds[entry.key.stream] + entry.stride)
            for entry in self._driver.streams
        ]
        return [key for key in keys if key.stream not in busy]

    async def adopt(
        self,
        timeout_s: float | None = None,
        downloaded: DownloadProgress = lambda here, total: None,
        first: int = 0,
    ) -> None:
        """Replace this node's state with the run's, in which all rounds before `first` are; pending
        exchanges and local work are lost.

        Without `timeout_s` it may take any time, as long as something comes; else raise
        `SnapshotUnavailable`. A snapshot with a wrong hash or for another model is discarded and
        another one fetched. At a run's beginning, a peer with the same weights downloads nothing.
        """
        replica, stage = self._driver.replica, self._client.stage
        mine = await self._compute(self._beginning)
        landing, wrong = _Landing(self.spool.storage), 0
        min_round = min(rounds_before(self._driver.streams, first).values(), default=-1)
        async with self._absent(), asyncio.timeout(timeout_s):
            while True:
                self._rounds.keep()
                # from an older round the log could not be followed to the present
                oldest = max(min_round, self._peer.reach(stage))
                max_bytes = max_state_bytes(replica.shapes)
                snapshot = await self._peer.snapshots.fetch(
                    *(self._state_name, timeout_s, downloaded, oldest, stage, max_bytes, mine),
                    landing.room,
                    keep=not self._opened,  # a joiner's; a member may have other snapshots on disk
                    silent_s=MEMBER_SILENT_S if self._opened else SILENT_S,
                )
                if snapshot.state == mine:  # as at the beginning, or in this node's last life
                    self.open(self._driver.position.rounds, snapshot.tokens)
                    await self._catch_up()
                    return
                try:
                    async with self._peer.snapshots.reading(self._state_name):
                        rounds = await self._compute(partial(self._restore, snapshot, landing.file))
                        self.open(rounds, snapshot.tokens)
                        if await self._catch_up():
                            return
                        log.warning("the rounds since the adopted state do not come; trying again")
                        if self.loop is not None:  # what replayed rounds have begun
                            await drop(self.loop.under_way)
                except (CorruptSnapshot, WrongState) as error:
                    log.warning("discarded a downloaded snapshot, fetching another: %s", error)
                    self._peer.snapshots.distrust(self._state_name)
                    wrong += 1
                    if wrong == MAX_WRONG_STATES:
                        raise CorruptSnapshot(f"{wrong} states were of no use: {error}") from None

    async def _catch_up(self) -> bool:
        """Apply the rounds that were decided since the state that was adopted, until this node has
        all: before that, the others would wait for it in each round. Return False if one is known
        of which nothing comes, or that nobody has any more, or this node has not."""
        context, place, came_s = self._peer.context, self.next_rounds, self._peer.context.now()
        calm = MEMBER_CALM_LOOKS if context.is_member else CALM_LOOKS
        while self.loop is not None and calm:
            try:
                await replay(self.loop)
            except OutOfStep:
                return False
            came_s = max(came_s, context.chunks.last_heard_s)
            if self.next_rounds != place:
                place, came_s = self.next_rounds, context.now()
            if not self.is_behind and self._rounds.are_here():
                if self._rounds.are_followed():
                    break
                calm -= 1
            elif context.now() - came_s >= SILENT_S or self._peer.rounds.are_lost(
                self._client.stage
            ):
                return False
            await asyncio.sleep(LOOK_S)
        self._rounds.caught_up()
        return True

    @asynccontextmanager
    async def _absent(self) -> AsyncIterator[None]:
        """Let no member wait for this one while the block runs, once it takes long, nor in rounds
        that this one is past by then."""
        if not self._opened:
            yield
            return

        async def tell() -> None:
            await asyncio.sleep(STALL_S)
            self._peer.absences.leave(self.next_rounds.items())

        telling = asyncio.create_task(tell())
        try:
            yield
        finally:
            await cancel(telling)
        self._peer.absences.come_back(self.next_rounds.items())

    def _beginning(self) -> bytes | None:
        """Return the hash of the state with which this node would begin; None once it has."""
        return None if self._opened else state_hash(self._state())

    def _restore(self, snapshot: Snapshot, file: memoryview) -> dict[str, int]:
        """Take over a downloaded snapshot, in the worker; return each stream's last round."""
        state = _decoded(snapshot, file)
        rounds = self._rounds_in(state)
        with self._driver.cuts.changing():
            self._driver.method.restore(self._driver.replica, state, "adopt")
            drop_spoiled(self._driver.replica)
            self._driver.forget()
            return rounds | self._skipped(rounds)

    def _skipped(self, rounds: Mapping[str, int]) -> dict[str, int]:
        """Lead the method past rounds that are over for this peer although the state is older, and
        return them: a pair holds a round once, so a partner would not answer to it."""
        if not self._opened:
            return {}
        pairing = self._peer.pairing
        left = {name: pairing.left_round(self._client.name(name)) for name in rounds}
        over = {name: number for name, number in left.items() if number > rounds[name]}
        for name, number in over.items():
            self._driver.skip(ExchangeKey(name, number), Result("failed", number + 1))
        return over

    def _rounds_in(self, state: State) -> dict[str, int]:
        """Return each stream's last round in a snapshot, and remove entries unknown to methods."""
        found = {
            entry.key.stream: counter(NEXT + entry.key.stream, state) - entry.stride
            for entry in self._driver.streams
        }
        for name in found:
            del state[NEXT + name]
        self.marks = {
            name[len(MARK) :]: int(state.pop(name)) for name in list(state) if name.startswith(MARK)
        }
        return found

    async def _snapshot(self) -> Snapshot:
        """Return a snapshot of the current state. It is cut in the worker that applies results, so
        that the state and its rounds match, and written beside it."""
        async with self.spool.turn:
            common = await self._common_cut()
            cut, made = await self.leaving(self.cut) if common is None else common
            with self._driver.cuts.added(cut):
                write = partial(_written, cut, made, self.spool.storage)
                return await self.spool.compute(write)

    async def _common_cut(self) -> "tuple[Cut, Snapshot] | None":
        """Wait for a round after which the other members cut, too, and return that cut; None if
        there is nothing to wait for, or none came soon. A member that takes the state over has lost
        rounds already: it does not wait for one more."""
        members = self._peer.context.views.newest.serving(self._client.stage)
        waits = self._peer.snapshots.is_asked_by_newcomers(self._state_name)
        if not (self._is_exact and waits) or self._is_common() or len(members) == 1:
            return None
        common = self._common = _CommonCut()
        until_s = self._peer.context.now() + COMMON_S
        try:
            while common.made is None and self._peer.context.now() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_S)
        finally:
            self._common = None
        return common.made

    def _is_common(self) -> bool:
        return (self.applied_round + 1) % COMMON_ROUNDS == 0

    def _cut_if_common(self) -> None:
        """Cut the state, if that is waited for and its round is right; in the worker that applies
        results."""
        common = self._common
        if common is not None and common.made is None and self._is_common():
            common.made = self.cut()

    async def leaving(self, read: Callable[[], WhatLeaves]) -> WhatLeaves:
        """Return what `read` finds, in the worker, of a state that may leave."""
        found: list[WhatLeaves] = []

        def look() -> bool:
            found.extend([read()] if self.may_leave is None or self.may_leave() else ())
            return bool(found)

        self._readers += 1
        try:
            while not await self._compute(look):  # noqa: ASYNC110 - steps and rounds set no event
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._readers -= 1
        return found[0]

    async def let_leave(self) -> None:
        """Before a step that would make them wait again, let all go first who wait for a state that
        may leave."""
        may = self.may_leave or (lambda: False)
        while self._readers and may():  # noqa: ASYNC110 - they look now and then
            await asyncio.sleep(LOOK_EVERY_S / 5)

    def cut(self) -> tuple[Cut, Snapshot]:
        """Return a cut of the current state, which the driver keeps as it is, and its snapshot
        without the chunks: in the worker that applies results, which at a stage computes the passes
        too, so that none has put other weights in the place of the stage's own.

        Local steps do not change the shared state of exact methods. Their hash is known from the
        last round, but at a stage it would hold up passes."""
        driver, position, stage = self._driver, self._driver.position, self._client.stage
        exact = self._is_exact
        with nullcontext() if exact else driver.cuts.between_steps():
            state = self._state()
            cut = Cut(state)
            driver.cuts.add(cut, stepped=not exact)
        if self.spool.compute is self._compute:  # it is read after all that waits for this worker
            cut.save()
        known = state_hash(state) if exact and stage is None else UNKNOWN
        oldest = min(position.rounds.values(), default=-1)
        tokens, firsts = position.agreed_tokens, self.next_rounds
        return cut, Snapshot(max(oldest, -1), known, tokens, (), firsts=firsts)

    def _state(self) -> State:
        """Return what a snapshot holds, as it is stored."""
        state = dict(live_state(self._driver.method, self._driver.replica).shared)
        for key in self._next_keys():
            state[NEXT + key.stream] = torch.tensor(key.round)
        return state | {MARK + name: torch.tensor(number) for name, number in self.marks.items()}


def rounds_before(streams: Iterable[Exchange], first: int) -> dict[str, int]:
    """Return the last round before `first` of each of these streams."""
    cadences = {each.key.stream: Cadence(each.key.round, each.stride) for each in streams}
    return {name: cadence.upto(first - 1) for name, cadence in cadences.items()}


def _written(cut: Cut, made: Snapshot, storage: Storage) -> Snapshot:
    """Write a snapshot's chunks; hash its state, if that is unknown, from what was written."""
    file, chunks, digests = spooled(cut, storage)
    state = state_hash(tensors_of(file)) if made.state == UNKNOWN else made.state
    return replace(made, state=state, chunks=chunks, digests=digests)


def max_state_bytes(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return an upper bound on the size of any method's state for these shapes; a larger state
    is refused."""
    return HEAD_BYTES + STATE_COPIES * 4 * sum(math.prod(shape) for shape in shapes.values())


def encode_state(state: State, round_number: int, tokens: int) -> Snapshot:
    """Encode these tensors as a snapshot taken after a round (negative: before the first)."""
    _, chunks, digests = spooled(Cut(state), in_memory)
    return Snapshot(max(round_number, -1), state_hash(state), tokens, chunks, digests)


def decode_state(snapshot: Snapshot) -> State:
    """Return a snapshot's tensors; raise `CorruptSnapshot` for a wrong hash."""
    return _decoded(snapshot, memoryview(bytearray().join(snapshot.chunks)))


def _decoded(snapshot: Snapshot, file: memoryview) -> State:
    try:
        state = tensors_of(file)
    except Malformed as error:
        raise CorruptSnapshot(
            f"the snapshot of round {snapshot.round} cannot be read ({error}); ask another member"
        ) from None
    if state_hash(state) != snapshot.state:
        raise CorruptSnapshot(
            f"the snapshot of round {snapshot.round} does not match its hash; ask another member"
        )
    return state
