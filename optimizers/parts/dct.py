"""The orthonormal discrete cosine transform of a tensor cut into small chunks, and its inverse.

A chunk's few largest coefficients hold most of a momentum's energy; DeMo sends those
(arXiv:2411.19870). Two small matrix products transform a chunk; matrix products and cosines differ
in their last bits between machines.
"""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Grid:
    """The cut of a tensor of `shape` into chunks of at most `side` × `side`.

    Any tensor is treated as a matrix: its first dimension by all others; a vector or a scalar as
    one row, with chunks of 1 × `side`. A dimension is cut into the largest equal parts of at most
    `side` values (bloc97/DeMo). Deviation: where these would be shorter than half of `side` (50257
    = 29 · 1733), it is padded with zeros to the next multiple of `side` instead, so that no length
    leaves splinters; the inverse drops the padding.
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
        """Rows and columns including padding: whole chunks."""
        (rows, columns), (height, width) = self.matrix, self.chunk
        return -(-rows // height) * height, -(-columns // width) * width

    @property
    def count(self) -> int:
        """The number of coefficients: as many as values, padding included."""
        return math.prod(self.filled)

    def forward(self, x: Tensor) -> Tensor:
        """Return flat coefficients: chunk after chunk, each row by row, low frequencies first."""
        (rows, columns), (height, width), (high, wide) = self.matrix, self.chunk, self.filled
        whole = torch.nn.functional.pad(
            x.reshape(rows, columns), (0, wide - columns, 0, high - rows)
        )
        chunks = whole.reshape(high // height, height, wide // width, width).transpose(1, 2)
        return (cosines(height, chunks.device) @ chunks @ cosines(width, chunks.device).T).reshape(
            -1
        )

    def inverse(self, coefficients: Tensor) -> Tensor:
        """Return the tensor with these flat coefficients."""
        (rows, columns), (height, width), (high, wide) = self.matrix, self.chunk, self.filled
        chunks = coefficients.reshape(high // height, wide // width, height, width)
        whole = cosines(height, chunks.device).T @ chunks @ cosines(width, chunks.device)
        whole = whole.transpose(1, 2).reshape(high, wide)
        return whole[:rows, :columns].reshape(self.shape)


def chunk_length(length: int, side: int) -> int:
    """Return the largest divisor of `length` up to `side`; `side` if it is under half of that."""
    if length <= side:
        return max(length, 1)
    largest = next(divisor for divisor in range(side, 0, -1) if length % divisor == 0)
    return largest if 2 * largest >= side else side


@functools.cache
def cosines(length: int, device: torch.device = CPU) -> Tensor:
    """Return the orthonormal DCT-II as a matrix, row k of frequency k. Cached: do not modify."""
    places = torch.arange(length, dtype=torch.float64)
    waves = torch.cos(math.pi / length * (places + 0.5) * places[:, None]) * math.sqrt(2 / length)
    waves[0] = math.sqrt(1 / length)
    return waves.to(torch.float32).to(device)
