"""The result of a computation of experiments/pipelines: named numbers, exact or one per seed.

The paper's numbers are in the recipe, so that a computation cannot know what it should find.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Progress = Callable[[float], None]  # takes the finished share


class Row(msgspec.Struct, frozen=True):
    """One number: a single value if `exact`, without randomness, otherwise one per seed."""

    name: str
    values: list[float]
    exact: bool


class Table(msgspec.Struct, frozen=True):
    """All rows, and the scale of the computation in a few words."""

    rows: list[Row]
    scale: str


@dataclass(frozen=True, slots=True)
class Computation:
    """A strict struct of parameters, and the function from it to a table."""

    parameters: type[msgspec.Struct]
    compute: Callable[[Any, Progress], Table]


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a computation, from its recipe."""


def exact(name: str, value: float) -> Row:
    """Return a number without randomness."""
    return Row(name, [float(value)], True)


def sampled(name: str, values: Sequence[float]) -> Row:
    """Return a number that depends on the seed, for all seeds in order."""
    return Row(name, [float(value) for value in values], False)
