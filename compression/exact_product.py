"""Matrix products with the same bits on every machine, at nearly the speed of the machine's own.

A library adds in any order and fuses operations as it likes, so the last bits of a matrix product
differ from CPU to CPU. Here each factor is cut into slices of so few bits that every product of two
slices is exact in float64, in any order; the sum of these products, each rounded once, in a fixed
order, is the result (Ozaki, Ogita, Oishi and Rump, "Error-free transformations of matrix
multiplication by using fast routines of matrix multiplication", Numerical Algorithms 59, 2012).
Slices are relative to the largest magnitude of a whole factor, not of each row.

Shapes: M x N by N x K.
"""

import math

import torch
from torch import Tensor

_MANTISSA = 53  # bits of a float64
# Exponent of the smallest first unit. Smaller values count as 0, so that no product is denormal.
_MIN_EXPONENT = -400
MAX_INNER = 1 << 17  # limit of N: beyond it, slices would have too few bits to be worth it
SLICES = 3


def product(left_MN: Tensor, right_NK: Tensor, slices: int = SLICES) -> Tensor:
    """Return left @ right in float64.

    The error is about N · 2^(-bits · slices) of the product of the factors' largest magnitudes,
    with bits = (53 - log2 N) / 2: three slices are nearly a float64, two are more than a float32.
    Raise `ValueError` for N above 2^17, or for factors that are not finite.
    """
    inner = left_MN.shape[1]
    if not 1 <= inner <= MAX_INNER:
        raise ValueError(f"products over {inner} values are not allowed here; 1 to {MAX_INNER} are")
    bits = (_MANTISSA - math.ceil(math.log2(inner))) // 2
    lefts, rights = _sliced(left_MN, bits, slices), _sliced(right_NK, bits, slices)
    pairs = [(i, level - i) for level in range(slices) for i in range(level + 1)]
    total = torch.zeros(
        left_MN.shape[0], right_NK.shape[1], dtype=torch.float64, device=left_MN.device
    )
    for i, j in reversed(pairs):  # the smallest first
        total += lefts[i] @ rights[j]
    return total


def _sliced(factor: Tensor, bits: int, slices: int) -> list[Tensor]:
    """Return the factor as a sum of `slices` matrices; the entries of each are multiples of a power
    of two and at most `bits` wide."""
    rest = factor.detach().double()
    peak = float(rest.abs().amax()) if rest.numel() else 0.0
    if not math.isfinite(peak):
        raise ValueError("a factor holds NaN or infinity")
    unit = 2.0 ** max(math.frexp(peak)[1] - bits, _MIN_EXPONENT)
    terms = []
    for _ in range(slices):
        term = (rest / unit).round_().mul_(unit)
        terms.append(term)
        rest = rest - term
        unit = max(unit * 2.0**-bits, 2.0 ** (_MIN_EXPONENT - 2 * bits))
    return terms
