"""Blocks of values that share a scale, as used by int8, int4, fp4 and sign.

A scale is a float32: 0, or between 2^-126 and the largest number whose product with the largest
code is finite. So no product of a code and a scale is infinite or denormal, and processors that
flush denormals decode to the same bits.

Shapes: K blocks, B values per block.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from farflock.compression.codec import Buffer, Context, CorruptPayload, require_finite
from farflock.compression.payload import (
    FLOAT_MAX,
    ExactCodec,
    append,
    divided,
    flat,
    largest,
    values_at,
)

# Bit patterns: non-negative floats order as their bits do, even if a processor flushes denormals.
MIN_SCALE_BITS = 0x0080_0000  # 2^-126
MAX_SCALE_BITS = {  # by largest code
    127: 0x7C01_0203,  # about 2.679e36
    64: 0x7C7F_FFFF,  # about 5.317e36
    7: 0x7E12_4924,  # about 4.861e37
    1: 0x7F7F_FFFF,  # the largest float32
}
_UNIT = 2.0**24  # counting unit of magnitudes in a mean: float32 holds all whole numbers up to it


def blocks_of(count: int, block: int) -> int:
    """Return the number of blocks of `count` values; the last may be short."""
    return -(-count // block)


def quantise(x: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """Return the scales (K) and codes (K·B whole numbers as float32, the last block padded with 0)
    of the flat `x`. Codes are the ratios of `scaled`, rounded to nearest, ties to even; they stay
    in [-top, top] without clamping."""
    scale_K, ratio_KB = scaled(x, block, top)
    return scale_K, ratio_KB.round_().view(-1)


def scaled(x: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """Return the scales (K) and ratios x/scale (K, B, the last block padded with 0) of the flat
    `x`. A scale is absmax/top within the limits above, or 0 if that is less than 2^-126; the ratios
    are then tiny and become codes of 0. Ratios exceed top by no more than float rounding."""
    x_KB = padded(flat(x), block)
    absmax_K = x_KB.abs().amax(dim=1)
    if not largest(absmax_K) <= FLOAT_MAX:  # true for NaN, which amax passes on
        require_finite(x)
    bits_K = divided(absmax_K, top).view(torch.int32).clamp_(max=MAX_SCALE_BITS[top])
    tiny_K = bits_K < MIN_SCALE_BITS
    divisor_K = bits_K.view(torch.float32).masked_fill(tiny_K, 1.0)  # makes its codes 0
    return bits_K.masked_fill_(tiny_K, 0).view(torch.float32), x_KB / divisor_K[:, None]


def mean_magnitudes(x: Tensor, block: int) -> Tensor:
    """Return the mean of |x| in each block (K), to about 2^-24 of the block's largest; 0 if less
    than 2^-126. The values are summed as whole numbers and so exactly: the order of additions,
    which differs between processors, changes no bit."""
    x_KB = padded(flat(x), block)
    size_KB = x_KB.abs()
    absmax_K = size_KB.amax(dim=1)
    if not largest(absmax_K) <= FLOAT_MAX:
        require_finite(x)
    divisor_K = absmax_K.masked_fill(absmax_K == 0, 1.0)
    units_K = size_KB.div_(divisor_K[:, None]).mul_(_UNIT).round_().sum(dim=1, dtype=torch.float64)
    counts_K = torch.full_like(units_K, block)
    counts_K[x.numel() // block :] = x.numel() % block
    mean_K = (units_K / (counts_K * _UNIT) * absmax_K.double()).float()
    return mean_K.masked_fill_(mean_K.view(torch.int32) < MIN_SCALE_BITS, 0.0)


def require_scales(scale_K: Tensor, top: int) -> Tensor:
    """Return the scales; raise `CorruptPayload` if one is outside the limits, as -0 and NaN are."""
    bits_K = scale_K.view(torch.int32)
    good_K = (bits_K == 0) | ((bits_K >= MIN_SCALE_BITS) & (bits_K <= MAX_SCALE_BITS[top]))
    if not bool(good_K.all()):
        raise CorruptPayload(
            f"{int((~good_K).sum())} of {len(scale_K)} scales are neither 0 nor within their limits"
        )
    return scale_K


def rescale(out: Tensor, scale_K: Tensor, block: int) -> None:
    """Multiply the codes in the flat `out` by their blocks' scales, in place."""
    whole = out.numel() // block
    out[: whole * block].view(whole, block).mul_(scale_K[:whole, None])
    out[whole * block :].mul_(scale_K[whole:])  # the short block, if any


def padded(x: Tensor, block: int) -> Tensor:
    """Return the flat `x` as rows of `block` values, the last padded with 0."""
    missing = -x.numel() % block
    return (functional.pad(x, (0, missing)) if missing else x).reshape(-1, block)


@dataclass(frozen=True, slots=True)
class BlockCodec(ExactCodec):
    """A codec of blocks with one scale each; a payload is all scales (float32), then the codes."""

    block: int

    kind: ClassVar[str]
    per_byte: ClassVar[int] = 1
    top: ClassVar[int]  # the largest code
    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        even = self.per_byte == 2
        if not 1 + even <= self.block <= 65536 or (even and self.block % 2):
            choice = "an even number from 2" if even else "a number from 1"
            raise ValueError(
                f"{self.kind} in blocks of {self.block} values is not allowed; "
                f"choose {choice} to 65536"
            )

    @abstractmethod
    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales (K) and the packed codes, as they are sent."""

    @abstractmethod
    def codes(self, payload: Buffer, start: int, count: int, device: torch.device) -> Tensor:
        """Return the codes at byte `start`; raise `CorruptPayload` if no encoder writes them."""

    @property
    def name(self) -> str:
        """`KIND`, or `KIND:BLOCK` unless the block has the default length."""
        return self.kind if self == type(self)() else f"{self.kind}:{self.block}"  # type: ignore[call-arg]

    @property
    def numbers(self) -> tuple[int]:
        """The block's length, the number in the codec's name."""
        return (self.block,)

    def granule(self, shape: tuple[int, ...]) -> int:
        """Return the length of a block."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Return the exact length."""
        return 4 * blocks_of(count, self.block) + blocks_of(count, self.per_byte)

    def write(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and codes."""
        scales, codes = self.quantised(x)
        return append(out, scales) + append(out, codes)

    def read(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Write code · scale; refuse scales outside their limits."""
        count, device = blocks_of(out.numel(), self.block), out.device
        scales = require_scales(values_at(payload, 0, count, torch.float32, device), self.top)
        out.copy_(self.codes(payload, 4 * count, out.numel(), device))
        rescale(out, scales, self.block)
