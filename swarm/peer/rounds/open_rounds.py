"""The open rounds of one peer: the machine of each, its messages, and the actions it asks for."""

import asyncio
import functools
from collections.abc import Mapping

import msgspec

from farflock.swarm.chunks import STALL_S
from farflock.swarm.context import PeerContext
from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    ContentMessage,
    GiveUp,
    Key,
    Offer,
    PaxosMessage,
    Prepare,
    Propose,
)
from farflock.swarm.peer.rounds.catch_up import FETCH_TIMEOUT_S, HOPELESS_S, CatchUp
from farflock.swarm.peer.rounds.round_log import (
    LoggedRound,
    RoundLog,
    StreamState,
    is_probation,
    laggards,
    work_pin,
)
from farflock.swarm.protocol.agreement.rules import SignedRules
from farflock.swarm.protocol.exchange.actions import Action, Fetch, Reduce
from farflock.swarm.protocol.exchange.bundles import BadBundle
from farflock.swarm.protocol.exchange.close_list import BadCloseList, NotEntitled, OtherPast
from farflock.swarm.protocol.exchange.collective import Collective
from farflock.swarm.protocol.exchange.reminders import calls_for_decision
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.exchange.streams import Stream
from farflock.swarm.protocol.groups import order, proposers, rotation
from farflock.swarm.protocol.views import View


class OpenRounds:
    """Drives the `machines` of one peer's open rounds; `streams` are the open streams, by name.

    A machine is made only for a stream's next round, under the view that the round belongs to, by
    the first offer or message for it. It ends when its round is complete, when the round leaves the
    log, or when another view takes over the round."""

    def __init__(
        self,
        context: PeerContext,
        identity: Identity,
        streams: Mapping[str, StreamState],
        machines: dict[Key, Collective],
        log: RoundLog,
        catch_up: CatchUp,
    ) -> None:
        self._context, self._identity = context, identity
        self._streams, self._machines = streams, machines
        self._log, self._catch_up = log, catch_up

    def close(self, name: str) -> None:
        """Forget the machines of a stream, and release what they held."""
        for key in [key for key in self._machines if key.stream == name]:
            del self._machines[key]
            self._context.store.release(work_pin(key))

    def rewind(self, first_round: int) -> None:
        """Forget the machines of this round and of later ones."""
        for key in [key for key in self._machines if key.round >= first_round]:
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
        entry = state.log.get(message.key.round)
        if entry is not None and message.key not in self._machines:
            if isinstance(message, Prepare | Propose) or (
                calls_for_decision(message) and self._is_due(entry, member, view)
            ):
                self._context.send(sender, entry.decided)
            return
        if view in self._context.given_up and isinstance(message, Offer | Prepare | Propose):
            self._context.send(sender, GiveUp(view.hash))  # do not wait for our vote
        machine = self.begin(state, message.key, view)
        if machine is None:
            return
        try:
            machine.receive(self._context.now(), member, message)
        except NotEntitled as error:
            self._context.accuse(sender, str(error))
        except BadCloseList as error:
            self._context.drop("bad close list")
            if isinstance(error, OtherPast):
                self._show_newest(state, sender, member, view)
        self._carry_out(machine)

    def _show_newest(self, state: StreamState, sender: PeerId, member: int, view: View) -> None:
        """Show our newest list to a member whose own is another one (forks.py)."""
        entry = state.entry(state.newest)
        if entry is not None and self._is_due(entry, member, view):
            self._context.send(sender, entry.decided)

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
            gone, left = self._context.gone, self._context.left
            suspects = (i for i, peer in enumerate(peers) if gone(view, peer) or left(peer))
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

        It can if it is a member, the round is the stream's next, the list before is known, and no
        view change is due."""
        machine = self._machines.get(key)
        if machine is not None and not self._retire(machine, view):
            return machine
        me, stage = self._context.my_index(view), state.stream.stage
        if me is None or key.round != state.next or key.attempt or state.wants_list:
            return None
        if self._context.views.blocked(key.round, stage):
            return None
        # A round binds by a vote alone; until then a next view may take it over. It should not take
        # over whole-model rounds that have begun: what was brought to them is brought again.
        if stage is None:
            self._context.touched.begin(None, key.round)
        machine = self._make(key, view, me, state)
        self._machines[key] = machine
        return machine

    def _make(self, key: Key, view: View, me: int, state: StreamState) -> Collective:
        seed, peers, stage = self._context.seed, view.peers, state.stream.stage
        serving, everybody = view.serving(stage), order(peers, seed, view.hash, key)
        ordered = proposers(
            [peers.index(peer) for peer in everybody], serving, view.electorate.votes, stage
        )
        rotated = map(peers.index, rotation([peers[at] for at in serving], seed, key.stream))

        roster = Roster(
            peers,
            me,
            ordered,
            tuple(rotated),
            laggards(state, peers),
            probation=is_probation(state.stream, key.round),
        )

        def is_held_back() -> bool:
            return self._context.views.blocked(key.round, stage)

        return Collective(
            key,
            view.electorate,
            roster,
            state.stream.terms,
            self._context.now(),
            None if state.skipped else state.precedent,
            lambda bundle, digest: self._context.bundles.pin_held(
                state.stream, bundle, digest, work_pin(key)
            ),
            SignedRules(
                self._context.run,
                self._identity,
                view.electorate,
                is_held_back=is_held_back,
                notes=self._context,
            ),
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
        """Leave long overdue content to `catch_up`, as in rounds without this peer."""
        state = self._streams[machine.key.stream]
        is_old = state.stream.stage is not None or machine.view != self._context.views.newest.hash
        overdue = self._context.now() > machine.ends_s + HOPELESS_S
        # A machine asks the members of its own view; by now holders may be in a later one, or gone.
        if overdue and is_old and machine.close is not None and self._is_live(machine):
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
            self._context.touched.bind(state.stream.stage, key.round)
        while actions := machine.take():  # an action may cause others
            for action in actions:
                self._act(machine, action)
        if machine.close is not None and key.round == state.next:
            roster, decided = machine.roster, machine.closing.decision.announcement()
            entry = LoggedRound(
                machine.close, roster.peers, len(roster.contributors), decided, machine.taken()
            )
            entry.reminders = machine.closing.reminders
            entry.testimony = machine.closing.decision.testimony
            self._log.enter(state, key.round, entry)
        if machine.complete and self._is_live(machine):
            del self._machines[key]
            if machine.roster.contributes:
                self._log.completed(state, key.round)
            else:
                self._catch_up.fill(state, key)

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

        entry, pin = (wanted.digest, wanted.size), work_pin(machine.key)
        fetch = functools.partial(
            self._context.bundles.fetch, stream, wanted.bundle, entry, holders
        )
        try:
            there = fits and await fetch(pin, timeout_s)
        except BadBundle:
            there = fits = False
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
