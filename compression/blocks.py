"""Blocks of values that share a scale: what int8 and int4 have in common.

A scale is a float32 that is 0 or lies in [2^-126, the largest number that times the largest code is finite]. So no
product of a code and a scale is infinite, and none is denormal: processors that flush denormals decode the same bits.

Shapes: K blocks, B values a block.
"""

import torch
from torch import Tensor
from torch.nn import functional

from farflock.compression.codec import CorruptPayload, require_finite
from farflock.compression.payload import FLOAT_MAX, flat, largest

# As bit patterns: non-negative floats order as their bits do, also where a processor takes denormals for 0.
MIN_SCALE_BITS = 0x0080_0000  # 2^-126
MAX_SCALE_BITS = {127: 0x7C01_0203, 7: 0x7E12_4924}  # by largest code: about 2.679e36 and 4.861e37


def blocks_of(count: int, block: int) -> int:
    """How many blocks `count` values make; the last may be short."""
    return -(-count // block)


def quantise(x: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """The scales (K) and the codes (K·B, whole numbers in float32, the last block filled up with 0) of the flat `x`.

    scale = absmax/top within the limits above, or 0 if that is less than 2^-126; code = round(x/scale), ties to even.
    Codes stay in [-top, top] by themselves: x/scale exceeds top by no more than float rounding.
    """
    x_KB = _padded(flat(x), block)
    absmax_K = x_KB.abs().amax(dim=1)
    if not largest(absmax_K) <= FLOAT_MAX:  # true for NaN, which amax hands on
        require_finite(x)
    bits_K = (absmax_K / top).view(torch.int32).clamp_(max=MAX_SCALE_BITS[top])
    tiny_K = bits_K < MIN_SCALE_BITS
    divisor_K = bits_K.view(torch.float32).masked_fill(tiny_K, 1.0)  # makes all codes of such a block 0
    codes_KB = (x_KB / divisor_K[:, None]).round_()
    return bits_K.masked_fill_(tiny_K, 0).view(torch.float32), codes_KB.view(-1)


def require_scales(scale_K: Tensor, top: int) -> Tensor:
    """Return the scales, or raise `CorruptPayload` if one is outside the limits (negative zero and NaN are)."""
    bits_K = scale_K.view(torch.int32)
    good_K = (bits_K == 0) | ((bits_K >= MIN_SCALE_BITS) & (bits_K <= MAX_SCALE_BITS[top]))
    if not bool(good_K.all()):
        raise CorruptPayload(f"{int((~good_K).sum())} of {len(scale_K)} scales are neither 0 nor within their limits")
    return scale_K


def rescale(out: Tensor, scale_K: Tensor, block: int) -> None:
    """Multiply the codes in the flat `out` by their blocks' scales, in place."""
    whole = out.numel() // block
    out[: whole * block].view(whole, block).mul_(scale_K[:whole, None])
    out[whole * block :].mul_(scale_K[whole:])  # the short block's one scale, or nothing times nothing


def _padded(x: Tensor, block: int) -> Tensor:
    missing = -x.numel() % block
    return (functional.pad(x, (0, missing)) if missing else x).reshape(-1, block)
