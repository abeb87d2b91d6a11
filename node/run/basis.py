"""The basis of a run's subspace codec.

Every peer computes the same bits from the run's seed, and the manifest names their digest.

The computation uses words of a counter-based integer generator, and products whose sums are exact
(compression/exact_product.py), so unrelated machines agree on U (D, K) and on the frozen embedding,
and neither is ever sent.

Shapes: D model width, K rank, V vocabulary.
"""

import functools
import math

import torch
from torch import Tensor

from farflock.compression.activation import Incompatible
from farflock.compression.exact_product import product
from farflock.compression.subspace import Basis
from farflock.optimizers.parts.philox import words

MAX_RANK = 1024
NEARLY = 1e-13  # largest error of the columns' products, before rounding to float32
_COLUMNS, _TABLE = 0x73756201, 0x73756202  # generator streams
_BELL = math.sqrt(4 * (256**2 - 1) / 12)  # the standard deviation of a sum of four bytes
_MAX_STEPS = 200


def largest_rank(width: int) -> int:
    """Return the largest rank K allowed. Above it, the coordinates are hardly fewer than the
    values, and random bases are badly conditioned."""
    return min(width // 2, MAX_RANK)


@functools.lru_cache(maxsize=2)
def run_basis(seed: int, width: int, rank: int, vocabulary: int) -> Basis:
    """Return version 1 of a run's basis: a random subspace, and a frozen embedding scaled like an
    initial one (node/model/llama.py). Raise `ValueError` unless 1 <= rank <=
    `largest_rank(width)`."""
    if not 1 <= rank <= largest_rank(width):
        raise ValueError(
            f"a basis for a width of {width} has a rank from 1 to {largest_rank(width)}, not {rank}"
        )
    columns_DK = orthonormal(_bells(seed, _COLUMNS, width * rank).view(width, rank)).float()
    fixed_VD = (
        (_bells(seed, _TABLE, vocabulary * width) * math.sqrt(2 / (5 * width)))
        .float()
        .view(vocabulary, width)
    )
    return Basis(1, columns_DK, fixed_VD, torch.empty(0, width, dtype=torch.float32))


def require_digest(basis: Basis, named: str | None) -> Basis:
    """Return the basis; raise `Incompatible` unless its digest is `named` (None: none is named)."""
    if named is not None and basis.digest.hex() != named:
        raise Incompatible(
            f"this machine computes a basis with digest {basis.digest.hex()[:16]}, and the"
            f" manifest names {named[:16]}: its arithmetic or its version of farflock differs from"
            " that of the run's founder; update farflock, or use another machine"
        )
    return basis


def basis_bytes(width: int, rank: int, vocabulary: int) -> int:
    """Return the bytes of memory that a basis takes: its matrices, and U again in float64."""
    return 4 * width * (rank + vocabulary) + 8 * width * rank


def orthonormal(matrix_DK: Tensor) -> Tensor:
    """Return the orthonormal matrix nearest to a matrix of full rank, in float64, with the same
    bits on every machine.

    This is the polar factor, computed by Newton-Schulz iteration, which needs only matrix
    products. Raise `ValueError` if the columns are dependent."""
    gram_KK = product(matrix_DK.T, matrix_DK)
    ones_K1 = torch.ones(gram_KK.shape[0], 1, dtype=torch.float64)
    # bounds the largest singular value
    bound = math.sqrt(float(product(gram_KK.abs(), ones_K1).amax()))
    matrix_DK, identity_KK = (
        matrix_DK.double() / bound,
        torch.eye(len(ones_K1), dtype=torch.float64),
    )
    for _ in range(_MAX_STEPS):
        error_KK = product(matrix_DK.T, matrix_DK) - identity_KK
        if float(error_KK.abs().amax()) <= NEARLY:
            return matrix_DK
        matrix_DK = matrix_DK - product(matrix_DK, error_KK) / 2
    raise ValueError("the columns are not independent; choose another seed")


def _bells(seed: int, stream: int, count: int) -> Tensor:
    """Return `count` nearly normal numbers with mean 0 and variance 1, each from the sum of the
    four bytes of a random word."""
    drawn = words(seed, stream, 0, count)
    sums = sum(((drawn >> shift) & 255 for shift in (0, 8, 16, 24)), torch.zeros_like(drawn))
    return (sums - 510).double() / _BELL
