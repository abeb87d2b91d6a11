"""Norms of tensors, summed in a fixed order."""

import math

import numpy as np
import pytest
import torch

from farflock.optimizers.parts.norms import BLOCK, norm_of, sum_of_squares


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 257, 4099, BLOCK + 3])
def test_norms_are_those_of_numpy(size):
    x = torch.arange(size, dtype=torch.float32) / 7 - 3
    assert sum_of_squares(x) == pytest.approx(float(np.sum(x.double().numpy() ** 2)), rel=1e-13)
    assert norm_of([x, x.reshape(-1, 1)]) == pytest.approx(
        math.sqrt(2) * float(np.linalg.norm(x.double())), rel=1e-12
    )


def test_squares_neither_overflow_nor_vanish_and_the_tensor_stays():
    x = torch.tensor([3e30, -4e30])
    assert norm_of([x]) == pytest.approx(5e30)
    assert norm_of([torch.tensor([3e-30, 4e-30])]) == pytest.approx(5e-30)
    assert x.tolist() == torch.tensor([3e30, -4e30]).tolist()
    assert math.isnan(norm_of([torch.tensor([math.nan, 1.0])]))
