"""Rounds are counted on axes, and a view begins on each of them where it says: one axis for the streams of whole models, one
for each stage's.

Stages are at different rounds, and one that nobody serves stands still: on a common axis a view that begins ahead of it would
leave it rounds to close that belong to members who are long gone.

A *floor* is the least round, by axis, that something could begin with: place 0 for whole models, 1 + s for stage s. Missing
places are 0.
"""

import itertools

Floor = tuple[int, ...]

NO_FLOOR: Floor = ()


def axis(stage: int | None) -> int:
    """The place of a stage (None: of whole models) in a floor."""
    return 0 if stage is None else 1 + stage


def at(floor: Floor, stage: int | None) -> int:
    """The round on one axis."""
    place = axis(stage)
    return floor[place] if place < len(floor) else 0


def highest(first: Floor, second: Floor) -> Floor:
    """The higher of both, axis by axis."""
    return tuple(max(pair) for pair in itertools.zip_longest(first, second, fillvalue=0))


def reaches(floor: Floor, least: Floor) -> bool:
    """True if `floor` is nowhere below `least`."""
    return all(mine >= wanted for mine, wanted in itertools.zip_longest(floor, least, fillvalue=0))


def raised(floor: Floor, stage: int | None, number: int) -> Floor:
    """The same, at least `number` on one axis."""
    place = axis(stage)
    return highest(floor, (0,) * place + (number,))
