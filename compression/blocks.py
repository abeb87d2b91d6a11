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

MIN_SCALE = 2.0**-126
MAX_SCALE = {127: float.fromhex("0x1.020406p+121"), 7: float.fromhex("0x1.249248p+125")}  # by largest code


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
    scale_K = (absmax_K / top).clamp(max=MAX_SCALE[top])
    tiny_K = scale_K < MIN_SCALE
    divisor_K = scale_K.masked_fill(tiny_K, 1.0)  # makes all codes of such a block 0
    return scale_K.masked_fill(tiny_K, 0.0), (x_KB / divisor_K[:, None]).round_().reshape(-1)


def require_scales(scale_K: Tensor, top: int) -> Tensor:
    """Return the scales, or raise `CorruptPayload` if one is outside the limits (negative zero and NaN are)."""
    bits_K, low, high = (x.view(torch.int32) for x in (scale_K, torch.tensor(MIN_SCALE), torch.tensor(MAX_SCALE[top])))
    good_K = (bits_K == 0) | ((bits_K >= low) & (bits_K <= high))  # as integers: floats that flush denormals see a 0
    if not bool(good_K.all()):
        raise CorruptPayload(
            f"{int((~good_K).sum())} of {len(scale_K)} scales are neither 0 nor in [2^-126, {MAX_SCALE[top]:g}]"
        )
    return scale_K


def rescale(out: Tensor, scale_K: Tensor, block: int) -> None:
    """Multiply the codes in the flat `out` by their blocks' scales, in place."""
    whole = out.numel() // block
    out[: whole * block].view(whole, block).mul_(scale_K[:whole, None])
    out[whole * block :].mul_(scale_K[whole:])  # the short block's one scale, or nothing times nothing


def _padded(x: Tensor, block: int) -> Tensor:
    missing = -x.numel() % block
    return (functional.pad(x, (0, missing)) if missing else x).reshape(-1, block)
