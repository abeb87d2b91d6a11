"""Blockwise FP4 E3M0: 0, or a sign and a power of two from 2^-6 to 2^0, times the block's largest
magnitude; two values to a byte.

Powers of two reach 64 times deeper than int4's even steps, at the price of coarse large values;
Streaming DiLoCo (arXiv:2501.18512) sends its pseudo-gradients this way. Deviations: a scale for
each block instead of one for all, and the lowest code means 0.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farflock.compression.blocks import BlockCodec, blocks_of, scaled
from farflock.compression.codec import Buffer, CorruptPayload

TOP = 64  # the largest code; codes are 0 and the powers of two up to this
_HALF = 0x3F00_0000  # 0.5 as bits
_HALF_OCTAVE = 0x0040_0000  # added to a float's bits, carries into the exponent from 1.5·2^n on
_BELOW_ONE = 126  # the stored exponent of 0.5


def _pairs() -> NDArray[np.int64]:
    """Return each byte's two codes as float32, side by side in 64 bits."""
    stored = np.arange(16)
    codes = np.where(stored & 7, 2.0 ** ((stored & 7) - 1), 0) * np.where(stored & 8, -1, 1)
    both = np.stack((np.tile(codes, 16), np.repeat(codes, 16)), axis=1).astype(np.float32)
    return both.view(np.int64)[:, 0]


_PAIRS = _pairs()


@dataclass(frozen=True, slots=True)
class Fp4(BlockCodec):
    """|x - decode(encode(x))| <= max(|x|/3, absmax(block)/128) · (1 + 2^-20) + 2^-120.

    Each value becomes the nearest of its block's levels, ties away from 0. The payload is all
    scales (float32, absmax/64), then a byte for every two values, the first in the low half: 1 +
    log2 of the code's magnitude, or 0; plus 8 if negative.
    """

    block: int = 256

    kind: ClassVar[str] = "fp4"
    per_byte: ClassVar[int] = 2
    kernel: ClassVar[bool] = True
    top: ClassVar[int] = TOP

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and packed codes."""
        scales, ratio_KB = scaled(x, self.block, TOP)
        bits = ratio_KB.numpy().reshape(-1).view(np.int32)
        size = bits & 0x7FFF_FFFF
        octave = (((size + _HALF_OCTAVE) >> 23) - _BELOW_ONE).astype(np.int8)
        stored = np.maximum(octave, (size >= _HALF).view(np.int8))
        stored |= (stored + 7) & (bits >> 28).astype(np.int8) & 8  # no sign for 0
        pairs = stored.view(np.int16)[: blocks_of(x.numel(), 2)]
        return scales, torch.from_numpy(((pairs | (pairs >> 4)) & 0xFF).astype(np.uint8))

    def codes(self, payload: Buffer, start: int, count: int) -> Tensor:
        """Return the codes; refuse a negative 0 and a filler other than 0."""
        packed = np.frombuffer(payload, dtype=np.uint8, offset=start)
        if bool((((packed & 0x0F) == 0x08) | ((packed & 0xF0) == 0x80)).any()):
            raise CorruptPayload(f"{self.name} payload holds a negative 0")
        if count % 2 and packed[-1] >> 4:
            raise CorruptPayload(
                f"{self.name} payload of {count} values ends with filler {packed[-1] >> 4}, not 0"
            )
        return torch.from_numpy(_PAIRS[packed].view(np.float32))[:count]
