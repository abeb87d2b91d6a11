"""Forks of a stream: two lists of one round, each signed by a quorum.

That takes a voter that signs both, and hides the one from those that propose the other. When
members of the two sides meet, it is convicted if they have its votes in one ballot, or the promise
that hides a vote (swarm/protocol/agreement/convictions.py); the fork is healed in any case. They
notice by a list that does not follow from their own, and look for the first round that differs. All
that hold both of its lists keep the one with the lower (ballot, hash). The members then re-found
their view without the convicted (`Refounding`): a new view takes over the rounds that have begun,
and the side that lost gives up its state for the other's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Ballot, Decided, Key, LogQuery
from farflock.swarm.peer.rounds.round_log import LoggedRound, StreamState
from farflock.swarm.protocol.agreement.convictions import Testimony
from farflock.swarm.protocol.agreement.justified import digest_of
from farflock.swarm.protocol.exchange.close_list import previous_of
from farflock.swarm.protocol.views import View

ASK_EVERY_S = 0.5  # between two questions to one peer about its past
SHOW_EVERY_S = 2.0  # messages may be lost, and a list is soon out of the others' logs


@dataclass(slots=True)
class ListFork:
    """The first round of a stream that differs, whether this peer's list of it has lost, and the
    peers that showed the list that is kept."""

    key: Key
    has_lost: bool
    winners: set[PeerId] = field(default_factory=set)


class Forks:
    """Forks of this peer's streams, as far as it has noticed them; `found` until it is healed."""

    def __init__(self, context: PeerContext, streams: Mapping[str, StreamState]) -> None:
        self._context, self._streams = context, streams
        self.found: ListFork | None = None
        self._asked: dict[PeerId, float] = {}
        self._shown_s = -1e9

    def tick(self) -> None:
        """Show this peer's list of a round that forked to all members, until it is healed."""
        fork, now_s = self.found, self._context.now()
        if fork is None or now_s - self._shown_s < SHOW_EVERY_S:
            return
        self._shown_s = now_s
        state = self._streams.get(fork.key.stream)
        entry = None if state is None else state.entry(fork.key.round)
        if entry is None:
            self.healed()  # too old to be compared, or this peer has another state by now
            return
        self._context.tell(self._context.views.newest.peers, entry.decided)

    def compare(self, state: StreamState, sender: PeerId, decided: Decided) -> bool:
        """Compare a certified list that does not fit (`StreamState.fits`) with this peer's own;
        return True if it must not be taken."""
        if not self._context.views.newest.lists(sender):
            self._context.drop("not from a member")  # nor is its past asked for, or its state
            return True
        number = decided.key.round
        view = self._context.views.by_hash(decided.view)
        if view is None or view is not self._context.views.at(number, state.stream.stage):
            return False
        if (entry := state.entry(number)) is not None:
            self._meet(state, sender, view, entry, decided)
        else:
            self._ask(sender, Key(state.stream.name, state.newest))
        return True

    def _meet(
        self, state: StreamState, sender: PeerId, view: View, entry: LoggedRound, other: Decided
    ) -> None:
        """Two lists of one round: look for the first one that differs, and judge there."""
        before = other.key.round - state.stream.cadence.stride
        if previous_of(other.value) != entry.close.previous and state.entry(before) is not None:
            self._ask(sender, Key(state.stream.name, before))
            return
        mine, convict = entry.decided, self._context.entrance.convict
        testimony = entry.testimony or Testimony(other.key, view.electorate, convict)
        for each in (mine, other):
            testimony.hear_votes(each.ballot, digest_of(each.value), each.proofs)
        has_lost = _rank(other) < _rank(mine)
        if self.found is None or other.key < self.found.key:
            self.found = ListFork(other.key, has_lost)
            self._context.counters["forks"] += 1
            self._shown_s = -1e9
        if has_lost:
            self.found.winners.add(sender)

    def _ask(self, peer: PeerId, key: Key) -> None:
        now_s = self._context.now()
        if now_s - self._asked.get(peer, -1e9) >= ASK_EVERY_S:
            self._asked[peer] = now_s
            self._context.send(peer, LogQuery(key))

    @property
    def limit(self) -> int:
        """The highest round that any peer is known to have reached."""
        return max((state.seen for state in self._streams.values()), default=0)

    def healed(self) -> None:
        """Forget the fork: one side has given up its state, or is about to."""
        self.found, self._asked = None, {}


def _rank(decided: Decided) -> tuple[Ballot, bytes]:
    return decided.ballot, digest_of(decided.value)
