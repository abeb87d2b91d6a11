"""All collective exchanges of one peer: its streams, their logs, and the node's calls on them.

A stream's rounds form one log: round r+1 begins only where round r is decided, so a member that was
away learns what it missed in order (`catch_up`), and no contribution can count twice. An exchange
has no timeout of its own: it resolves when its round is decided and its content is here, or when
the round has left every log (`lost`).

Read `Rounds.exchange` first, then `OpenRounds`, which routes messages to the machines of the open
rounds and carries out their actions.
"""

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from farflock.swarm.chunks import STALL_S
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    ContentMessage,
    Decided,
    Forgotten,
    Key,
    LogMessage,
    LogQuery,
    Offer,
    PaxosMessage,
    Prepare,
    Propose,
)
from farflock.swarm.peer.catch_up import FETCH_TIMEOUT_S, HOPELESS_S, CatchUp
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import (
    LoggedRound,
    OpenOffer,
    RoundLog,
    StreamState,
    outcome,
    work_pin,
)
from farflock.swarm.protocol import axes
from farflock.swarm.protocol.axes import Floor
from farflock.swarm.protocol.exchange.actions import Action, Fetch, Reduce
from farflock.swarm.protocol.exchange.bundles import BadBundle
from farflock.swarm.protocol.exchange.close_list import BadCloseList, CloseList, last_bundles
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.reminders import calls_for_decision
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.exchange.streams import RoundOutcome, Stream
from farflock.swarm.protocol.groups import order, rotation
from farflock.swarm.protocol.latecomers import LATE_SHARE, Latecomers
from farflock.swarm.protocol.log_truncation import LogTruncation, oldest_of
from farflock.swarm.protocol.slowness import Slowness
from farflock.swarm.protocol.views import View

# An observer makes no offers by which it would notice a missed decision, so it asks this often.
ASK_ANYWAY_S = 2.0


class Rounds:
    """All collective exchanges of one peer."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._streams: dict[str, StreamState] = {}
        self.streams = MappingProxyType(self._streams)  # what is known of each stream's rounds
        self.machines: dict[Key, Collective] = {}  # of the open rounds
        self._log = RoundLog(context, self.machines)
        self._catch_up = CatchUp(context, self._log)
        self._open_rounds = OpenRounds(
            context, self._streams, self.machines, self._log, self._catch_up
        )
        self.slowness = self._open_rounds.slowness  # of other members

    # what the node calls

    def open(self, stream: Stream, after_round: int = -1, tokens: int = 0) -> None:
        """Begin a stream whose rounds up to `after_round` are in this peer's state.

        Called again after adopting a snapshot, it begins again there."""
        state, after = self._streams.get(stream.name), stream.cadence.upto(after_round)
        if state is None or after > state.newest:
            self._forget(state)
            state = StreamState(stream, after, tokens, tokens, seen=after)
        self._streams[stream.name] = state
        state.applied, state.catching_up = after, stream.wants == "all"

    async def exchange(self, name: str, offer: Offer) -> RoundOutcome:
        """Bring an offer, whose shards are in the store, to its round and wait for the outcome."""
        state, number = self._streams[name], offer.key.round
        state.catching_up = False
        try:
            if (known := self.decided(name, number)) is not None:
                return state.to_offer(known)
            assert number not in state.offers, f"{offer.key} is asked for twice"
            ends_s = self._context.now() + state.stream.terms.deadline_s
            view, outcome = self._context.views.newest, asyncio.get_running_loop().create_future()
            placed = state.offers[number] = OpenOffer(offer, view.number, ends_s, outcome)
            self._open_rounds.place_offers(state)
            return state.to_offer(await placed.outcome)
        except asyncio.CancelledError:
            state.withdraw(number)
            raise
        finally:
            state.offers.pop(number, None)
            if offer.key not in self.machines:  # a live machine releases them when it completes
                self._context.store.release(work_pin(offer.key))

    def decided(self, name: str, number: int) -> RoundOutcome | None:
        """Return a round's outcome from the log; None unless it is decided and complete. It is lost
        if it was decided and has left the log."""
        state = self._streams[name]
        state.applied = max(state.applied, number - state.stream.cadence.stride)
        entry = state.log.get(number)
        if entry is None and number <= state.newest:
            return RoundOutcome(Key(name, number), "lost", state.next)
        if entry is None or not entry.complete:
            return None
        return outcome(state.stream, number, entry, self._context.bundles)

    def last_shards(self, name: str, number: int) -> tuple[bytes, ...] | None:
        """Return the last shards of a decided round, or their reduction; empty if the round failed.

        None if they are not here yet."""
        state = self._streams[name]
        entry = state.entry(number)
        if entry is None or not entry.complete:
            return None
        last = last_bundles(entry.close, state.stream.terms.bundles)
        return tuple(self._context.store.get(item.digest) or b"" for item in last)

    def oldest(self, name: str) -> int:
        """Return the first round still in the log, or the next round."""
        state = self._streams[name]
        return next(iter(state.log), state.next)

    def oldest_kept(self, name: str) -> int:
        """Return the first round whose last shards may still be kept, or the next round."""
        return next(iter(self._streams[name].old_log), self.oldest(name))

    def newest(self, name: str) -> int:
        """Return the last round of a stream known here to be decided; -1 if it is not open."""
        return self._streams[name].newest if name in self._streams else -1

    def heard_of(self, name: str, number: int) -> None:
        """Note that some peer is at this round, so that this one asks for earlier decisions."""
        state = self._streams[name]
        state.seen = max(state.seen, number)

    def called(self, name: str) -> bool:
        """True if others contributed to the stream's next round and this peer has not.

        Also true if the round has left most logs: a contribution to it is then reported as lost."""
        state = self._streams[name]
        if self._catch_up.lost(state):
            return True
        machine = self.machines.get(Key(name, state.next))
        has_offers = machine is not None and bool(machine.content.offers)
        return has_offers and state.next not in state.offers

    def close(self, name: str) -> None:
        """End a stream at this peer, so that it can be opened again with another part in it."""
        self._forget(self._streams.pop(name, None))

    def tokens(self, name: str) -> int:
        """Return the run's agreed tokens after the newest decided round."""
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
        """Return the views to which the streams' next rounds belong."""
        nexts = (
            self._context.views.at(state.next, state.stream.stage)
            for state in self._streams.values()
        )
        return [view for view in nexts if view is not None]

    def floor(self) -> int:
        """Return the first round that is not wholly here: a branch may begin with it, or later."""
        return max((state.whole + 1 for state in self._streams.values()), default=0)

    def are_lost(self, stage: int | None = None) -> bool:
        """Return whether a round that `stage` needs next has left most logs."""
        states = self._streams.values()
        return any(state.changes(stage) and self._catch_up.lost(state) for state in states)

    def reach(self, stage: int | None = None) -> int:
        """Return the earliest round from which logs can bring a state of `stage` up to date.

        `stage` None is the whole model. The result is the start of this peer's own log. If others
        have forgotten a stream's next round, it is the start of their logs: otherwise another
        lagging peer could serve us the state that we already have."""
        streams = [state for state in self._streams.values() if state.changes(stage)]
        lost = [(state, said) for state in streams if (said := self._catch_up.lost(state))]
        if lost:
            return max(
                max(state.next, oldest_of(said) - state.stream.cadence.stride)
                for state, said in lost
            )
        return min(
            (self.oldest(state.stream.name) - state.stream.cadence.stride for state in streams),
            default=-1,
        )

    def rewind(self, begins: Floor) -> None:
        """Begin a branch or return with these rounds, forgetting what others decided without us
        from them on.

        Open offers of this peer go into its rounds. Where a return begins with a state in which one
        stream is further than another, what that holds of it stays."""
        self._open_rounds.rewind(begins)
        for state in self._streams.values():
            self._log.rewind(state, axes.at(begins, state.stream.stage))
            state.forgotten = LogTruncation()

    def _forget(self, state: StreamState | None) -> None:
        """Drop everything a stream held: a snapshot has replaced it."""
        if state is None:
            return
        self._log.clear(state)
        self._open_rounds.close(state.stream.name)
        self._log.give_up(state, state.next)

    def abandon(self) -> tuple[str, ...]:
        """Give up this peer's chain of views: open exchanges are lost, and the logs are emptied.

        The streams wait to be opened again. Return their names."""
        for name, state in list(self._streams.items()):
            self._forget(state)
            self._streams[name] = StreamState(state.stream, state.stream.cadence.upto(-1))
        return self.names

    def waits(self) -> list[tuple[Key, tuple[PeerId, ...], float]]:
        """Return the open waits: (exchange, from whom, until when on the local clock)."""
        waits = [
            (machine.key, machine.awaited(), machine.ends_s)
            for machine in self.machines.values()
            if not machine.complete
        ]
        for name, state in self._streams.items():
            waits += [
                (Key(name, number), self._context.living(number, state.stream.stage), placed.ends_s)
                for number, placed in state.offers.items()
                if placed.offer.key not in self.machines
            ]
        return waits

    # what the peer's loops call

    def receive(
        self, sender: PeerId, incarnation: int, message: ContentMessage | PaxosMessage | LogMessage
    ) -> None:
        """Route a member's message to the machine of its round, or to `catch_up`."""
        state = self._streams.get(message.key.stream)
        if state is None:
            self._context.drop("unknown stream")
        elif isinstance(message, LogQuery):
            view = self._catch_up.answer_query(state, sender, incarnation, message)
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
        """Let time pass: place offers that had to wait, and ask for missed decisions."""
        self._open_rounds.tick()
        for state in self._streams.values():
            self._open_rounds.place_offers(state)
            if state.forgotten.said:
                self._catch_up.heed(
                    state, is_open=Key(state.stream.name, state.next) in self.machines
                )
            if self._lags(state):
                self._catch_up.ask(state)

    def _lags(self, state: StreamState) -> bool:
        """True if the next round may be decided without this peer hearing of it."""
        number, views, now_s = state.next, self._context.views, self._context.now()
        view = views.at(number, state.stream.stage) or views.newest
        if self._context.my_index(view) is None:
            return True  # decided without us, and not sent to us
        if state.stream.wants == "last" and now_s - state.asked_s >= ASK_ANYWAY_S:
            return True
        machine = self.machines.get(Key(state.stream.name, number))
        # Past its deadline a round is soon decided, and the message may have been lost.
        return state.seen > number or (machine is not None and now_s > machine.ends_s)


class OpenRounds:
    """Drives the `machines` of one peer's open rounds; `streams` are the open streams, by name.

    A machine is made only for a stream's next round, under the view that the round belongs to, by
    the first offer or message for it. It ends when its round is complete, when the round leaves the
    log, or when another view takes over the round."""

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
        self._late, self.slowness = Latecomers(context.away), Slowness()

    def close(self, name: str) -> None:
        """Forget the machines of a stream, and release what they held."""
        for key in [key for key in self._machines if key.stream == name]:
            del self._machines[key]
            self._context.store.release(work_pin(key))

    def rewind(self, begins: Floor) -> None:
        """Forget the machines of these rounds and of later ones."""
        for key in list(self._machines):
            if key.round >= axes.at(begins, self._streams[key.stream].stream.stage):
                del self._machines[key]

    # events

    def receive(
        self,
        state: StreamState,
        sender: PeerId,
        incarnation: int,
        message: ContentMessage | PaxosMessage,
    ) -> None:
        """Pass a member's message to its round's machine, or answer with the round's decision."""
        view = self.view_of(state, message)
        if view is None:
            return
        member = view.index(sender, incarnation)
        if member is None:
            self._context.drop("not from a member")
            return
        state.seen = max(state.seen, message.key.round)
        if isinstance(message, Offer):
            name = message.key.stream
            self._context.note_followed(sender, name, message.key.round - 1, current=True)
            if (sender, name) in self._context.away:
                self._late.heard(sender, name)
        entry = state.log.get(message.key.round)
        if entry is not None and message.key not in self._machines:
            if isinstance(message, Prepare | Propose) or (
                calls_for_decision(message) and self._is_due(entry, member, view)
            ):
                self._context.send(sender, entry.decided)
            return
        machine = self.begin(state, message.key, view)
        if machine is None:
            return
        now_s = self._context.now()
        if isinstance(message, Offer) and member not in machine.content.offers:
            self.slowness.note(sender, "machine", message.key, now_s - machine.began_s)
        try:
            machine.receive(now_s, member, message)
        except BadCloseList:
            self._context.drop("bad close list")
        self._carry_out(machine)

    def _is_due(self, entry: LoggedRound, member: int, view: View) -> bool:
        me = self._context.my_index(view)
        now_s, members = self._context.now(), len(view.peers)
        return me is None or entry.reminders.is_due(now_s, member, me, members)

    def place_offers(self, state: StreamState) -> None:
        """Put our offer into its round once that is the stream's next and this peer is a member."""
        placed = state.offers.get(state.next)
        if placed is None:
            return
        offer = placed.offer
        if state.stream.stage is not None and not self._context.stayed(placed.view):
            # what it is made of has been asked for elsewhere (node/pipeline/lifecycle/left_out.py)
            state.resolve(state.next, RoundOutcome(offer.key, "lost", state.next))
            return
        view = self._context.views.at(offer.key.round, state.stream.stage)
        machine = self.begin(state, offer.key, view) if view is not None else None
        if machine is None or not machine.roster.contributes:
            return
        if machine.roster.me not in machine.content.offers:
            machine.offer(self._context.now(), msgspec.structs.replace(offer, view=machine.view))
            self._carry_out(machine)

    def tick(self) -> None:
        """Let time pass for every machine."""
        now_s = self._context.now()
        for machine in list(self._machines.values()):
            stage = self._streams[machine.key.stream].stream.stage
            view = self._context.views.at(machine.key.round, stage)
            if view is None or self._retire(machine, view):
                continue
            peers = machine.roster.peers
            gone, left, away = self._context.gone, self._context.left, self._context.is_away
            suspects = (
                index
                for index, peer in enumerate(peers)
                if gone(view, peer) or left(peer) or away(peer, machine.key)
            )
            machine.tick(now_s, frozenset(suspects))
            self._carry_out(machine)
            self._hand_over(machine)

    def view_of(self, state: StreamState, message: ContentMessage | PaxosMessage) -> View | None:
        """Return the view that a message names, or None unless its round belongs to that view."""
        views = self._context.views
        view = views.by_hash(message.view)
        if view is None or view is not views.at(message.key.round, state.stream.stage):
            self._context.drop("other view")
            self._context.counters["stale view"] += 1
            return None
        return view

    # making and ending machines

    def begin(self, state: StreamState, key: Key, view: View) -> Collective | None:
        """Return the machine of a key, made if need be; None if this peer cannot begin it.

        It can if it is a member, the round is the stream's next, and no view change is due."""
        machine = self._machines.get(key)
        if machine is not None and not self._retire(machine, view):
            return machine
        me, stage = self._context.my_index(view), state.stream.stage
        if me is None or key.round != state.next or key.attempt:
            return None
        if self._context.views.blocked(key.round, stage):
            return None
        # Taking part in a whole-model round binds this peer at once: the next view must begin after
        # it. A stage's round binds only by a vote; until then a next view may take it over.
        if stage is None:
            self._context.touch(None, key.round)
        machine = self._make(key, view, me, state)
        self._machines[key] = machine
        return machine

    def _make(self, key: Key, view: View, me: int, state: StreamState) -> Collective:
        seed, peers, stage = self._context.seed, view.peers, state.stream.stage
        first = order([peers[index] for index in view.serving(stage)], seed, view.hash, key)
        others = order([peer for peer in peers if peer not in first], seed, view.hash, key)
        # Voters propose last: they have nothing to propose.
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
            lambda bundle, digest: self._context.bundles.pin_held(
                state.stream, bundle, digest, work_pin(key)
            ),
            holds_back,
        )

    def _retire(self, machine: Collective, view: View) -> bool:
        """Drop a machine of a view that its round does not belong to; return True if dropped.

        Nothing that it did counts, and its group's indices now mean other members. This peer's
        offer goes into the right machine for the round."""
        if machine.view == view.hash:
            return False
        del self._machines[machine.key]
        return True

    def _hand_over(self, machine: Collective) -> None:
        """Leave a stage's long overdue content to `catch_up`, as in rounds without this peer."""
        state = self._streams[machine.key.stream]
        is_decided = machine.close is not None and state.stream.stage is not None
        overdue = self._context.now() > machine.ends_s + HOPELESS_S
        # A machine asks the members of its own view; by now holders may be in a later one.
        if overdue and is_decided and self._is_live(machine):
            del self._machines[machine.key]
            self._catch_up.fill(state, machine.key)

    def _is_live(self, machine: Collective) -> bool:
        return self._machines.get(machine.key) is machine

    # actions

    def _carry_out(self, machine: Collective) -> None:
        """Carry out a machine's actions, log its decision, and end it once it is complete."""
        if not self._is_live(machine):
            return
        key, state = machine.key, self._streams[machine.key.stream]
        if machine.closing.decision.accepted is not None:
            self._context.touch(state.stream.stage, key.round)
        while actions := machine.take():  # an action may cause others
            for action in actions:
                self._act(machine, action)
        if machine.close is not None and key.round == state.next:
            roster, decided = machine.roster, machine.closing.decision.announcement()
            entry = LoggedRound(
                machine.close, roster.peers, len(roster.contributors), decided, machine.taken()
            )
            entry.reminders = machine.closing.reminders
            entry.twins = machine.twins()
            self._log.enter(state, key.round, entry)
            self._note_late(machine, machine.close, state.stream.cadence.stride)
        if machine.complete and self._is_live(machine):
            del self._machines[key]
            if machine.roster.contributes:
                self._log.completed(state, key.round)
            else:
                self._catch_up.fill(state, key)

    def _note_late(self, machine: Collective, close: CloseList, stride: int) -> None:
        """Note which contributors have offered nothing to a round that waited for them."""
        roster, key, view = machine.roster, machine.key, self._context.views.by_hash(machine.view)
        here = {roster.me, *machine.content.offers, *(member for member, _ in close.members)}
        waited = machine.ends_s - self._context.now() <= (1 - LATE_SHARE) * machine.deadline_s
        if view is not None and waited and (absent := roster.contributors - here):
            peers = [roster.peers[member] for member in sorted(absent)]
            self._late.missed(view, key, peers, stride)

    def _act(self, machine: Collective, action: Action) -> None:
        # The stream may be closed meanwhile.
        stream = self._streams[machine.key.stream].stream
        match action:
            case Fetch():
                self._context.spawn(self._fetch_for(machine, stream, action))
            case Reduce():
                self._context.spawn(self._reduce_for(machine, stream, action))
            case (member, message):
                self._context.send(machine.roster.peers[member], message)

    async def _fetch_for(self, machine: Collective, stream: Stream, wanted: Fetch) -> None:
        fits = self._context.bundles.fits(stream, wanted.bundle, wanted.size)
        # Decided content is needed after the deadline too, so short deadlines do not bound a fetch.
        timeout_s = max(FETCH_TIMEOUT_S, stream.terms.deadline_s)

        def holders() -> list[PeerId]:
            return [machine.roster.peers[member] for member in wanted.holders()]

        first, then_s, pin = holders(), self._context.now(), work_pin(machine.key)
        try:
            there = fits and await self._context.bundles.fetch(
                stream, wanted.bundle, (wanted.digest, wanted.size), holders, pin, timeout_s
            )
        except BadBundle:
            there = fits = False
        if there and first == holders() and len(first) == 1:
            self.slowness.note(first[0], "line", machine.key, self._context.now() - then_s)
        if self._is_too_late(machine):
            return
        corrupt = not fits
        if there and stream.terms.kind == "gather":
            number = machine.key.round
            corrupt = not await self._context.bundles.check(
                stream, number, wanted.bundle, wanted.digest
            )
        if not there:
            await asyncio.sleep(STALL_S / 2)  # the machine asks again at once
        machine.fetched(self._context.now(), wanted.digest, intact=there, corrupt=corrupt)
        self._carry_out(machine)

    async def _reduce_for(self, machine: Collective, stream: Stream, wanted: Reduce) -> None:
        peers, pin = machine.roster.peers, work_pin(machine.key)
        inputs = [(peers[member], weight, digest) for member, weight, digest in wanted.inputs]
        entry, rejections = await self._context.bundles.reduce(
            stream, machine.key.round, wanted.bundle, inputs, pin
        )
        if self._is_too_late(machine):
            return
        rejected = tuple(peers.index(peer) for peer in rejections)
        self._context.counters["corrupt payloads"] += len(rejected)
        now_s = self._context.now()
        if entry is None:
            machine.unreduced(now_s, wanted.bundle)
        else:
            machine.reduced(now_s, wanted.bundle, *entry, rejected)
        self._carry_out(machine)

    def _is_too_late(self, machine: Collective) -> bool:
        """True if a machine ended before its work was done.

        The work's result is released then, unless the round's next machine needs it."""
        state = self._streams.get(machine.key.stream)
        # An offer waiting for the round's next machine needs the same chunks.
        offered = state is not None and machine.key.round in state.offers
        if machine.key not in self._machines and not offered:
            self._context.store.release(work_pin(machine.key))
        return not self._is_live(machine)
