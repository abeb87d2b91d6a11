"""Blockwise FP4 E3M0: a sign and one of 2^-6 to 2^0 or nothing, times the block's largest magnitude; two values a byte.

Powers of two reach 64 times deeper than int4's even steps, at the price of coarse large values: Streaming DiLoCo
(arXiv:2501.18512) sends its pseudo-gradients so. Deviations: a scale for each block instead of one for all, and the lowest
code means 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.compression.blocks import blocks_of, require_scales, rescale, scaled
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import append, values_at

TOP = 64  # the largest code; codes are 0 and the powers of two up to this
_HALF = 0x3F00_0000  # 0.5 as bits
_HALF_OCTAVE = 0x0040_0000  # added to a float's bits, it carries into the exponent from 1.5 times a power of two on
_BELOW_ONE = 126  # the exponent of 0.5 as it is stored in a float


def _pairs() -> NDArray[np.int64]:
    """For each byte, its two codes as float32, side by side in 64 bits."""
    stored = np.arange(16)
    codes = np.where(stored & 7, 2.0 ** ((stored & 7) - 1), 0) * np.where(stored & 8, -1, 1)
    both = np.stack((np.tile(codes, 16), np.repeat(codes, 16)), axis=1).astype(np.float32)
    return both.view(np.int64)[:, 0]


_PAIRS = _pairs()


@dataclass(frozen=True, slots=True)
class Fp4:
    """|x - decode(encode(x))| <= max(|x|/3, absmax(block)/128) · (1 + 2^-20) + 2^-120.

    Each value becomes the nearest of its block's levels, ties away from 0. The payload is all scales (float32, absmax/64),
    then a byte for every two values, the first in the low half: 1 + log2 of the code's magnitude, or 0; plus 8 if negative.
    """

    block: int = 256

    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 2 <= self.block <= 65536 or self.block % 2:
            raise ValueError(
                f"fp4 in blocks of {self.block} values is not possible; choose an even number from 2 to 65536"
            )

    @property
    def name(self) -> str:
        """`fp4`, or `fp4:BLOCK`."""
        return "fp4" if self.block == 256 else f"fp4:{self.block}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole blocks."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * blocks_of(count, self.block) + blocks_of(count, 2)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and packed codes."""
        scales, ratio_KB = scaled(x, self.block, TOP)
        bits = ratio_KB.numpy().reshape(-1).view(np.int32)
        size = bits & 0x7FFF_FFFF
        octave = (((size + _HALF_OCTAVE) >> 23) - _BELOW_ONE).astype(np.int8)
        stored = np.maximum(octave, (size >= _HALF).view(np.int8))
        stored |= (stored + 7) & (bits >> 28).astype(np.int8) & 8  # no sign for 0
        pairs = stored.view(np.int16)[: blocks_of(x.numel(), 2)]
        packed = ((pairs | (pairs >> 4)) & 0xFF).astype(np.uint8)
        return append(out, scales) + append(out, torch.from_numpy(packed))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Write code · scale; scales outside their limits, a negative 0 and a filler other than 0 are refused."""
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"{self.name} for {count} values")
        scales = require_scales(values_at(payload, 0, blocks_of(count, self.block), torch.float32), TOP)
        packed = np.frombuffer(payload, dtype=np.uint8, offset=4 * len(scales))
        if bool((((packed & 0x0F) == 0x08) | ((packed & 0xF0) == 0x80)).any()):
            raise CorruptPayload(f"{self.name} payload holds a negative 0")
        if count % 2 and packed[-1] >> 4:
            raise CorruptPayload(f"{self.name} payload of {count} values ends with filler {packed[-1] >> 4}, not 0")
        codes = torch.from_numpy(_PAIRS[packed].view(np.float32))
        rescale(out.copy_(codes[:count]), scales, self.block)
