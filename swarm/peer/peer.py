"""One peer of a run: its receive and tick loops, and the few calls that a node makes.

Every decision is made sans I/O (`collective`, `pair`, `decide`, `views`); this file and the glue
next to it only pass in messages and time. It runs unchanged on real links and on the simulator's.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, get_args

from farflock.swarm import messages
from farflock.swarm.chunk_store import Store
from farflock.swarm.compute import Compute, inline
from farflock.swarm.directory import Directory
from farflock.swarm.frame import Frame, ProtocolViolation, unpack
from farflock.swarm.identity import Identity
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import Key, Message, Offer
from farflock.swarm.peer.absences import Absences
from farflock.swarm.peer.branching import Branching
from farflock.swarm.peer.calls import Calls
from farflock.swarm.peer.codec_offers import CodecOffers
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.data_holders import DataHolders
from farflock.swarm.peer.evaluations import Evaluations
from farflock.swarm.peer.load_reports import LoadReports
from farflock.swarm.peer.membership import Membership
from farflock.swarm.peer.pairing import Pairing
from farflock.swarm.peer.round_log import work_pin
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.peer.snapshots import Snapshots
from farflock.swarm.peer.tallies import Tallies
from farflock.swarm.protocol.exchange.streams import RoundOutcome, Stream
from farflock.swarm.protocol.views import VIEW_STREAM
from farflock.swarm.tasks import cancel

TICK_S = 0.1  # short against the resend times, so that repeats are hardly late
LOOK_EVERY = 5  # ticks between checks for branches: those wait for minutes, and a check is costly
REST_TURNS = 2 * LOOK_EVERY  # between ticks while nothing is under way
ANNOUNCE_EVERY_S = 15.0  # well within a record's lifetime, so that one may be lost
STAY_S = 5.0  # a leaving peer stays this long at most for members that need it for a quorum
HAND_OVER_S = 1.0  # time to hand over the last decision, which no other peer could tell them
GOODBYE_S = 0.2  # time to send goodbyes, and to receive those of peers leaving along with us
STORE_BYTES = 256 * 1024 * 1024
MAX_ASKED = 8  # peers asked for a snapshot at once: enough to compare, few enough to answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunTerms:
    """Terms known to all peers of a run; after `branch_after_s` without a quorum they branch.

    A view holds for at least `view_s`."""

    run: str
    seed: int
    view_s: float = 30.0
    branch_after_s: float = 600.0


@dataclass(frozen=True, slots=True)
class OpenWait:
    """An exchange that this peer waits for, from whom, and the seconds left."""

    what: Key
    whom: tuple[PeerId, ...]
    left_s: float


class Peer:
    """A member of one run, or a candidate. Use as `async with peer.running():`."""

    def __init__(
        self,
        terms: RunTerms,
        identity: Identity,
        links: Links,
        directory: Directory | None,
        *,
        incarnation: int,
        record: Callable[[], bytes],
        compute: Compute = inline,
        store_bytes: int = STORE_BYTES,
    ) -> None:
        self.terms, self._directory = terms, directory
        self.tasks: dict[asyncio.Task[None], None] = {}
        store = Store(store_bytes)
        self.context = PeerContext(
            terms.run, terms.seed, incarnation, links, store, self._spawn, compute
        )
        self.membership = Membership(self.context, identity, terms.view_s)
        self.membership.book.make = record
        self.rounds = Rounds(self.context)
        self.pairing = Pairing(self.context)
        self.calls = Calls(self.context)
        self.tallies = Tallies(self.context)
        self.absences = Absences(
            self.context, lambda name: name in self.rounds.names or name in self.pairing.streams
        )
        self.absences.watch(self.rounds.streams)
        self.evaluations = Evaluations(self.context, self.rounds.newest)
        self.loads = LoadReports(self.context)
        self.codec_offers = CodecOffers(self.context)
        self.data_holders = DataHolders(self.context)
        self.snapshots = Snapshots(self.context, self._askable)
        self.branching = Branching(
            self.context,
            identity,
            self.membership,
            self.rounds,
            self.pairing,
            self.snapshots,
            terms.branch_after_s,
        )
        self.router = self._make_router()
        self.ticks = Ticks(self.membership, self.rounds, self.calls, self.loads)
        self.failure: BaseException | None = None  # a bug in one of our tasks, raised by `running`

    def _make_router(self) -> "Router":
        """Return a router that knows which part handles which messages."""
        router, snapshots = Router(self.context, self.membership, self.rounds), self.snapshots
        router.add(self.branching.receive, *get_args(messages.BranchMessage))
        router.add(self.branching.returning.receive, *get_args(messages.ReturnMessage))
        router.add(self.calls.receive, *get_args(messages.CallMessage))
        router.add(self.data_holders.receive, *get_args(messages.DataMessage))
        router.add(self.membership.introductions.receive, *get_args(messages.IntroductionMessage))
        router.add_exchange(
            lambda sender, _, said: snapshots.receive(sender, said),
            *get_args(messages.SnapshotMessage),
        )
        router.add_exchange(self.pairing.receive, *get_args(messages.PairMessage))
        router.add_exchange(self.loads.receive, messages.Load)
        router.add_exchange(self.codec_offers.receive, messages.Reads)
        router.add_exchange(self.tallies.receive, messages.Tally)
        router.add_exchange(self.absences.receive, messages.Away)
        router.add_exchange(self.evaluations.receive, *get_args(messages.EvaluationMessage))
        return router

    @property
    def me(self) -> PeerId:
        """The id of this peer."""
        return self.context.me

    # the run

    def found(self) -> None:
        """Start the run: view 0 has this peer as its only member."""
        self.membership.book.renew()
        self.membership.found()

    async def meet(self, records: Sequence[bytes], timeout_s: float) -> None:
        """Learn the run's views from these members; raise `TimeoutError` if none answers in time.

        A newcomer downloads the state first: a view of members without it could lose it."""
        self.membership.book.renew()
        for blob in records:
            self.membership.book.learn(blob)
        self.membership.admission.watching = True
        async with asyncio.timeout(timeout_s):
            await self.membership.known.wait()

    def ask_in(self) -> None:
        """Ask the members for admission until they admit this peer. `on_full` of `admission` is
        called if the run has become full since there was room, and may raise."""
        admission = self.membership.admission
        if admission.is_full:
            admission.on_full()
        self.ticks.stirred.set()
        admission.wants_in = True

    async def join(self, records: Sequence[bytes], timeout_s: float) -> None:
        """Meet the run and ask for admission at once: for peers that need no state."""
        await self.meet(records, timeout_s)
        self.ask_in()

    @property
    def alone(self) -> bool:
        """True if no other member of the newest view is known to be alive."""
        others = (peer for peer in self.context.views.newest.peers if peer != self.me)
        return all(self.context.life(peer) in ("suspect", "dead", "unknown") for peer in others)

    def leave(self) -> None:
        """Say goodbye; the next view will not contain this peer."""
        self.ticks.stirred.set()
        self.membership.admission.leave()

    async def leave_gracefully(self) -> None:
        """Say goodbye and stay until the others can decide alone, but for `STAY_S` at most."""
        alone, now = self.context.chain is None or self.alone, self.context.now
        self.leave()
        until_s, goes_s = now() + STAY_S, now() + GOODBYE_S
        # Each look at which the others need this peer extends the stay, up to `until_s`.
        while not alone and now() < min(until_s, goes_s):
            goes_s = now() + HAND_OVER_S if self._is_needed() else goes_s
            self.membership.sync.repeat_newest()
            await asyncio.sleep(TICK_S)

    def _is_needed(self) -> bool:
        """True if the newest view, or one of an open round, has no quorum without this peer."""
        return any(
            self.membership.admission.is_needed_in(view)
            for view in (self.context.views.newest, *self.rounds.next_views())
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Peer"]:
        """Receive, tick and announce while the block runs; end every task of this peer with it."""
        owner = asyncio.current_task()
        assert owner is not None
        self._owner = owner
        for loop in (self._receive_loop(), self._tick_loop(), self._announce_loop()):
            self._spawn(loop)
        try:
            yield self
        except asyncio.CancelledError:
            if self.failure is not None:
                owner.uncancel()
                raise self.failure from None
            raise
        finally:
            await cancel(*self.tasks)

    # exchanges

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin a stream, or begin it again after adopting a snapshot of `after_round`."""
        self.ticks.stirred.set()
        if stream.is_paired:
            self.pairing.open(stream, after_round)
        else:
            self.rounds.open(stream, after_round, tokens)
        self.branching.opened(stream.name)

    async def exchange(
        self,
        name: str,
        number: int,
        shards: Sequence[bytes],
        *,
        weight: float = 1.0,
        tokens: int = 0,
        state: bytes = b"",
    ) -> RoundOutcome:
        """Bring encoded shards to a round of a stream and return its outcome.

        A pair's ends by the stream's deadline; a collective's when the round is decided, however
        late: the caller trains on meanwhile. It is lost if this peer gave up the chain of views
        that its state belongs to, until the stream is opened again."""
        self.ticks.stirred.set()
        key = Key(name, number)
        if name in self.branching.adrift:
            return RoundOutcome(key, "lost", number + 1)
        paired = self.pairing.streams.get(name)
        is_over = not paired and number <= self.rounds.newest(name)
        if is_over and not self.absences.is_behind(name):
            self.absences.come_back([(name, self.rounds.newest(name) + 1)])  # they went on without
        stream = paired or self.rounds.streams[name].stream
        bundles = self.context.bundles.put(stream.terms.cut, shards, work_pin(key))
        digests, sizes = tuple(digest for digest, _ in bundles), tuple(size for _, size in bundles)
        measured = None if paired else self.context.measured.get(name)
        offer = Offer(key, bytes(32), digests, sizes, weight, tokens, state, measured)
        return await (self.pairing if paired else self.rounds).exchange(name, offer)

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """Return a decided collective round from the log, or that it is lost, as it has left the
        log; None if it is not decided here."""
        known = name not in self.pairing.streams and name not in self.branching.adrift
        return self.rounds.decided(name, number) if known else None

    def has_passed(self, name: str, number: int) -> bool:
        """Return whether a collective round is known to be decided, here or at others; never a
        pair's, whose rounds are its own."""
        state = self.rounds.streams.get(name)
        return state is not None and state.has_passed(number)

    def reach(self, stage: int | None = None) -> int:
        """Return the earliest round from which logs can bring a state of `stage` up to date.

        `stage` None is the whole model. An adopted snapshot must not be older. -1 without
        streams."""
        return self.rounds.reach(stage)

    def waits(self) -> list[OpenWait]:
        """Return the exchanges that this peer waits for, as `status` prints them."""
        now_s = self.context.now()
        entries = self.rounds.waits() + self.pairing.waits()
        return [OpenWait(key, whom, ends_s - now_s) for key, whom, ends_s in entries]

    def run_s(self) -> float:
        """Return the run time in seconds."""
        return self.membership.clock.run_s(self.context.now())

    # loops

    async def _receive_loop(self) -> None:
        while True:
            sender, packed = await self.context.links.receive()
            try:
                frame = unpack(packed)
            except ProtocolViolation as error:
                self.context.drop("bad frame")
                log.debug("a bad frame from %s, dropped: %s", sender, error)
                continue
            self.router.deliver(sender, frame)
            if not isinstance(frame.message, messages.TimeMessage):
                self.ticks.stirred.set()

    async def _tick_loop(self) -> None:
        while True:
            self.membership.tick()
            self.calls.tick()
            if self.context.chain is not None:
                if self.ticks.turn % LOOK_EVERY == 0:
                    self.branching.tick()
                self.rounds.tick()
                self.tallies.tick()
                self.absences.tick()
                self.evaluations.tick()
                self.loads.tick()
                self.codec_offers.tick()
            await self.ticks.wait()

    async def _announce_loop(self) -> None:
        """Keep this peer's record in the directory, and learn those of others from it."""
        while self._directory is not None:
            await self._directory.announce(self.terms.run, self.membership.book.make())
            for blob in await self._directory.peers(self.terms.run):
                self.membership.book.learn(blob)
            await asyncio.sleep(ANNOUNCE_EVERY_S)

    def _askable(self, stage: int | None) -> list[PeerId]:
        """Return a few live peers that may have the state of a stage (None: of the whole model)."""
        chain = self.context.chain
        members = list(self.membership.records)
        if chain is not None:
            members = [chain.newest.peers[index] for index in chain.newest.serving(stage)]
        others = (peer for peer in members if peer != self.me)
        askable = (peer for peer in others if self.context.life(peer) != "dead")
        return list(itertools.islice(askable, MAX_ASKED))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks[task] = None
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the whole peer, loudly, if one of its tasks failed: that is a bug."""
        del self.tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is not None and self.failure is None:  # the first failure causes the others
            log.error("a task of peer %s failed; the peer ends", self.me, exc_info=error)
            self.failure = error
            self._owner.cancel()


# (sender, its incarnation, a message of one of the types that the receiver was added for)
Receive = Callable[[PeerId, int, Any], None]


class Router:
    """Hands each message to the part of a peer that handles its type."""

    def __init__(self, context: PeerContext, membership: Membership, rounds: Rounds) -> None:
        self._context, self._membership, self._rounds = context, membership, rounds
        # Read-only between additions: the peer is watched for tables that grow as messages arrive.
        self._receivers: Mapping[type[Message], Receive] = MappingProxyType({})
        self.add(membership.receive, *get_args(messages.ViewMessage | messages.TimeMessage))
        self.add(self._receive_vote, *get_args(messages.PaxosMessage))
        self.add_exchange(rounds.receive, *get_args(messages.ContentMessage | messages.LogMessage))

    @property
    def kinds(self) -> frozenset[type[Message]]:
        """The message types that have a receiver."""
        return frozenset({*self._receivers, *get_args(messages.ChunkMessage)})

    def add(self, receive: Receive, *kinds: type[Message]) -> None:
        """Route messages of these types to `receive` from now on."""
        for kind in kinds:
            assert kind not in self._receivers, f"{kind.__name__} has a receiver already"
        self._receivers = MappingProxyType({**self._receivers, **dict.fromkeys(kinds, receive)})

    def add_exchange(self, receive: Receive, *kinds: type[Message]) -> None:
        """Add a receiver for messages about exchanges and states, which need a view."""
        self.add(lambda *received: self._receive_in_view(receive, *received), *kinds)

    def deliver(self, sender: PeerId, frame: Frame) -> None:
        """Pass a frame's message to its receiver."""
        message = frame.message
        if isinstance(message, messages.ChunkMessage):
            self._context.chunks.receive(sender, message, frame.body)
        else:
            self._receivers[type(message)](sender, frame.incarnation, message)

    def _receive_vote(self, sender: PeerId, incarnation: int, vote: messages.PaxosMessage) -> None:
        """Handle a vote on the next view or on a round's close list."""
        if vote.key.stream == VIEW_STREAM:
            self._membership.receive(sender, incarnation, vote)
        else:
            self._receive_in_view(self._rounds.receive, sender, incarnation, vote)

    def _receive_in_view(
        self, receive: Receive, sender: PeerId, incarnation: int, message: Message
    ) -> None:
        """Pass on a message; if its view is not current here, find out which side lags."""
        if self._context.chain is None:
            return
        stale = self._context.counters["stale view"]
        receive(sender, incarnation, message)
        view = view_hash_of(message)
        if view is not None and self._context.counters["stale view"] > stale:
            self._membership.sync.reconcile(sender, view)


def view_hash_of(message: Message) -> bytes | None:
    """Return the hash of the view that a message names; None if it names none."""
    if isinstance(message, messages.PairPropose | messages.PairAccept):
        return message.offer.view
    if isinstance(message, messages.ContentMessage | messages.PaxosMessage | messages.StateOffer):
        return message.view
    return None


class Ticks:
    """Numbers the turns of one peer's ticks, and waits for the next.

    With `rests`, only every `REST_TURNS`-th comes while no round, call or change of members is
    under way; `stirred` brings back the next. Simulations do not rest: their bits depend on the
    times of ticks."""

    def __init__(
        self,
        membership: Membership,
        rounds: Rounds,
        calls: Calls,
        loads: LoadReports,
    ) -> None:
        self.rests = False
        self.stirred = asyncio.Event()  # set by whatever may need the next tick
        self.turn = 0
        self._membership, self._rounds, self._calls = membership, rounds, calls
        self._loads = loads

    async def wait(self) -> None:
        """Wait for the next turn that has a tick."""
        if not (self.rests and self._is_quiet()):
            await asyncio.sleep(TICK_S)
            self.turn += 1
            return
        now = asyncio.get_running_loop().time
        begun_s, turns = now(), REST_TURNS - self.turn % REST_TURNS
        self.stirred.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(turns * TICK_S):
                await self.stirred.wait()
            lasted_s = now() - begun_s
            turns = min(turns, int(lasted_s / TICK_S) + 1)
            await asyncio.sleep(max(0.0, turns * TICK_S - lasted_s))
        self.turn += turns

    def _is_quiet(self) -> bool:
        return (
            not self._rounds.machines
            and not self._calls.is_busy
            and self._membership.is_settled
            and not self._loads.mine
        )
