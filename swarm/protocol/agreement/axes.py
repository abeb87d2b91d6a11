"""Rounds are counted on axes: one for the streams of whole models, and one per stage.

A view begins at its own round on each axis. Stages are at different rounds, and a stage without
servers makes no progress. On a common axis, a view that begins ahead of such a stage would leave it
with rounds to close whose members are long gone.

A *floor* is the lowest round by axis at which something could begin: place 0 for whole models,
1 + s for stage s; missing places are 0.
"""

import itertools
from dataclasses import dataclass

Floor = tuple[int, ...]

NO_FLOOR: Floor = ()


def axis(stage: int | None) -> int:
    """Return the place of a stage (None: of whole models) in a floor."""
    return 0 if stage is None else 1 + stage


def at(floor: Floor, stage: int | None) -> int:
    """Return the round on one axis."""
    place = axis(stage)
    return floor[place] if place < len(floor) else 0


def highest(first: Floor, second: Floor) -> Floor:
    """Return the higher of both floors, axis by axis."""
    return tuple(max(pair) for pair in itertools.zip_longest(first, second, fillvalue=0))


def lowest(first: Floor, second: Floor) -> Floor:
    """Return the lower of both floors, axis by axis."""
    return tuple(min(pair) for pair in zip(first, second, strict=False))


def reaches(floor: Floor, min_floor: Floor) -> bool:
    """True if `floor >= min_floor` on every axis."""
    pairs = itertools.zip_longest(floor, min_floor, fillvalue=0)
    return all(mine >= wanted for mine, wanted in pairs)


def raised(floor: Floor, stage: int | None, number: int) -> Floor:
    """Return the floor raised to at least `number` on one axis."""
    place = axis(stage)
    return highest(floor, (0,) * place + (number,))


@dataclass(slots=True)
class Touched:
    """The rounds that a member took part in, under the views that it follows.

    The next view should begin at `floor` or later: after the rounds that it has begun. It must
    begin at `bound` or later: after those in which it has voted, or knows the decision."""

    floor: Floor = NO_FLOOR
    bound: Floor = NO_FLOOR

    def begin(self, stage: int | None, number: int) -> None:
        """Note that this member takes part in a round."""
        self.floor = raised(self.floor, stage, number + 1)

    def bind(self, stage: int | None, number: int) -> None:
        """Note that this member has voted in a round, or knows what was decided."""
        self.begin(stage, number)
        self.bound = raised(self.bound, stage, number + 1)

    @property
    def newest(self) -> int:
        """The highest round on any axis; -1 before the first."""
        return max(self.floor, default=0) - 1
