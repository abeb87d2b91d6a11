"""Rounds are counted on axes: one for the streams of whole models, and one per stage.

A view begins at its own round on each axis. Stages are at different rounds, and a stage without
servers makes no progress. On a common axis, a view that begins ahead of such a stage would leave it
with rounds to close whose members are long gone.

A *floor* is the lowest round by axis at which something could begin: place 0 for whole models,
1 + s for stage s; missing places are 0.
"""

import itertools

Floor = tuple[int, ...]

NO_FLOOR: Floor = ()


def axis(stage: int | None) -> int:
    """Return the place of a stage (None: of whole models) in a floor."""
    return 0 if stage is None else 1 + stage


def stage_on(place: int) -> int | None:
    """Return the stage of a place in a floor (None: whole models)."""
    return place - 1 if place else None


def at(floor: Floor, stage: int | None) -> int:
    """Return the round on one axis."""
    place = axis(stage)
    return floor[place] if place < len(floor) else 0


def highest(first: Floor, second: Floor) -> Floor:
    """Return the higher of both floors, axis by axis."""
    return tuple(max(pair) for pair in itertools.zip_longest(first, second, fillvalue=0))


def lowest(first: Floor, second: Floor) -> Floor:
    """Return the lower of both floors, axis by axis."""
    return tuple(min(pair) for pair in itertools.zip_longest(first, second, fillvalue=0))


def reaches(floor: Floor, min_floor: Floor) -> bool:
    """True if `floor >= min_floor` on every axis."""
    pairs = itertools.zip_longest(floor, min_floor, fillvalue=0)
    return all(mine >= wanted for mine, wanted in pairs)


def raised(floor: Floor, stage: int | None, number: int) -> Floor:
    """Return the floor raised to at least `number` on one axis."""
    place = axis(stage)
    return highest(floor, (0,) * place + (number,))
