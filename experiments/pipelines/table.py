"""What a computation of experiments/pipelines comes to: named numbers, exact or one of each seed.

The paper's numbers are not here but in the recipe, so that a computation cannot know what it is expected to find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Progress = Callable[[float], None]  # takes the share that is done


class Row(msgspec.Struct, frozen=True):
    """One number: its only value if it is `exact`, no chance having part in it, otherwise one of each seed."""

    name: str
    values: list[float]
    exact: bool


class Table(msgspec.Struct, frozen=True):
    """All rows, and in a few words how much was computed."""

    rows: list[Row]
    scale: str


@dataclass(frozen=True, slots=True)
class Computation:
    """What it takes, a struct that refuses what it does not know, and the function from that to a table."""

    parameters: type[msgspec.Struct]
    compute: Callable[[Any, Progress], Table]


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a computation takes, from its recipe."""


def exact(name: str, value: float) -> Row:
    """A number that no chance has part in."""
    return Row(name, [float(value)], True)


def sampled(name: str, values: Sequence[float]) -> Row:
    """A number that depends on the seed, of all seeds in order."""
    return Row(name, [float(value) for value in values], False)
