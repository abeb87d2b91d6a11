"""Norms whose bits are the same on every machine: sums are taken in float64, in a fixed order of
pairs."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

BLOCK = 2**20  # values squared at once


def norm_of(tensors: Iterable[Tensor]) -> float:
    """Return the portable norm of all tensors of one device together, which is waited for once."""
    return math.sqrt(sum_of_squares(*tensors))


def sum_of_squares(*tensors: Tensor) -> float:
    """Return the sum in float64, in a fixed order and so portable; squares of float32 are exact."""
    flat = (x.reshape(-1) for x in tensors)
    sums = [
        _pairwise(x[at : at + BLOCK].double().square_())
        for x in flat
        for at in range(0, len(x), BLOCK)
    ]
    return math.fsum(torch.cat(sums).tolist()) if sums else 0.0


def _pairwise(values: Tensor) -> Tensor:
    """Return the sum (1,) by adding one half to the other, again and again; changes its input."""
    while len(values) > 1:
        half = (len(values) + 1) // 2
        values[: len(values) - half] += values[half:]
        values = values[:half]
    return values
