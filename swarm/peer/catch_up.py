"""What a member does about rounds that were decided without it: it asks others for them, in order.

A member whose state depends on a round that has left everybody's log must adopt a snapshot; one
that only looks on goes on with the oldest round that there is. The content of the rounds is fetched
by `filling`.
"""

import itertools
import random

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Decided, Forgotten, Key, LogQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.filling import HOPELESS_S, Filling
from farflock.swarm.peer.machines import Machines
from farflock.swarm.peer.round_log import RoundLog
from farflock.swarm.peer.streams import LoggedRound, StreamState
from farflock.swarm.protocol.exchange.close_list import BadCloseList, decode_close_list
from farflock.swarm.protocol.log_truncation import newest_of
from farflock.swarm.protocol.views import View
from farflock.swarm.quota import Quota, units

FOLLOW_S = 0.5
# A peer that only looks on has no offer by which it would notice that it missed a decision.
ASK_ANYWAY_S = 2.0
# Decisions in one answer: rounds may be over faster than they can be asked for one by one.
TOLD_AT_ONCE = 4
ANSWERS_PER_S, ANSWERS_BURST = 256.0, 1024.0  # for each asker, and less of long ones: see `units`


class CatchUp:
    """One peer's part in keeping up with what is decided without it, and in helping others to."""

    def __init__(self, port: PeerContext, log: RoundLog, machines: Machines, filling: Filling) -> None:
        self._port, self._log, self._machines, self._filling = port, log, machines, filling
        self._random = random.Random(f"{port.seed}/{port.me}/follow")
        self._answers = Quota(ANSWERS_PER_S, ANSWERS_BURST, 4 * MAX_MEMBERS)

    def follow(self, state: StreamState) -> None:
        """Ask a random member for the next round's decision, if this peer may have missed it."""
        self._heed(state)
        now_s, number = self._port.now(), state.next
        if now_s - state.asked_s < FOLLOW_S or state.stream.terms.group or not self._lags(state, now_s):
            return
        others = self._others()
        said = {peer: word for peer in others if (word := state.forgotten.by(number, peer))}
        # A member that lives and says nothing for so long never will; and nobody says anything
        # of a round that is not decided.
        hopeless = now_s - state.forgotten.since_s >= HOPELESS_S and bool(self.lost(state))
        if said and state.stream.wants != "all" and (hopeless or len(said) == len(others)):
            self._skip_to(state, min(word.oldest for word in said.values()))
        elif askable := [peer for peer in others if peer not in said]:
            state.asked_s = now_s
            notes = state.stream.wants == "last"
            self._port.send(self._random.choice(askable), LogQuery(Key(state.stream.name, number), notes))

    def _lags(self, state: StreamState, now_s: float) -> bool:
        """Whether the next round may be decided without my hearing of it."""
        number, newest = state.next, self._port.views.newest
        if self._port.my_index(self._port.views.at(number, state.stream.stage) or newest) is None:
            return True
        if state.stream.wants == "last" and now_s - state.asked_s >= ASK_ANYWAY_S:
            return True
        machine = self._machines.get(Key(state.stream.name, number))
        overdue = machine is not None and now_s > machine.ends_s
        return overdue or state.seen > number

    def _others(self) -> list[PeerId]:
        """The living members, as far as one knows, but me."""
        peers = self._port.views.newest.peers
        return [peer for peer in peers if peer != self._port.me and self._port.life(peer) != "dead"]

    def lost(self, state: StreamState) -> list[Forgotten]:
        """What others say of the next round if it has left the logs of most; else nothing."""
        return state.forgotten.agreed(state.next, self._others())

    def answer_query(self, state: StreamState, sender: PeerId, query: LogQuery) -> None:
        """Send the decision of a round and of some after it, or say that they have left the log.

        A round that nobody began, because its members are gone, is begun here.
        """
        numbers = itertools.islice(itertools.count(query.key.round, state.stream.cadence.stride), TOLD_AT_ONCE)
        entries = (state.entry(number) if query.notes else state.log.get(number) for number in numbers)
        told = [entry.decided for entry in itertools.takewhile(lambda entry: entry is not None, entries) if entry]
        size_bytes = sum(len(decided.value) for decided in told)
        if not self._answers.take(sender.encode(), units(1, size_bytes), self._port.now()):
            self._port.drop("too many questions about the log")
            return
        for decided in told:
            self._port.send(sender, decided)
        if told:
            return
        if query.key.round <= state.newest:
            first = iter(state.annals) if query.notes and state.annals else iter(state.log)
            # I can tell nothing of rounds before I came in, nor of the last one then.
            oldest = next(first, state.next)
            self._port.send(sender, Forgotten(query.key, oldest, state.newest))
            return
        view = self._port.views.at(query.key.round, state.stream.stage)
        if view is not None and self._is_forsaken(state, view):
            self._machines.begin(state, query.key, view)

    def _is_forsaken(self, state: StreamState, view: View) -> bool:
        """True if a stage's rounds in this view have nobody left to bring anything to them.

        Another view has followed it then, and the others close the rounds, empty, for the peers that
        serve the stage now.
        """
        peers = (view.peers[index] for index in view.serving(state.stream.stage))
        newest = self._port.views.newest
        if view is newest:
            return False
        stay = {peer for peer, member in zip(newest.peers, newest.members, strict=True) if member in view.members}
        return all(peer not in stay or self._port.gone(view, peer) for peer in peers)

    def take_forgotten(self, state: StreamState, sender: PeerId, incarnation: int, message: Forgotten) -> None:
        """A member says that a round has left its log: ask the others for it at once."""
        view = self._port.views.newest
        if view.index(sender, incarnation) is None:
            self._port.drop("not from a member")
            return
        if message.key.round != state.next or message.oldest <= message.key.round:
            return
        was_lost = bool(self.lost(state))
        if state.forgotten.note(sender, message, view.peers, self._port.now()):
            state.asked_s = 0.0
            if state.stream.wants == "all" and not was_lost and self.lost(state):
                self._port.counters["lost rounds"] += 1

    def _heed(self, state: StreamState) -> None:
        """Take the others' word that the next round is gone.

        A peer that needs the round's content must adopt a snapshot. One that only looks on and has seen
        no round yet goes on with the newest. Beside it there may be many that know no more than it does
        and say nothing, so it believes a few, unless some member speaks of that round as held now.
        """
        if not state.forgotten.said or state.forgotten.round != state.next:
            return
        if state.stream.wants == "all":
            if said := self.lost(state):
                self._log.give_up(state, newest_of(said) + state.stream.cadence.stride)
        elif not state.log:
            is_held = Key(state.stream.name, state.next) in self._machines
            others, now_s = self._others(), self._port.now()
            if said := self.lost(state) if is_held else state.forgotten.unopposed(state.next, others, now_s):
                self._skip_to(state, newest_of(said))

    def _skip_to(self, state: StreamState, number: int) -> None:
        self._log.clear(state)
        state.newest = state.stream.cadence.upto(number - 1)
        state.skipped = True

    def take_decided(self, state: StreamState, sender: PeerId, incarnation: int, decided: Decided) -> None:
        """A decision that I had no part in: log it if it is the next one, and get its content."""
        view = self._machines.view_of(sender, decided.view, decided.key)
        if view is None:
            return
        if self._port.views.newest.index(sender, incarnation) is None:
            self._port.drop("not from a member")
            return
        state.seen = max(state.seen, decided.key.round)
        if decided.key.round != state.next or decided.key.attempt:
            return
        try:
            serving = view.serving(state.stream.stage)
            close = decode_close_list(decided.value, state.stream.terms, serving)
        except BadCloseList:
            self._port.drop("bad close list")
            return
        nothing = (False,) * state.stream.terms.shards
        self._log.enter(state, decided.key.round, LoggedRound(close, view.peers, len(serving), decided, nothing))
        state.asked_s = 0.0  # the next one at once, if there is one
        self._filling.begin(state, decided.key)
