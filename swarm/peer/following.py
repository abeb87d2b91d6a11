"""What a member does about rounds that were decided without it: it asks others for them, in order, and fetches their content.

A member whose state depends on a round that has left everybody's log must adopt a snapshot; who only looks on goes on with the
oldest round that there is. Where a stage's last round died with the only one that had its content, who had no part in it goes
on without: to the stage, that round has failed.
"""

import asyncio
import itertools
import random
from collections.abc import Callable

from msgspec.structs import replace

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Decided, Forgotten, Key, LogQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import RoundLog
from farflock.swarm.peer.streams import StreamState
from farflock.swarm.protocol.collective import BadCloseList, Collective, decode_close_list
from farflock.swarm.protocol.decide import is_quorum
from farflock.swarm.protocol.forgetting import newest_of
from farflock.swarm.protocol.holdings import Item
from farflock.swarm.protocol.views import View
from farflock.swarm.quota import Quota, units

FOLLOW_S = 0.5
ASK_ANYWAY_S = 2.0  # who only looks on has no offer of its own by which it would notice that it missed a decision
FETCH_TIMEOUT_S = 10.0
TOLD_AT_ONCE = 4  # decisions in answer to a query, for rounds may be over faster than they can be asked for one by one
ANSWERS_PER_S, ANSWERS_BURST = 256.0, 1024.0  # for each asker, and less of long ones: see `units`
HOPELESS_S = 20.0  # nobody has had a content for so long: whoever had it is out of the view by now


class Following:
    """One peer's part in keeping up. `machine` finds the machine of a round, `begin` makes one if this peer may take part,
    `view_of` is the view that a message of a sender names, if that holds for its round."""

    def __init__(
        self,
        port: PeerContext,
        log: RoundLog,
        machine: Callable[[Key], Collective | None],
        begin: Callable[[StreamState, Key, View], Collective | None],
        view_of: Callable[[PeerId, bytes, Key], View | None],
    ) -> None:
        self._port, self._log, self._machine, self._begin, self._view_of = port, log, machine, begin, view_of
        self._random = random.Random(f"{port.seed}/{port.me}/follow")
        self._answers = Quota(ANSWERS_PER_S, ANSWERS_BURST, 4 * MAX_MEMBERS)

    def follow(self, state: StreamState) -> None:
        """Ask somebody for the next round's decision if others are further, if I only watch, or if mine is overdue."""
        self._heed(state)
        now_s = self._port.now()
        if now_s - state.asked_s < FOLLOW_S or state.stream.group:
            return
        number = state.next
        view = self._port.views.newest
        watching = self._port.my_index(self._port.views.at(number, state.stream.stage) or view) is None
        watching |= state.stream.wants == "last" and now_s - state.asked_s >= ASK_ANYWAY_S
        machine = self._machine(Key(state.stream.name, number))
        overdue = machine is not None and now_s > machine.ends_s
        if not (watching or overdue or state.seen > number):
            return
        others = self._others()
        said = {peer: word for peer in others if (word := state.forgotten.by(number, peer))}
        # Whoever lives and says nothing for so long never will; of a round that is not decided, too, nobody says anything.
        hopeless = now_s - state.forgotten.since_s >= HOPELESS_S and bool(self.lost(state))
        if said and state.stream.wants != "all" and (hopeless or len(said) == len(others)):
            self._skip_to(state, min(word.oldest for word in said.values()))
        elif askable := [peer for peer in others if peer not in said]:
            state.asked_s = now_s
            notes = state.stream.wants == "last"
            self._port.send(self._random.choice(askable), LogQuery(Key(state.stream.name, number), notes))

    def _others(self) -> list[PeerId]:
        """The living members, as far as one knows, but me."""
        peers = self._port.views.newest.peers
        return [peer for peer in peers if peer != self._port.me and self._port.life(peer) != "dead"]

    def lost(self, state: StreamState) -> list[Forgotten]:
        """What others say of the next round if it has left the logs of most; empty as long as it has not."""
        return state.forgotten.agreed(state.next, self._others())

    def answer_query(self, state: StreamState, sender: PeerId, query: LogQuery) -> None:
        """Send the decision and some of those after it; for want of it, say so, or begin the round that nobody has begun."""
        numbers = itertools.islice(itertools.count(query.key.round, state.stream.stride), TOLD_AT_ONCE)
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
            oldest = next(first, state.next)  # before I came in I can tell nothing, nor of the last round then
            self._port.send(sender, Forgotten(query.key, oldest, state.newest))
        elif (view := self._port.views.at(query.key.round, state.stream.stage)) is not None and self._is_forsaken(
            state, view
        ):
            self._begin(state, query.key, view)

    def _is_forsaken(self, state: StreamState, view: View) -> bool:
        """Whether another view has followed this one, and nobody is left of those who could bring anything to a stage's rounds
        in it: the others close them, empty, for whoever serves the stage now."""
        peers = (view.peers[index] for index in view.serving(state.stream.stage))
        newest = self._port.views.newest
        if view is newest:
            return False
        stay = {peer for peer, member in zip(newest.peers, newest.members, strict=True) if member in view.members}
        return all(peer not in stay or self._port.gone(view, peer) for peer in peers)

    def take_forgotten(self, state: StreamState, sender: PeerId, incarnation: int, message: Forgotten) -> None:
        """The round has left the log of somebody, whom we asked: it is to be asked of the others, at once."""
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
        """Take the others' word that the next round is gone: whoever needs its content must adopt a snapshot; who only looks
        on, and has seen no round yet, goes on with the newest. Beside such a one there may be many that know no more than it
        and say nothing: so it believes some, unless somebody speaks to it of that round as of one that is held now."""
        if not state.forgotten.said or state.forgotten.round != state.next:
            return
        if state.stream.wants == "all":
            if said := self.lost(state):
                self._log.give_up(state, newest_of(said) + state.stream.stride)
        elif not state.log:
            is_held = self._machine(Key(state.stream.name, state.next)) is not None
            others, now_s = self._others(), self._port.now()
            if said := self.lost(state) if is_held else state.forgotten.unopposed(state.next, others, now_s):
                self._skip_to(state, newest_of(said))

    def _skip_to(self, state: StreamState, number: int) -> None:
        self._log.clear(state)
        state.newest = state.stream.upto(number - 1)
        state.skipped = True

    def take_decided(self, state: StreamState, sender: PeerId, incarnation: int, decided: Decided) -> None:
        """A decision that I had no part in: log it if it is the next one, and get its content."""
        view = self._view_of(sender, decided.view, decided.key)
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
        nothing = (False,) * state.stream.shards
        self._log.enter(state, decided.key, close, view.peers, len(serving), decided, nothing)
        state.asked_s = 0.0  # the next one at once, if there is one
        self.fill_later(state, decided.key)

    def fill_later(self, state: StreamState, key: Key) -> None:
        """Get what this peer wants of a round that it had no part in."""
        if state.stream.wanted(state.log[key.round].close):
            self._port.spawn(self._fill(state, key))
        else:
            self._log.completed(state, key.round)

    def _may_forsake(self, state: StreamState) -> bool:
        """Whether a content that nobody has may be done without: of a stage, which would stand still, and among a quorum, for
        others may have it on the other side of a cut."""
        view = self._port.views.newest
        there = [i for i, peer in enumerate(view.peers) if peer == self._port.me or not self._port.gone(view, peer)]
        whole = state.stream.stage is not None and state.stream.wants == "all"
        return whole and is_quorum(there, len(view.peers))

    def _forsake(self, state: StreamState, number: int) -> None:
        """To who brought nothing to it, the round has failed. Who did must not bring that again, for it counts: it is behind
        for good, and its state with it."""
        self._port.counters["forsaken rounds"] += 1
        entry = state.log[number]
        if any(entry.taken):
            self._log.evict(state, number)
        else:
            entry.close = replace(entry.close, items=(), members=())

    async def _fill(self, state: StreamState, key: Key) -> None:
        """Fetch the content of a logged round from whoever holds it."""
        entry = state.log[key.round]

        def holders() -> list[PeerId]:
            return [peer for peer in self._port.views.newest.peers if peer != self._port.me]

        async def fill(item: Item) -> None:
            hopeless_s: float | None = None  # since when nobody had it
            while state.entry(key.round) is entry and entry.close.items:
                asked_s = self._port.now()
                if await self._port.chunks.fetch(item.digest, item.size, holders, key, FETCH_TIMEOUT_S, final=True):
                    return
                nobody = self._port.now() - asked_s < FETCH_TIMEOUT_S
                hopeless_s = (asked_s if hopeless_s is None else hopeless_s) if nobody else None
                if hopeless_s is not None and self._port.now() - hopeless_s >= HOPELESS_S and self._may_forsake(state):
                    self._forsake(state, key.round)
                await asyncio.sleep(FOLLOW_S if nobody else 0.0)

        wanted = state.stream.wanted(entry.close)
        if any(item.size > state.stream.max_shard_bytes for item in wanted):
            self._port.drop("item too large")
            return
        await asyncio.gather(*(fill(item) for item in wanted))
        if state.entry(key.round) is entry:
            self._log.completed(state, key.round)
        else:  # it has left the log meanwhile: nobody else would release what has come since
            self._port.store.release(key)
