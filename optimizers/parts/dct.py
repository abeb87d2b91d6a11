"""The orthonormal discrete cosine transform of a tensor cut into small chunks, and its inverse.

A chunk's few largest coefficients hold most of a momentum's energy: that is what DeMo sends (arXiv:2411.19870). Each chunk
is transformed by two small matrix products; matrix products and cosines differ in their last bits between machines.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Grid:
    """How a tensor of `shape` is cut into chunks of at most `side` × `side`.

    Any tensor is looked at as a matrix: its first dimension by all others; a vector or a scalar as one row, whose chunks are
    1 × `side`. A dimension is cut into the largest equal parts of at most `side` values (bloc97/DeMo). Deviation: where
    these would be less than half as long as `side` (50257 = 29 · 1733), it is filled with zeros to the next multiple of
    `side` instead, so that no length makes splinters; what the inverse puts into the filling is dropped.
    """

    shape: tuple[int, ...]
    side: int = 64

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the tensor as a matrix."""
        if len(self.shape) < 2:
            return 1, math.prod(self.shape)
        return self.shape[0], math.prod(self.shape[1:])

    @property
    def chunk(self) -> tuple[int, int]:
        """Rows and columns of a chunk."""
        rows, columns = self.matrix
        return chunk_length(rows, self.side), chunk_length(columns, self.side)

    @property
    def filled(self) -> tuple[int, int]:
        """Rows and columns with the filling: whole chunks."""
        (rows, columns), (height, width) = self.matrix, self.chunk
        return -(-rows // height) * height, -(-columns // width) * width

    @property
    def count(self) -> int:
        """How many coefficients there are: as many as values, the filling included."""
        return math.prod(self.filled)

    def forward(self, x: Tensor) -> Tensor:
        """The flat coefficients of a tensor of `shape`: chunk after chunk, each row by row, low frequencies first."""
        (rows, columns), (height, width), (high, wide) = self.matrix, self.chunk, self.filled
        whole = torch.nn.functional.pad(x.reshape(rows, columns), (0, wide - columns, 0, high - rows))
        chunks = whole.reshape(high // height, height, wide // width, width).transpose(1, 2)
        return (cosines(height) @ chunks @ cosines(width).T).reshape(-1)

    def inverse(self, coefficients: Tensor) -> Tensor:
        """The tensor of `shape` that these flat coefficients are of."""
        (rows, columns), (height, width), (high, wide) = self.matrix, self.chunk, self.filled
        chunks = coefficients.reshape(high // height, wide // width, height, width)
        whole = (cosines(height).T @ chunks @ cosines(width)).transpose(1, 2).reshape(high, wide)
        return whole[:rows, :columns].reshape(self.shape)


def chunk_length(length: int, side: int) -> int:
    """The largest divisor of `length` up to `side`; `side` where that is shorter than half of it (see `Grid`)."""
    if length <= side:
        return max(length, 1)
    largest = next(part for part in range(side, 0, -1) if length % part == 0)
    return largest if 2 * largest >= side else side


@functools.cache
def cosines(length: int) -> Tensor:
    """The orthonormal DCT-II of vectors of `length` as a matrix: row k is the wave of frequency k. Read it only."""
    places = torch.arange(length, dtype=torch.float64)
    waves = torch.cos(math.pi / length * (places + 0.5) * places[:, None]) * math.sqrt(2 / length)
    waves[0] = math.sqrt(1 / length)
    return waves.to(torch.float32)
