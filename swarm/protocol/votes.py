"""Votes: which members of a view have one, and which members may take one up.

Votes are given, then earned. A capability says how many votes its keys bring. A key takes one up
once so many rounds have counted it, or at once while there are hardly any voters: a run must soon
be able to lose any one of its peers. A view adds few voters for those that stay, so that a crowd of
newcomers never outvotes the others at a stroke. What a key has taken up is on the roll and stays
its own: it has the vote again in the first view that lists it, and no other key of its capability
ever gets that vote.

Sans I/O, pure. What a newcomer may do is in swarm/protocol/enrolment.py.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.protocol.roll import Roll
from farflock.swarm.protocol.views import Member, View

Counted = Callable[[PeerId], int]  # rounds that counted a member, by the newest list known here


@dataclass(frozen=True, slots=True)
class VoteTerms:
    """The terms on which keys take up votes.

    A key does after `after_rounds` counted rounds. A view adds at most one voter for each `per`
    voters that stay, and at least one; 0 is no limit. While there are fewer than `at_once_below`
    voters, a key that may have a vote needs no rounds."""

    after_rounds: int = 3
    per: int = 3
    at_once_below: int = 3


EARNED = VoteTerms()  # as a manifest has them that says nothing else


@dataclass(frozen=True, slots=True)
class VoteRules:
    """A voter's knowledge by which it judges votes: the terms, the rounds that counted each member,
    and the keys to which the founder gave a vote itself."""

    terms: VoteTerms = EARNED
    counted: Counted = lambda peer: 0
    promoted: Collection[PeerId] = ()


NOTHING_COUNTED = VoteRules()


@dataclass(slots=True)
class _Votes:
    """Votes as they are given out to one view's members, in their order."""

    rules: VoteRules
    roll: Roll | None
    voters: int  # so far, those that hold their votes from before included
    room: int  # for new voters

    def give(self, key: PeerId) -> str | None:
        """Give a key a vote; return why it may have none, in words."""
        entry = None if self.roll is None else self.roll.entry_of(key)
        if self.roll is None or entry is None:
            return "its capability is not known here"
        if key not in self.rules.promoted:
            if len(entry.voting) >= entry.votes:
                return "its capability brings no further vote"
            if not self._is_earned(key):
                return "it has not earned its vote yet"
        if self.room < 1:
            return "a view may not add so many voters"
        self.roll = self.roll.with_votes([key])
        self.room -= 1
        self.voters += 1
        return None

    def _is_earned(self, key: PeerId) -> bool:
        terms = self.rules.terms
        # Without any voter nothing could be decided.
        is_needed = self.voters < max(terms.at_once_below, 1)
        return is_needed or self.rules.counted(key) >= terms.after_rounds


def learners(
    parent: View, members: Sequence[Member], roll: Roll | None, rules: VoteRules
) -> tuple[int, ...]:
    """Return which of the next view's members (indices) have no vote in it.

    `roll` is the parent's with the view's new keys; None if it is not known here."""
    held, votes = _begin(parent, members, roll, rules)
    return tuple(
        index
        for index, member in enumerate(members)
        if member.peer not in held and votes.give(member.peer) is not None
    )


def unjustified(parent: View, view: View, roll: Roll | None, rules: VoteRules) -> str | None:
    """Return why a voter must not sign a view for the votes that it gives or takes, in words; None
    if it may."""
    held, votes = _begin(parent, view.members, roll, rules)
    for index, member in enumerate(view.members):
        is_voter = view.electorate.votes(index)
        if member.peer in held:
            if not is_voter:
                return f"{member.peer}: it takes its vote away"
        elif is_voter and (why := votes.give(member.peer)) is not None:
            return f"{member.peer}: {why}"
    return None


def _begin(
    parent: View, members: Sequence[Member], roll: Roll | None, rules: VoteRules
) -> tuple[frozenset[PeerId], _Votes]:
    """Return the keys that hold votes, and what may be given besides."""
    before = frozenset(parent.peers[index] for index in parent.electorate.voters)
    held = before if roll is None else before | roll.voting
    listed, per = {member.peer for member in members}, rules.terms.per
    room = max(1, len(before & listed) // per) if per else len(members)
    return held, _Votes(rules, roll, len(held & listed), room)
