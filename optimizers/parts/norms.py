"""Norms whose bits are the same on every machine: sums are taken in float64, in a fixed order of
pairs."""

import math
from collections.abc import Iterable

from torch import Tensor

BLOCK = 2**20  # values squared at once


def sum_of_squares(x: Tensor) -> float:
    """Return the sum in float64, in a fixed order and so portable; squares of float32 are exact."""
    flat = x.reshape(-1)
    return math.fsum(
        _pairwise(flat[at : at + BLOCK].double().square_()) for at in range(0, len(flat), BLOCK)
    )


def _pairwise(values: Tensor) -> float:
    """Return the sum by adding one half to the other, again and again; changes its input."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values[: len(values) - half] += values[half:]
        values = values[:half]
    return float(values.sum())


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the portable norm of all tensors together."""
    return math.sqrt(math.fsum(sum_of_squares(x) for x in tensors))
