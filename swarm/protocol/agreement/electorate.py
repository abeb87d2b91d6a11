"""Those who decide a key together, and how many of them it takes.

Today the voters among a view's members decide the rounds that belong to it and the view after it
(`View.electorate`). Agreement, certificates and branches know an electorate and no view, so that a
key may have another one.
"""

from collections.abc import Collection
from dataclasses import dataclass

from farflock.swarm.links import PeerId


@dataclass(frozen=True, slots=True)
class Electorate:
    """The members that a key concerns by seniority: `peers`, each in the life in which its vote
    counts. All of them vote but the `learners` (indices), which only hear what is decided.

    `hash` names the electorate in messages, and under the signatures of its voters."""

    hash: bytes
    peers: tuple[PeerId, ...]
    lives: tuple[int, ...]
    learners: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.peers)

    @property
    def voters(self) -> tuple[int, ...]:
        """The members (indices) that vote, by seniority."""
        return tuple(index for index in range(len(self.peers)) if index not in self.learners)

    @property
    def keys_that_vote(self) -> tuple[PeerId, ...]:
        """The ids of the voters, by seniority."""
        return tuple(self.peers[index] for index in self.voters)

    def votes(self, member: int) -> bool:
        """True if there is a member of this index, and it votes."""
        return 0 <= member < len(self.peers) and member not in self.learners

    def without(self, convicted: Collection[PeerId]) -> "Electorate":
        """Return the electorate in which these keys do not vote any more: the others decide, by
        more than half of themselves, or half with their most senior one."""
        out = {index for index, peer in enumerate(self.peers) if peer in convicted}
        if not out - self.learners:
            return self
        return Electorate(self.hash, self.peers, self.lives, self.learners | out)

    def is_quorum(self, members: Collection[int]) -> bool:
        """True if the voters among these distinct members decide: more than half of all voters, or
        half with the most senior one.

        Half suffices with the senior, as two disjoint halves cannot both have it: of two voters,
        the senior can go on alone."""
        learners, count = self.learners, len(self.peers) - len(self.learners)
        twice = 2 * (sum(each not in learners for each in members) if learners else len(members))
        return twice > count or (twice == count > 0 and self.voters[0] in members)
