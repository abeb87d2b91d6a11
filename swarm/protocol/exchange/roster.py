"""The members of one exchange: contributors, voters and suspects."""

from farflock.swarm.links import PeerId
from farflock.swarm.protocol.groups import reducers


class Roster:
    """The members as indices into `peers`, which is in the view's order; `me` is one of them.

    `ordered` is the order in which those that may propose a close list do. `rotation` lists the
    contributors in the order from which reducers are chosen, the same in all rounds; without it all
    members in `ordered` contribute. Members outside the rotation only vote, or only learn. The
    `laggards` have missed so many rounds that they reduce only if nobody else does, and, unless
    this is a round of `probation`, are waited for only a little."""

    def __init__(
        self,
        peers: tuple[PeerId, ...],
        me: int,
        ordered: tuple[int, ...],
        rotation: tuple[int, ...] | None = None,
        laggards: frozenset[int] = frozenset(),
        *,
        probation: bool = False,
    ) -> None:
        self.peers, self.me, self.ordered = peers, me, ordered
        self._rotation = ordered if rotation is None else rotation
        self.contributors = frozenset(self._rotation)
        self.contributes = me in self.contributors
        self._laggards, self._probation = laggards, probation
        self.suspects: frozenset[int] = frozenset()
        self.leaves = False

    def suspect(self, suspects: frozenset[int]) -> None:
        """Stop waiting for these members; a member among its own suspects leaves."""
        self.leaves, self.suspects = self.me in suspects, suspects - {self.me}

    @property
    def living(self) -> frozenset[int]:
        """The contributors that are not suspect."""
        return self.contributors - self.suspects

    @property
    def prompt(self) -> frozenset[int]:
        """The living that are waited for in full: all but laggards, or all if no others live."""
        return self.living if self._probation else self.living - self._laggards or self.living

    @property
    def staying(self) -> frozenset[int]:
        """If this member leaves, the live contributors that stay; otherwise nobody."""
        return self.living - {self.me} if self.leaves else frozenset()

    def brings(self, member: int) -> bool:
        """True if a member's messages about content concern us: both of us contribute."""
        return self.contributes and member in self.contributors

    @property
    def has_voters(self) -> bool:
        """True if there are members that only vote."""
        return len(self.contributors) < len(self.peers)

    @property
    def place(self) -> int:
        """The number of members that propose before this one; all, if it never proposes."""
        ordered = self.ordered
        return ordered.index(self.me) if self.me in ordered else len(ordered)

    @property
    def live_before_me(self) -> int:
        """The number of live members that propose before this one."""
        return sum(member not in self.suspects for member in self.ordered[: self.place])

    @property
    def others(self) -> list[int]:
        """The other contributors, in ascending order: the audience of messages about content."""
        return sorted(self.contributors - {self.me})

    def reducers(self, shard: int) -> tuple[int, ...]:
        """Return the reducers of a shard, in the order in which they take over."""
        rotated = reducers(self._rotation, shard)
        if not self._laggards:
            return rotated
        return tuple(sorted(rotated, key=lambda member: member in self._laggards))
