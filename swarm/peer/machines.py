"""The asyncio glue of machines: routes messages to them, and carries out what they ask for.

A machine is made for a stream's next round alone, under the view that the round belongs to, by the
first offer or message that concerns it. It ends when its round is complete, when the round leaves
the log, or when another view comes to hold for the round.
"""

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping

import msgspec

from farflock.swarm.chunks import STALL_S
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Holds, Key, Offer, Prepare, Propose, Reduced
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.filling import FETCH_TIMEOUT_S, HOPELESS_S, Filling
from farflock.swarm.peer.round_log import RoundLog
from farflock.swarm.peer.streams import LoggedRound, Reduction, Stream, StreamState, work_pin
from farflock.swarm.protocol.exchange.actions import Action, Fetch, Reduce
from farflock.swarm.protocol.exchange.close_list import BadCloseList, CloseList
from farflock.swarm.protocol.exchange.collective import Collective, MachineMessage
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.groups import order, rotation
from farflock.swarm.protocol.views import View


class Machines:
    """The machines of one peer's open rounds, by key. `streams` are the open streams, by name."""

    def __init__(self, port: PeerContext, streams: Mapping[str, StreamState], log: RoundLog, filling: Filling) -> None:
        self._port, self._streams, self._log, self._filling = port, streams, log, filling
        self._machines: dict[Key, Collective] = {}

    # which there are

    def __len__(self) -> int:
        return len(self._machines)

    def __iter__(self) -> Iterator[Collective]:
        return iter(self._machines.values())

    def __contains__(self, key: object) -> bool:
        return key in self._machines

    def get(self, key: Key) -> Collective | None:
        """The machine of a key, made if I may take part in the round now.

        That is: it is the stream's next round, I am a member, and no view change is due.
        """
        return self._machines.get(key)

    def drop(self, key: Key) -> None:
        """Forget a machine; whatever it still has at work comes to nothing."""
        self._machines.pop(key, None)

    def close(self, name: str) -> None:
        """Forget the machines of a stream, and what they held."""
        for key in [key for key in self._machines if key.stream == name]:
            self.drop(key)
            self._port.store.release(work_pin(key))

    def rewind(self, first_round: int) -> None:
        """Forget the machines of this round and of later ones."""
        for key in [key for key in self._machines if key.round >= first_round]:
            self.drop(key)

    # what happens to them

    def receive(self, state: StreamState, sender: PeerId, incarnation: int, message: MachineMessage) -> None:
        """Hand a member's message to the machine of its round.

        Of a round that is decided, the decision is the answer.
        """
        view = self.view_of(sender, message.view, message.key)
        if view is None:
            return
        member = view.index(sender, incarnation)
        if member is None:
            self._port.drop("not from a member")
            return
        state.seen = max(state.seen, message.key.round)
        entry = state.log.get(message.key.round)
        if entry is not None and message.key not in self:
            if isinstance(message, Offer | Reduced | Holds | Prepare | Propose):
                self._port.send(sender, entry.decided)
            return
        machine = self.begin(state, message.key, view)
        if machine is None:
            return
        try:
            machine.receive(self._port.now(), member, message)
        except BadCloseList:
            self._port.drop("bad close list")
        self._carry_out(machine)

    def place_offers(self, state: StreamState) -> None:
        """Put my offer into its round once that is the stream's next one and I am a member."""
        offer = state.offers.get(state.next)
        if offer is None:
            return
        view = self._port.views.at(offer.key.round, state.stream.stage)
        machine = self.begin(state, offer.key, view) if view is not None else None
        if machine is None or not machine.roster.contributes:
            return
        if machine.roster.me not in machine.content.offers:
            machine.offer(self._port.now(), msgspec.structs.replace(offer, view=machine.view))
            self._carry_out(machine)

    def tick(self) -> None:
        """Time passes for every machine."""
        now_s = self._port.now()
        for machine in list(self._machines.values()):
            stage = self._streams[machine.key.stream].stream.stage
            view = self._port.views.at(machine.key.round, stage)
            if view is None or self._retire(machine, view):
                continue
            peers = machine.roster.peers
            gone, left = self._port.gone, self._port.left
            suspects = (i for i, peer in enumerate(peers) if gone(view, peer) or left(peer))
            machine.tick(now_s, frozenset(suspects))
            self._carry_out(machine)
            self._hand_over(machine)

    def view_of(self, sender: PeerId, digest: bytes, key: Key) -> View | None:
        """The view that a message names, if it is the one that its round belongs to."""
        views = self._port.views
        view = views.by_hash(digest)
        if view is None or view is not views.at(key.round, self._streams[key.stream].stream.stage):
            self._port.drop("other view")
            self._port.counters["stale view"] += 1
            return None
        return view

    # making and ending them

    def begin(self, state: StreamState, key: Key, view: View) -> Collective | None:
        """The machine of a key; made if this is the stream's next round, I am a member, and no view
        change is due."""
        machine = self._machines.get(key)
        if machine is not None and not self._retire(machine, view):
            return machine
        me, stage = self._port.my_index(view), state.stream.stage
        if me is None or key.round != state.next or key.attempt:
            return None
        if self._port.views.blocked(key.round, stage):
            return None
        # A stage's round is touched by voting: until then a next view may take it over.
        if stage is None:
            self._port.touch(None, key.round)
        machine = self._make(key, view, me, state)
        self._machines[key] = machine
        return machine

    def _make(self, key: Key, view: View, me: int, state: StreamState) -> Collective:
        seed, peers, stage = self._port.seed, view.peers, state.stream.stage
        first = order([peers[index] for index in view.serving(stage)], seed, view.hash, key)
        others = order([peer for peer in peers if peer not in first], seed, view.hash, key)
        # Voters come last as proposers: they have nothing to put forward.
        ordered = tuple(peers.index(peer) for peer in (*first, *others))
        rotated = tuple(peers.index(peer) for peer in rotation(first, seed, key.stream))

        def holds_back() -> bool:
            return stage is not None and self._port.views.blocked(key.round, stage)

        return Collective(
            key,
            view.hash,
            Roster(peers, me, ordered, rotated),
            state.stream.terms,
            self._port.now(),
            None if state.skipped else state.tokens,
            self._holding(key),
            holds_back,
        )

    def _holding(self, key: Key) -> Callable[[bytes], bool]:
        """Say whether a chunk is here, and keep it until the exchange is over if it is."""

        def holding(digest: bytes) -> bool:
            here = digest in self._port.store
            if here:
                self._port.store.pin(digest, work_pin(key))
            return here

        return holding

    def _retire(self, machine: Collective, view: View) -> bool:
        """Drop a machine that was begun under a view which did not come to hold for its round.

        Whatever it did there counts nowhere, and its group's indices mean others now. My offer goes
        into the round's true machine.
        """
        if machine.view == view.hash:
            return False
        self.drop(machine.key)
        return True

    def _hand_over(self, machine: Collective) -> None:
        """Seek a stage's content that is long overdue like that of rounds without me."""
        state = self._streams[machine.key.stream]
        is_decided = machine.close is not None and state.stream.stage is not None
        overdue = self._port.now() > machine.ends_s + HOPELESS_S
        if overdue and is_decided and self._is_live(machine):
            self.drop(machine.key)
            self._filling.begin(state, machine.key)

    def _is_live(self, machine: Collective) -> bool:
        return self._machines.get(machine.key) is machine

    # what they want

    def _carry_out(self, machine: Collective) -> None:
        """Do what a machine wants; log its decision, and end it once it is complete."""
        if not self._is_live(machine):
            return
        key, state = machine.key, self._streams[machine.key.stream]
        if machine.closing.decision.accepted is not None:
            self._port.touch(state.stream.stage, key.round)
        while actions := machine.take():
            for action in actions:
                self._act(machine, action)
        if machine.close is not None and key.round == state.next:
            self._log.enter(state, key.round, _entry(machine, machine.close))
        if machine.complete and self._is_live(machine):
            self.drop(key)
            if machine.roster.contributes:
                self._log.completed(state, key.round)
            else:
                self._filling.begin(state, key)

    def _act(self, machine: Collective, action: Action) -> None:
        # The stream may be closed while this work goes on.
        stream = self._streams[machine.key.stream].stream
        match action:
            case Fetch():
                self._port.spawn(self._fetch_for(machine, stream, action))
            case Reduce():
                self._port.spawn(self._reduce_for(machine, stream, action))
            case (member, message):
                self._port.send(machine.roster.peers[member], message)

    async def _fetch_for(self, machine: Collective, stream: Stream, wanted: Fetch) -> None:
        fits = wanted.size <= stream.max_shard_bytes
        timeout_s = max(FETCH_TIMEOUT_S, stream.terms.deadline_s)

        def holders() -> list[PeerId]:
            return [machine.roster.peers[member] for member in wanted.holders()]

        pin = work_pin(machine.key)
        fetch, digest = self._port.chunks.fetch, wanted.digest
        there = fits and await fetch(digest, wanted.size, holders, pin, timeout_s)
        if self._is_too_late(machine):
            return
        corrupt = not fits
        if there and stream.terms.kind == "gather":
            data, number = self._port.store.get(digest) or b"", machine.key.round
            corrupt = not await self._port.compute(lambda: stream.check(number, wanted.shard, data))
        if not there:
            await asyncio.sleep(STALL_S / 2)
        machine.fetched(self._port.now(), digest, intact=there, corrupt=corrupt)
        self._carry_out(machine)

    async def _reduce_for(self, machine: Collective, stream: Stream, wanted: Reduce) -> None:
        peers, store, number = machine.roster.peers, self._port.store, machine.key.round
        inputs = [(peers[member], weight, store.get(digest) or b"") for member, weight, digest in wanted.inputs]
        work = functools.partial(stream.reduce, number, wanted.shard, inputs)
        reduction: Reduction = await self._port.compute(work)
        if self._is_too_late(machine):
            return
        rejected = tuple(peers.index(peer) for peer in reduction.rejected)
        self._port.counters["corrupt payloads"] += len(rejected)
        now_s = self._port.now()
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
        if machine.key not in self and not offered:
            self._port.store.release(work_pin(machine.key))
        return not self._is_live(machine)


def _entry(machine: Collective, close: CloseList) -> LoggedRound:
    """What the log keeps of a machine's round."""
    roster, decided = machine.roster, machine.closing.decision.announcement()
    return LoggedRound(close, roster.peers, len(roster.contributors), decided, machine.taken())
