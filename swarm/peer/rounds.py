"""All collective exchanges of one peer: its streams, their logs, and what the node asks of them.

A stream's rounds form one log: round r+1 begins only where round r is decided, so a member that was
away learns what it missed in order (`catch_up`), and no contribution can count twice. An exchange
has no time-out of its own: it resolves when its round is decided and its content is here, or when
the round has left everybody's log (`lost`).

Read `Rounds.exchange` first, then `OpenRounds`: it routes messages to the machines of the open rounds
and carries out what these ask for.
"""

import asyncio
import functools
from collections.abc import Mapping

import msgspec

from farflock.swarm.chunks import STALL_S
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Decided,
    Forgotten,
    Holds,
    Key,
    LogMessage,
    LogQuery,
    Offer,
    PaxosMessage,
    Prepare,
    Propose,
    Reduced,
    ShardMessage,
)
from farflock.swarm.peer.catch_up import FETCH_TIMEOUT_S, HOPELESS_S, CatchUp
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import LoggedRound, OpenOffer, RoundLog, StreamState, outcome, work_pin
from farflock.swarm.protocol.exchange.actions import Action, Fetch, Reduce
from farflock.swarm.protocol.exchange.close_list import BadCloseList, last_shards
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.exchange.streams import Reduction, RoundOutcome, Stream
from farflock.swarm.protocol.groups import order, rotation
from farflock.swarm.protocol.log_truncation import LogTruncation, oldest_of
from farflock.swarm.protocol.views import View

# A peer that only looks on has no offer by which it would notice that it missed a decision.
ASK_ANYWAY_S = 2.0


class Rounds:
    """All collective exchanges of one peer."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._streams: dict[str, StreamState] = {}
        self.machines: dict[Key, Collective] = {}  # of the open rounds
        self._log = RoundLog(context, self.machines)
        self._catch_up = CatchUp(context, self._log)
        self._open_rounds = OpenRounds(context, self._streams, self.machines, self._log, self._catch_up)

    # what the node calls

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin a stream whose rounds up to `after_round` are in my state.

        Called again after adopting a snapshot, it begins anew there.
        """
        state, after = self._streams.get(stream.name), stream.cadence.upto(after_round)
        if state is None or after > state.newest:
            self._forget(state)
            self._streams[stream.name] = StreamState(stream, after, tokens, tokens, seen=after)
            self._context.staged |= stream.stage is not None

    async def exchange(self, name: str, offer: Offer) -> RoundOutcome:
        """Bring an offer, whose shards are in the store, to its round; wait for the outcome."""
        state, number = self._streams[name], offer.key.round
        try:
            if (known := self.decided(name, number)) is not None:
                return known
            if number <= state.newest and number not in state.log:
                return RoundOutcome(offer.key, "lost", state.next)
            assert number not in state.offers, f"{offer.key} is asked for twice"
            ends_s = self._context.now() + state.stream.terms.deadline_s
            placed = state.offers[number] = OpenOffer(offer, ends_s, asyncio.get_running_loop().create_future())
            self._open_rounds.place_offers(state)
            return await placed.outcome
        finally:
            state.offers.pop(number, None)
            if offer.key not in self.machines:  # else it releases them when it is complete
                self._context.store.release(work_pin(offer.key))

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """The outcome of a round from the log, if it is decided and its content is here."""
        state = self._streams[name]
        entry = state.log.get(number)
        return outcome(state.stream, number, entry, self._context.store) if entry and entry.complete else None

    def last_shards(self, name: str, number: int) -> tuple[bytes, ...] | None:
        """The last shards of a decided round, or what they were reduced to; empty if it failed.

        None if they are not here yet.
        """
        state = self._streams[name]
        entry = state.entry(number)
        if entry is None or not entry.complete:
            return None
        return tuple(
            self._context.store.get(item.digest) or b"" for item in last_shards(entry.close, state.stream.terms.shards)
        )

    def oldest(self, name: str) -> int:
        """The first round that the log still has, or the next one."""
        state = self._streams[name]
        return next(iter(state.log), state.next)

    def oldest_kept(self, name: str) -> int:
        """The first round whose last shards may still be kept, or the next one."""
        return next(iter(self._streams[name].annals), self.oldest(name))

    def newest(self, name: str) -> int:
        """The last round of a stream that is known here to be decided."""
        return self._streams[name].newest

    def heard_of(self, name: str, number: int) -> None:
        """Somebody is at this round of a stream: who lacks one before it asks for that."""
        state = self._streams[name]
        state.seen = max(state.seen, number)

    def called(self, name: str) -> bool:
        """True if others have brought theirs to the stream's next round, and I have not.

        Also if the round has left the logs of most: a peer that brings something to it is told so.
        """
        state = self._streams[name]
        if self._catch_up.lost(state):
            return True
        machine = self.machines.get(Key(name, state.next))
        return machine is not None and bool(machine.content.offers) and state.next not in state.offers

    def close(self, name: str) -> None:
        """End a stream at this peer; to have another part in it, it is opened again."""
        self._forget(self._streams.pop(name, None))

    def tokens(self, name: str) -> int:
        """The run's agreed tokens as of that round."""
        return self._streams[name].tokens

    @property
    def staged(self) -> bool:
        """True if there are streams of stages."""
        return any(state.stream.stage is not None for state in self._streams.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The open streams."""
        return tuple(self._streams)

    def next_views(self) -> list[View]:
        """The views that decide what comes next: those of each stream's next round."""
        nexts = (self._context.views.at(state.next, state.stream.stage) for state in self._streams.values())
        return [view for view in nexts if view is not None]

    def floor(self) -> int:
        """The first round that is not wholly here: a branch may begin with it, or later."""
        return max((state.whole + 1 for state in self._streams.values()), default=0)

    def reach(self, stage: int | None = None) -> int:
        """The earliest round from which logs can bring a state up to date.

        `stage` is the state's, None for the whole model. The round is mine; or, where others have
        forgotten what comes next in a stream, theirs: otherwise another peer that lags behind would
        give me the state that I have.
        """
        known = self._streams.values()
        streams = [state for state in known if state.stream.wants == "all" and state.stream.stage == stage]
        lost = [(state, said) for state in streams if (said := self._catch_up.lost(state))]
        if lost:
            return max(max(state.next, oldest_of(said) - state.stream.cadence.stride) for state, said in lost)
        return min(
            (self.oldest(state.stream.name) - state.stream.cadence.stride for state in streams),
            default=-1,
        )

    def rewind(self, first_round: int) -> None:
        """Begin a branch with this round: what others decided of it without me is not its past.

        My open offers go into the branch's rounds.
        """
        self._open_rounds.rewind(first_round)
        for state in self._streams.values():
            assert state.whole < first_round, f"round {state.whole} is in my state; a branch must begin after it"
            self._log.rewind(state, first_round)
            state.forgotten = LogTruncation()
            if state.newest >= first_round:
                state.newest = state.seen = state.stream.cadence.upto(first_round - 1)
                last = state.entry(state.newest)
                state.tokens = last.close.tokens if last is not None else state.opened_tokens

    def _forget(self, state: StreamState | None) -> None:
        """Drop what a stream held: a snapshot has taken its place."""
        if state is None:
            return
        self._log.clear(state)
        self._open_rounds.close(state.stream.name)
        self._log.give_up(state, state.next)

    def abandon(self) -> tuple[str, ...]:
        """Give up my chain of views: open exchanges are lost, and the logs are empty.

        The streams wait to be opened again. Returns their names.
        """
        for name, state in list(self._streams.items()):
            self._forget(state)
            self._streams[name] = StreamState(state.stream, state.stream.cadence.upto(-1))
        return self.names

    def waits(self) -> list[tuple[Key, tuple[PeerId, ...], float]]:
        """The open waits: (exchange, from whom, until when on the local clock)."""
        waits = [
            (machine.key, machine.awaited(), machine.ends_s)
            for machine in self.machines.values()
            if not machine.complete
        ]
        for name, state in self._streams.items():
            waits += [
                (Key(name, number), self._living(number, state.stream.stage), placed.ends_s)
                for number, placed in state.offers.items()
                if placed.offer.key not in self.machines
            ]
        return waits

    def _living(self, number: int, stage: int | None) -> tuple[PeerId, ...]:
        """The peers that can decide a round that I have no part in, or still have what it decided."""
        view = self._context.views.at(number, stage) or self._context.views.newest
        return tuple(peer for peer in view.peers if peer != self._context.me and not self._context.gone(view, peer))

    # what the peer's loops call

    def receive(self, sender: PeerId, incarnation: int, message: ShardMessage | PaxosMessage | LogMessage) -> None:
        """Route a member's message to the machine of its round, or to what keeps up with others."""
        state = self._streams.get(message.key.stream)
        if state is None:
            self._context.drop("unknown stream")
        elif isinstance(message, LogQuery):
            view = self._catch_up.answer_query(state, sender, message)
            if view is not None:
                self._open_rounds.begin(state, message.key, view)
        elif isinstance(message, Forgotten):
            self._catch_up.take_forgotten(state, sender, incarnation, message)
        elif isinstance(message, Decided) and message.key not in self.machines:
            view = self._open_rounds.view_of(state, message)
            if view is not None:
                self._catch_up.take_decided(state, view, sender, incarnation, message)
        else:
            self._open_rounds.receive(state, sender, incarnation, message)

    def tick(self) -> None:
        """Let time pass: place offers that had to wait, and ask for what was missed."""
        self._open_rounds.tick()
        for state in self._streams.values():
            self._open_rounds.place_offers(state)
            if state.forgotten.said:
                self._catch_up.heed(state, is_open=Key(state.stream.name, state.next) in self.machines)
            if self._lags(state):
                self._catch_up.ask(state)

    def _lags(self, state: StreamState) -> bool:
        """True if the next round may be decided without my hearing of it."""
        number, newest, now_s = state.next, self._context.views.newest, self._context.now()
        if self._context.my_index(self._context.views.at(number, state.stream.stage) or newest) is None:
            return True
        if state.stream.wants == "last" and now_s - state.asked_s >= ASK_ANYWAY_S:
            return True
        machine = self.machines.get(Key(state.stream.name, number))
        return state.seen > number or (machine is not None and now_s > machine.ends_s)


class OpenRounds:
    """Drives the `machines` of one peer's open rounds. `streams` are the open streams, by name.

    A machine is made for a stream's next round alone, under the view that the round belongs to, by
    the first offer or message that concerns it. It ends when its round is complete, when the round
    leaves the log, or when another view comes to hold for the round.
    """

    def __init__(
        self,
        context: PeerContext,
        streams: Mapping[str, StreamState],
        machines: dict[Key, Collective],
        log: RoundLog,
        catch_up: CatchUp,
    ) -> None:
        self._context, self._streams, self._machines = context, streams, machines
        self._log, self._catch_up = log, catch_up

    def close(self, name: str) -> None:
        """Forget the machines of a stream, and what they held."""
        for key in [key for key in self._machines if key.stream == name]:
            del self._machines[key]
            self._context.store.release(work_pin(key))

    def rewind(self, first_round: int) -> None:
        """Forget the machines of this round and of later ones."""
        for key in [key for key in self._machines if key.round >= first_round]:
            del self._machines[key]

    # what happens to them

    def receive(
        self, state: StreamState, sender: PeerId, incarnation: int, message: ShardMessage | PaxosMessage
    ) -> None:
        """Hand a member's message to the machine of its round.

        Of a round that is decided, the decision is the answer.
        """
        view = self.view_of(state, message)
        if view is None:
            return
        member = view.index(sender, incarnation)
        if member is None:
            self._context.drop("not from a member")
            return
        state.seen = max(state.seen, message.key.round)
        entry = state.log.get(message.key.round)
        if entry is not None and message.key not in self._machines:
            if isinstance(message, Offer | Reduced | Holds | Prepare | Propose):
                self._context.send(sender, entry.decided)
            return
        machine = self.begin(state, message.key, view)
        if machine is None:
            return
        try:
            machine.receive(self._context.now(), member, message)
        except BadCloseList:
            self._context.drop("bad close list")
        self._carry_out(machine)

    def place_offers(self, state: StreamState) -> None:
        """Put my offer into its round once that is the stream's next one and I am a member."""
        placed = state.offers.get(state.next)
        if placed is None:
            return
        offer = placed.offer
        view = self._context.views.at(offer.key.round, state.stream.stage)
        machine = self.begin(state, offer.key, view) if view is not None else None
        if machine is None or not machine.roster.contributes:
            return
        if machine.roster.me not in machine.content.offers:
            machine.offer(self._context.now(), msgspec.structs.replace(offer, view=machine.view))
            self._carry_out(machine)

    def tick(self) -> None:
        """Time passes for every machine."""
        now_s = self._context.now()
        for machine in list(self._machines.values()):
            stage = self._streams[machine.key.stream].stream.stage
            view = self._context.views.at(machine.key.round, stage)
            if view is None or self._retire(machine, view):
                continue
            peers = machine.roster.peers
            gone, left = self._context.gone, self._context.left
            suspects = (i for i, peer in enumerate(peers) if gone(view, peer) or left(peer))
            machine.tick(now_s, frozenset(suspects))
            self._carry_out(machine)
            self._hand_over(machine)

    def view_of(self, state: StreamState, message: ShardMessage | PaxosMessage) -> View | None:
        """The view that a message names, if it is the one that its round belongs to."""
        views = self._context.views
        view = views.by_hash(message.view)
        if view is None or view is not views.at(message.key.round, state.stream.stage):
            self._context.drop("other view")
            self._context.counters["stale view"] += 1
            return None
        return view

    # making and ending them

    def begin(self, state: StreamState, key: Key, view: View) -> Collective | None:
        """The machine of a key; made if this is the stream's next round, I am a member, and no view
        change is due."""
        machine = self._machines.get(key)
        if machine is not None and not self._retire(machine, view):
            return machine
        me, stage = self._context.my_index(view), state.stream.stage
        if me is None or key.round != state.next or key.attempt:
            return None
        if self._context.views.blocked(key.round, stage):
            return None
        # A stage's round is touched by voting: until then a next view may take it over.
        if stage is None:
            self._context.touch(None, key.round)
        machine = self._make(key, view, me, state)
        self._machines[key] = machine
        return machine

    def _make(self, key: Key, view: View, me: int, state: StreamState) -> Collective:
        seed, peers, stage = self._context.seed, view.peers, state.stream.stage
        first = order([peers[index] for index in view.serving(stage)], seed, view.hash, key)
        others = order([peer for peer in peers if peer not in first], seed, view.hash, key)
        # Voters come last as proposers: they have nothing to put forward.
        ordered = tuple(peers.index(peer) for peer in (*first, *others))
        rotated = tuple(peers.index(peer) for peer in rotation(first, seed, key.stream))

        def holds_back() -> bool:
            return stage is not None and self._context.views.blocked(key.round, stage)

        return Collective(
            key,
            view.hash,
            Roster(peers, me, ordered, rotated),
            state.stream.terms,
            self._context.now(),
            None if state.skipped else state.tokens,
            functools.partial(self._holds, key),
            holds_back,
        )

    def _holds(self, key: Key, digest: bytes) -> bool:
        """Return True if a chunk is here; it is kept then until the exchange is over."""
        here = digest in self._context.store
        if here:
            self._context.store.pin(digest, work_pin(key))
        return here

    def _retire(self, machine: Collective, view: View) -> bool:
        """Drop a machine that was begun under a view which did not come to hold for its round.

        Whatever it did there counts nowhere, and its group's indices mean others now. My offer goes
        into the round's true machine.
        """
        if machine.view == view.hash:
            return False
        del self._machines[machine.key]
        return True

    def _hand_over(self, machine: Collective) -> None:
        """Seek a stage's content that is long overdue like that of rounds without me."""
        state = self._streams[machine.key.stream]
        is_decided = machine.close is not None and state.stream.stage is not None
        overdue = self._context.now() > machine.ends_s + HOPELESS_S
        if overdue and is_decided and self._is_live(machine):
            del self._machines[machine.key]
            self._catch_up.fill(state, machine.key)

    def _is_live(self, machine: Collective) -> bool:
        return self._machines.get(machine.key) is machine

    # what they want

    def _carry_out(self, machine: Collective) -> None:
        """Do what a machine wants; log its decision, and end it once it is complete."""
        if not self._is_live(machine):
            return
        key, state = machine.key, self._streams[machine.key.stream]
        if machine.closing.decision.accepted is not None:
            self._context.touch(state.stream.stage, key.round)
        while actions := machine.take():
            for action in actions:
                self._act(machine, action)
        if machine.close is not None and key.round == state.next:
            roster, decided = machine.roster, machine.closing.decision.announcement()
            entry = LoggedRound(machine.close, roster.peers, len(roster.contributors), decided, machine.taken())
            self._log.enter(state, key.round, entry)
        if machine.complete and self._is_live(machine):
            del self._machines[key]
            if machine.roster.contributes:
                self._log.completed(state, key.round)
            else:
                self._catch_up.fill(state, key)

    def _act(self, machine: Collective, action: Action) -> None:
        # The stream may be closed while this work goes on.
        stream = self._streams[machine.key.stream].stream
        match action:
            case Fetch():
                self._context.spawn(self._fetch_for(machine, stream, action))
            case Reduce():
                self._context.spawn(self._reduce_for(machine, stream, action))
            case (member, message):
                self._context.send(machine.roster.peers[member], message)

    async def _fetch_for(self, machine: Collective, stream: Stream, wanted: Fetch) -> None:
        fits = wanted.size <= stream.max_shard_bytes
        timeout_s = max(FETCH_TIMEOUT_S, stream.terms.deadline_s)

        def holders() -> list[PeerId]:
            return [machine.roster.peers[member] for member in wanted.holders()]

        pin = work_pin(machine.key)
        fetch, digest = self._context.chunks.fetch, wanted.digest
        there = fits and await fetch(digest, wanted.size, holders, pin, timeout_s)
        if self._is_too_late(machine):
            return
        corrupt = not fits
        if there and stream.terms.kind == "gather":
            data, number = self._context.store.get(digest) or b"", machine.key.round
            corrupt = not await self._context.compute(lambda: stream.check(number, wanted.shard, data))
        if not there:
            await asyncio.sleep(STALL_S / 2)
        machine.fetched(self._context.now(), digest, intact=there, corrupt=corrupt)
        self._carry_out(machine)

    async def _reduce_for(self, machine: Collective, stream: Stream, wanted: Reduce) -> None:
        peers, store, number = machine.roster.peers, self._context.store, machine.key.round
        inputs = [(peers[member], weight, store.get(digest) or b"") for member, weight, digest in wanted.inputs]
        work = functools.partial(stream.reduce, number, wanted.shard, inputs)
        reduction: Reduction = await self._context.compute(work)
        if self._is_too_late(machine):
            return
        rejected = tuple(peers.index(peer) for peer in reduction.rejected)
        self._context.counters["corrupt payloads"] += len(rejected)
        now_s = self._context.now()
        if reduction.data is None:
            machine.unreduced(now_s, wanted.shard)
        else:
            digest = store.put(reduction.data, work_pin(machine.key))
            machine.reduced(now_s, wanted.shard, digest, len(reduction.data), rejected)
        self._carry_out(machine)

    def _is_too_late(self, machine: Collective) -> bool:
        """True if a machine was over before its work was done.

        What the work brought is released then, unless the round's next machine needs it.
        """
        state = self._streams.get(machine.key.stream)
        # My offer waits for the round's next machine, which needs the same chunks.
        offered = state is not None and machine.key.round in state.offers
        if machine.key not in self._machines and not offered:
            self._context.store.release(work_pin(machine.key))
        return not self._is_live(machine)
