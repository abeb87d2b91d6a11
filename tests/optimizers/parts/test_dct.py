"""The chunked transform compared with scipy's dense one, and the chunks of tensors of all
shapes."""

import math

import numpy as np
import pytest
import scipy.fft
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.optimizers.parts.dct import Grid, chunk_length, cosines

SHAPES = [
    (),
    (0,),
    (1,),
    (7,),
    (64,),
    (256,),
    (131,),
    (3, 5),
    (64, 64),
    (128, 192),
    (96, 40),
    (67, 3),
    (4, 3, 2, 5),
    (0, 4),
]


def normal(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def dense(x, side):
    """The same transform written another way: chunk by chunk with scipy, in float64."""
    matrix = (
        x.numpy()
        .astype(np.float64)
        .reshape((1, x.numel()) if x.dim() < 2 else (x.shape[0], math.prod(x.shape[1:])))
    )
    height, width = (chunk_length(length, side) for length in matrix.shape)
    matrix = np.pad(matrix, [(0, -matrix.shape[0] % height), (0, -matrix.shape[1] % width)])
    chunks = [
        scipy.fft.dctn(
            matrix[row : row + height, column : column + width], type=2, norm="ortho"
        ).reshape(-1)
        for row in range(0, matrix.shape[0], height)
        for column in range(0, matrix.shape[1], width)
    ]
    return np.concatenate(chunks) if chunks else np.empty(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [4, 64])
def test_it_is_the_orthonormal_dct_ii_of_every_chunk(shape, side):
    x = normal(shape)
    grid = Grid(shape, side)
    found = grid.forward(x)
    assert found.shape == (grid.count,)
    np.testing.assert_allclose(found.numpy(), dense(x, side), rtol=0, atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [2, 5, 64])
def test_the_inverse_gives_every_shape_back_and_energy_stays(shape, side):
    x, grid = normal(shape), Grid(shape, side)
    coefficients = grid.forward(x)
    back = grid.inverse(coefficients)
    assert back.shape == x.shape
    torch.testing.assert_close(back, x, rtol=0, atol=2e-6)
    assert float(coefficients.double().square().sum()) == pytest.approx(
        float(x.double().square().sum()), rel=1e-5
    )


@pytest.mark.parametrize("shape", [(128, 64), (131,), (67, 130)])
def test_the_inverse_is_scipys_inverse(shape):
    grid = Grid(shape, 64)
    coefficients = normal((grid.count,), 3)
    (high, wide), (height, width) = grid.filled, grid.chunk
    whole = np.zeros((high, wide))
    blocks = iter(coefficients.numpy().astype(np.float64).reshape(-1, height, width))
    for row in range(0, high, height):
        for column in range(0, wide, width):
            whole[row : row + height, column : column + width] = scipy.fft.idctn(
                next(blocks), type=2, norm="ortho"
            )
    rows, columns = grid.matrix
    np.testing.assert_allclose(
        grid.inverse(coefficients).numpy(), whole[:rows, :columns].reshape(shape), atol=5e-6
    )


@pytest.mark.parametrize("length", [1, 2, 29, 64, 256])
def test_the_waves_are_orthonormal(length):
    torch.testing.assert_close(
        cosines(length) @ cosines(length).T, torch.eye(length), rtol=0, atol=3e-6
    )


def test_a_constant_chunk_is_one_coefficient():
    coefficients = Grid((64, 64)).forward(torch.full((64, 64), 0.25))
    assert float(coefficients[0]) == pytest.approx(0.25 * 64)
    assert float(coefficients[1:].abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("length", "part"),
    [
        (0, 1),
        (1, 1),
        (29, 29),
        (64, 64),
        (65, 64),
        (96, 48),
        (100, 50),
        (128, 64),
        (768, 64),
        (50257, 64),
        (50304, 64),
        (67, 64),
    ],
)
def test_a_length_is_cut_into_its_largest_fitting_divisor_unless_that_makes_splinters(length, part):
    """50257 = 29 · 1733 and the primes are padded with zeros; 96 and 100 have divisors of at least
    half a side."""
    assert chunk_length(length, 64) == part


def test_the_vocabulary_of_gpt2_is_filled_to_the_next_multiple_of_64():
    grid = Grid((50257, 768))
    assert (grid.filled, grid.chunk, grid.count) == ((50304, 768), (64, 64), 50304 * 768)


def test_a_convolution_is_cut_as_a_matrix_of_its_output_channels():
    kernel = normal((8, 4, 3, 3))
    assert torch.equal(
        Grid((8, 4, 3, 3), 6).forward(kernel), Grid((8, 36), 6).forward(kernel.reshape(8, 36))
    )


@given(st.lists(st.integers(0, 40), max_size=4), st.integers(2, 16))
@settings(max_examples=60, deadline=None)
def test_any_tensor_survives_with_little_filling(shape, side):
    grid = Grid(tuple(shape), side)
    x = normal(tuple(shape), 5)
    torch.testing.assert_close(grid.inverse(grid.forward(x)), x, rtol=0, atol=3e-6)
    (rows, columns), (high, wide), (height, width) = grid.matrix, grid.filled, grid.chunk
    assert max(height, width) <= side
    assert rows <= high < rows + side
    assert columns <= wide < columns + side
    assert grid.count == math.prod(grid.filled)
