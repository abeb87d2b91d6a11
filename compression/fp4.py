"""Blockwise FP4 E3M0: 0, or a sign and a power of two from 2^-6 to 2^0, times the block's largest
magnitude; two values to a byte.

Powers of two reach 64 times deeper than int4's even steps, at the price of coarse large values;
Streaming DiLoCo (arXiv:2501.18512) sends its pseudo-gradients this way. Deviations: a scale for
each block instead of one for all, and the lowest code means 0.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.blocks import BlockCodec, blocks_of, scaled
from farflock.compression.codec import Buffer, CorruptPayload
from farflock.compression.payload import values_at

TOP = 64  # the largest code; codes are 0 and the powers of two up to this
_HALF = 0x3F00_0000  # 0.5 as bits
_HALF_OCTAVE = 0x0040_0000  # added to a float's bits, carries into the exponent from 1.5·2^n on
_BELOW_ONE = 126  # the stored exponent of 0.5


@functools.cache
def _pairs(device: torch.device) -> Tensor:
    """Return each byte's two codes as float32, side by side in 64 bits."""
    codes = [0.0, *(2.0**power for power in range(7))]
    codes += [-code for code in codes]
    both = [[codes[byte & 0x0F], codes[byte >> 4]] for byte in range(256)]
    return torch.tensor(both, dtype=torch.float32).view(torch.int64)[:, 0].to(device)


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
        bits = ratio_KB.view(-1).view(torch.int32)
        size = bits & 0x7FFF_FFFF
        octave = (((size + _HALF_OCTAVE) >> 23) - _BELOW_ONE).to(torch.int8)
        stored = torch.maximum(octave, (size >= _HALF).to(torch.int8))
        stored |= (stored + 7) & (bits >> 28).to(torch.int8) & 8  # no sign for 0
        pairs = stored.view(torch.int16)[: blocks_of(x.numel(), 2)]
        return scales, ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)

    def codes(self, payload: Buffer, start: int, count: int, device: torch.device) -> Tensor:
        """Return the codes; refuse a negative 0 and a filler other than 0."""
        packed = values_at(payload, start, blocks_of(count, 2), torch.uint8, device)
        if bool((((packed & 0x0F) == 0x08) | ((packed & 0xF0) == 0x80)).any()):
            raise CorruptPayload(f"{self.name} payload holds a negative 0")
        if count % 2 and (filler := int(packed[-1]) >> 4):
            raise CorruptPayload(
                f"{self.name} payload of {count} values ends with filler {filler}, not 0"
            )
        pairs = _pairs(device).index_select(0, packed.to(torch.int32))
        return pairs.view(torch.float32)[:count]
