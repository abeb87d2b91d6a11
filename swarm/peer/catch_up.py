"""Catching up with rounds decided without this peer: it asks others for them, in order.

A member whose state depends on a round that has left every log must adopt a snapshot; an observer
goes on with the oldest round that exists. Content is fetched from any holder until it is
here or given up: if a stage's last round died with its only holder, the members with no part in it
go on, and to the stage that round has failed.
"""

import asyncio
import contextlib
import functools
import itertools
import random

from msgspec.structs import replace

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, Decided, Forgotten, Key, LogQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.round_log import LoggedRound, RoundLog, StreamState
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.bundles import BadBundle
from farflock.swarm.protocol.exchange.close_list import BadCloseList, decode_close_list
from farflock.swarm.protocol.log_truncation import newest_of
from farflock.swarm.protocol.quorum import is_quorum
from farflock.swarm.protocol.views import View
from farflock.swarm.quota import Quota, units

FOLLOW_S = 0.5  # between two questions about one stream
FETCH_TIMEOUT_S = 10.0  # then check whether the item is still wanted, and fetch it again
RETRY_S = 0.5  # pause while no peer has the item, so as not to ask in a tight loop
# Content missing for this long is given up: its holders have left the view by now.
HOPELESS_S = 20.0
# Decisions per answer: rounds may end faster than they can be asked for one by one.
DECISIONS_PER_ANSWER = 4
BLOCK_ROUNDS = 32  # the same, for a newcomer; of these it has no more that it has not applied
BLOCK_BYTES = 64 * 1024 * 1024  # nor of their content
ANSWERS_PER_S, ANSWERS_BURST = 256.0, 1024.0  # per asker, fewer if they are long: see `units`


class CatchUp:
    """Catches up with decisions made without this peer, and helps other peers to do the same."""

    def __init__(self, context: PeerContext, log: RoundLog) -> None:
        self._context, self._log = context, log
        self._random = random.Random(f"{context.seed}/{context.me}/follow")
        self._answers = Quota(ANSWERS_PER_S, ANSWERS_BURST, 4 * MAX_MEMBERS)

    def ask(self, state: StreamState) -> None:
        """Ask a random member for the next round's decision, which this peer may have missed."""
        now_s, number = self._context.now(), state.next
        if now_s - state.asked_s < FOLLOW_S or state.stream.terms.group or _is_full(state):
            return
        others = self._others()
        said = {peer: word for peer in others if (word := state.forgotten.by(number, peer))}
        # A live member silent for this long has no report to make. A round that is not decided yet
        # has no reports at all.
        hopeless = now_s - state.forgotten.since_s >= HOPELESS_S and bool(self.lost(state))
        if said and state.stream.wants != "all" and (hopeless or len(said) == len(others)):
            self._skip_to(state, min(word.oldest for word in said.values()))
        elif askable := [peer for peer in others if peer not in said]:
            state.asked_s = now_s
            query = LogQuery(Key(state.stream.name, number), notes=state.stream.wants == "last")
            self._context.send(self._random.choice(askable), query)

    def _others(self) -> list[PeerId]:
        """Return the other members of the newest view that are not known to be dead."""
        peers = self._context.views.newest.peers
        return [
            peer
            for peer in peers
            if peer != self._context.me and self._context.life(peer) != "dead"
        ]

    def lost(self, state: StreamState) -> list[Forgotten]:
        """Return others' reports if the next round has left most logs; else an empty list."""
        return state.forgotten.agreed(state.next, self._others())

    def answer_query(
        self, state: StreamState, sender: PeerId, incarnation: int, query: LogQuery
    ) -> View | None:
        """Send the decision of a round and of some after it, or say that they have left the log; to
        a newcomer, which hears nothing else of rounds, also that the round is open.

        If the members that serve the round's stage left without beginning it, return its view: this
        peer must begin it."""
        is_member = self._context.views.newest.index(sender, incarnation) is not None
        numbers = itertools.islice(
            itertools.count(query.key.round, state.stream.cadence.stride),
            DECISIONS_PER_ANSWER if is_member else BLOCK_ROUNDS,
        )
        entries = (
            state.entry(number) if query.notes else state.log.get(number) for number in numbers
        )
        decisions = [
            entry.decided
            for entry in itertools.takewhile(lambda entry: entry is not None, entries)
            if entry
        ]
        # A short question may have a long answer, so each asker has a budget.
        size_bytes = sum(len(decided.value) for decided in decisions)
        if not self._answers.take(sender.encode(), units(1, size_bytes), self._context.now()):
            self._context.drop("too many questions about the log")
            return None
        number, name = query.key.round, state.stream.name
        applied, current = number - state.stream.cadence.stride, number > state.newest
        self._context.note_followed(sender, name, applied, current=current)
        for decided in decisions:
            self._context.send(sender, decided)
        if decisions:
            return None
        if number <= state.newest:
            first = iter(state.old_log) if query.notes and state.old_log else iter(state.log)
            # Rounds from before this peer joined are unknown here, even the last.
            oldest = next(first, state.next)
            self._context.send(sender, Forgotten(query.key, oldest, state.newest))
            return None
        if number == state.next and not is_member and not query.notes:
            self._context.send(sender, Forgotten(query.key, number, number))
        view = self._context.views.at(number, state.stream.stage)
        return view if view is not None and self._is_given_up(state, view) else None

    def _is_given_up(self, state: StreamState, view: View) -> bool:
        """True if no member is left to contribute to a stage's rounds in this view.

        Then a later view exists, and the other members close these rounds, empty, for the peers
        that serve the stage now."""
        peers = (view.peers[index] for index in view.serving(state.stream.stage))
        newest = self._context.views.newest
        if view is newest:
            return False
        stay = {
            peer
            for peer, member in zip(newest.peers, newest.members, strict=True)
            if member in view.members
        }
        return all(peer not in stay or self._context.gone(view, peer) for peer in peers)

    def take_forgotten(
        self, state: StreamState, sender: PeerId, incarnation: int, message: Forgotten
    ) -> None:
        """Note that a round has left a member's log, and ask the others for it at once."""
        view = self._context.views.newest
        if view.index(sender, incarnation) is None:
            self._context.drop("not from a member")
            return
        if message.key.round == state.next == message.oldest == message.newest:
            state.open_round = state.next
        if message.key.round != state.next or message.oldest <= message.key.round:
            return  # a late answer, a round that is not decided, or a contradiction
        was_lost = bool(self.lost(state))
        if state.forgotten.note(sender, message, view.peers, self._context.now()):
            state.asked_s = 0.0  # ask the next member at once
            if state.stream.wants == "all" and not was_lost and self.lost(state):
                self._context.counters["lost rounds"] += 1

    def heed(self, state: StreamState, *, is_open: bool) -> None:
        """Accept the others' reports that the next round is gone.

        `is_open`: some member still treats it as open. A peer that needs the content must adopt a
        snapshot. An observer that has seen no round yet skips to the newest. Unless the round is
        open it believes a few reports: others may know no more and be silent."""
        if state.forgotten.round != state.next:
            return
        if state.stream.wants == "all":
            if said := self.lost(state):
                self._log.give_up(state, newest_of(said) + state.stream.cadence.stride)
        elif not state.log:
            others, now_s = self._others(), self._context.now()
            unopposed = state.forgotten.unopposed(state.next, others, now_s)
            if said := self.lost(state) if is_open else unopposed:
                self._skip_to(state, newest_of(said))

    def _skip_to(self, state: StreamState, number: int) -> None:
        self._log.clear(state)
        state.newest = state.stream.cadence.upto(number - 1)
        state.skipped = True

    def take_decided(
        self, state: StreamState, view: View, sender: PeerId, incarnation: int, decided: Decided
    ) -> None:
        """Log a decision made without this peer if it is the next one, and fetch its content."""
        if self._context.views.newest.index(sender, incarnation) is None:
            self._context.drop("not from a member")
            return
        state.seen = max(state.seen, decided.key.round)
        if decided.key.round != state.next or decided.key.attempt or _is_full(state):
            return
        try:
            serving = view.serving(state.stream.stage)
            close = decode_close_list(decided.value, state.stream.terms, serving)
        except BadCloseList:
            self._context.drop("bad close list")
            return
        nothing = (False,) * state.stream.terms.bundles
        self._log.enter(
            state, decided.key.round, LoggedRound(close, view.peers, len(serving), decided, nothing)
        )
        state.asked_s = 0.0  # ask for the next one at once
        self.fill(state, decided.key)

    def fill(self, state: StreamState, key: Key) -> None:
        """Fetch what this peer wants of a logged round."""
        if state.stream.wanted(state.log[key.round].close):
            self._context.spawn(self._fill(state, key))
        else:
            self._log.completed(state, key.round)

    async def _fill(self, state: StreamState, key: Key) -> None:
        entry = state.log.get(key.round)
        if entry is None:
            return  # a return has given the round up before this began
        wanted = state.stream.wanted(entry.close)
        bundles = state.stream.terms.bundles
        fits = functools.partial(self._context.bundles.fits, state.stream)
        if not all(fits(item.index % bundles, item.size) for item in wanted):
            self._context.drop("item too large")
            return
        try:
            async with state.turn if state.catching_up else contextlib.nullcontext():
                await asyncio.gather(*(self._fetch(state, key, entry, item) for item in wanted))
        except BadBundle:
            self._context.drop("bad list of shards")
            return
        if state.entry(key.round) is entry:
            self._log.completed(state, key.round)
        else:  # it left the log meanwhile, so no other code releases these
            self._context.store.release(key)

    async def _fetch(
        self, state: StreamState, key: Key, entry: LoggedRound, item: RoundItem
    ) -> None:
        """Ask for one item until it is here, or its round left the log or was given up."""
        bundle = item.index % state.stream.terms.bundles
        fetch = functools.partial(
            self._context.bundles.fetch,
            state.stream,
            bundle,
            (item.digest, item.size),
            self._holders,
            key,
            FETCH_TIMEOUT_S,
            final=True,
        )
        hopeless_s: float | None = None  # since when no holder is known
        while state.entry(key.round) is entry and entry.close.items:
            asked_s = self._context.now()
            if await fetch():
                return
            now_s = self._context.now()
            nobody = now_s - asked_s < FETCH_TIMEOUT_S
            hopeless_s = (asked_s if hopeless_s is None else hopeless_s) if nobody else None
            is_hopeless = hopeless_s is not None and now_s - hopeless_s >= HOPELESS_S
            if is_hopeless and self._may_give_up(state):
                self._give_up(state, key.round)
            await asyncio.sleep(RETRY_S if nobody else 0.0)

    def _holders(self) -> list[PeerId]:
        return [peer for peer in self._context.views.newest.peers if peer != self._context.me]

    def _may_give_up(self, state: StreamState) -> bool:
        """True if content that no peer has may be given up.

        Only a stage's content, since the stage would stand still without it, and only while this
        peer sees a quorum: behind a network split the others may still have it."""
        view, context = self._context.views.newest, self._context
        members = enumerate(view.peers)
        there = [i for i, peer in members if peer == context.me or not context.gone(view, peer)]
        whole = state.stream.stage is not None and state.stream.wants == "all"
        return whole and is_quorum(there, len(view.peers))

    def _give_up(self, state: StreamState, number: int) -> None:
        """Give up a round's content: for a peer that did not contribute, the round has failed.

        A contributor must not contribute the same again, as it already counts: it has lost the
        round, and its state stays behind."""
        self._context.counters["forsaken rounds"] += 1
        entry = state.log[number]
        if any(entry.taken):
            self._log.evict(state, number)
        else:
            entry.close = replace(entry.close, items=(), members=())


def _is_full(state: StreamState) -> bool:
    """Return whether a node that replays rounds has enough of them here, or coming."""
    if not state.catching_up:
        return False
    ahead = [entry for number, entry in state.log.items() if number > state.applied]
    size_bytes = sum(item.size for entry in ahead for item in entry.close.items)
    return len(ahead) >= BLOCK_ROUNDS or size_bytes >= BLOCK_BYTES
