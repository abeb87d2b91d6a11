"""Re-founding of a view whose voters have restarted (docs/decisions/043)."""

from collections.abc import Callable, Collection

from farflock.swarm.context import PeerContext
from farflock.swarm.peer.rounds.forks import Forks
from farflock.swarm.peer.views.admission import Admission
from farflock.swarm.protocol import views
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.views import Member, View
from farflock.swarm.stable.recollection import Recollection

# A voter that is silent for less than this, and not heard in another life, may come back with what
# it knows: a re-founding would take rounds back that it may have decided.
LOST_S = 20.0
LEFT_S = 5.0  # so long for one that has said goodbye: it is not cut off


class Refounding:
    """One peer's part in re-founding a view whose voters have restarted."""

    def __init__(self, context: PeerContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self.recollection = Recollection(context.run, "")
        # The first round that is not wholly here; None before this peer has a state, and while the
        # content of that round may still come.
        self.reached: Callable[[], int | None] = lambda: None
        self.forks = Forks(context, {})  # of this peer's streams
        self._silent: dict[Member, float] = {}  # since when
        self._left: frozenset[Member] = frozenset()  # those that have said goodbye

    def look(self) -> None:
        """Note which voters are not heard, and which leave; call it often."""
        now_s, hears, leaving = self._context.now(), self._context.hears, self._context.leaving
        deciding = self._context.views.deciding(self.reached())
        voters = [view.members[at] for view in deciding for at in view.electorate.voters]
        silent = [member for member in voters if not hears(member)]
        self._silent = {member: self._silent.get(member, now_s) for member in silent}
        # A view without them follows, and then nothing else tells of their goodbye.
        self._left = frozenset(
            member for member in voters if member.peer in leaving or member in self._left
        )

    def _may_decide(self, view: View, listed: Collection[Member] = ()) -> set[int]:
        """Return the voters (indices) of a view that decide in the lives that it lists, or may come
        back in them; the `listed` ones count as there."""
        members, convicted = view.members, self._context.entrance.convicted
        return {
            at
            for at in view.electorate.voters
            if (members[at] in listed or not self._is_lost(members[at]))
            and not self._context.has_given_up(view, members[at].peer)
            and members[at].peer not in convicted
        }

    def _is_lost(self, member: Member) -> bool:
        if self._context.hears(member):
            return False
        if member.peer == self._context.me:
            return True
        heard = self._context.lives.get(member.peer, member.incarnation)
        if heard != member.incarnation:
            return True
        silent_s = self._context.now() - self._silent.get(member, self._context.now())
        return silent_s >= (LEFT_S if member in self._left else LOST_S)

    @property
    def is_back(self) -> bool:
        """True if this peer has a vote in the newest view, from an earlier life that it knows all
        about, and has a state with which to go on."""
        chain, me = self._context.chain, self._context.me
        if chain is None or not self._admission.wants_in or self._context.is_member:
            return False
        newest = chain.newest
        if newest in self._context.given_up or me not in newest.electorate.keys_that_vote:
            return False
        return self.recollection.covers(chain) and self.reached() is not None

    @property
    def has_lost(self) -> bool:
        """True if this peer's state is that of the side of a fork that has lost."""
        return self.forks.found is not None and self.forks.found.has_lost

    @property
    def is_wanted(self) -> bool:
        """True if the lives that the views list cannot go on, and the keys of the newest view's
        voters that are there can."""
        return self.is_stuck and self.are_enough

    @property
    def are_enough(self) -> bool:
        """True if the voters that are there, in whichever lives, decide by their keys."""
        newest, joining = self._context.views.newest, self._admission.candidates.joining
        voters = self._judging
        back = {index for index in voters.voters if voters.peers[index] in joining}
        return voters.is_quorum(self._context.heard_in(newest) | back)

    @property
    def _judging(self) -> Electorate:
        """The voters of the newest view that decide the next one: the convicted do not."""
        return self._context.views.newest.electorate.without(self._context.entrance.convicted)

    @property
    def is_stuck(self) -> bool:
        """True if too few voters of the newest view, or of that of the next round, are left in the
        lives that it lists.

        That round may be decided, and its content gone with them. A member that has left stays for
        a while, and may still decide it."""
        newest, *of_round = self._context.views.deciding(self.reached())
        if self.forks.found is not None and not newest.stage_rounds:
            return True
        if not self._judging.is_quorum(self._may_decide(newest)):
            return True
        listed = newest.members
        return any(
            not view.electorate.is_quorum(self._may_decide(view, listed)) for view in of_round
        )

    def successor(self, newest: View, members: tuple[Member, ...]) -> View:
        """Return the next view with these members, as this peer would have it."""
        reached = self.reached()
        if reached is None or newest.stage_rounds or not self.is_wanted:
            return views.successor(newest, members)
        # Others of the old view may not be there any more; if they are, they can come back.
        there = (
            each for each in members if each not in newest.members or self._context.hears(each)
        )
        return views.refounded(newest, tuple(there), reached)

    def unjustified(self, view: View) -> str | None:
        """Return why this peer must not sign a re-founding of the newest view, in words; None if
        it may, as far as the members of both are concerned."""
        reached = self.reached()
        if not self.is_stuck:
            return "the view before can go on"
        if (fork := self.forks.found) is not None and fork.has_lost:
            first, last = fork.key.round, self.forks.limit + self._context.lead
            is_within = first <= view.first_round <= last
            return None if is_within else f"it does not begin within rounds {first} to {last}"
        # A view that begins later might have rounds before it that nobody can decide any more.
        if reached is None or not reached <= view.first_round <= reached + self._context.lead:
            return f"it begins at round {view.first_round}, but this peer's next one is {reached}"
        return None
