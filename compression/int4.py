"""Blockwise int4: like int8, but with codes from -7 to 7, two to a byte; 4 + 32/block bits per
value.

Blocks are short because 15 levels leave little room: one large value makes all others of its block
coarse.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.blocks import BlockCodec, blocks_of, quantise
from farflock.compression.codec import Buffer, CorruptPayload
from farflock.compression.payload import values_at

_ZERO = 8  # code 0 as stored: codes -7 to 7 are sent as 1 to 15


@dataclass(frozen=True, slots=True)
class Int4(BlockCodec):
    """|x - decode(encode(x))| <= absmax(block)/14 · (1 + 2^-18) + 2^-123, the last term for blocks
    of denormal size. The payload is all scales (float32), then a byte for every two values, the
    first in the low half."""

    block: int = 64

    kind: ClassVar[str] = "int4"
    per_byte: ClassVar[int] = 2
    kernel: ClassVar[bool] = True
    top: ClassVar[int] = 7

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the packed codes."""
        scales, codes = quantise(x, self.block, 7)
        # 0x0B0A for codes A, B
        pairs = (codes.to(torch.int8) + _ZERO).view(torch.int16)[: blocks_of(x.numel(), 2)]
        return scales, ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)

    def codes(self, payload: Buffer, start: int, count: int, device: torch.device) -> Tensor:
        """Return the codes; refuse the stored code 0 and a filler other than 8."""
        packed = values_at(payload, start, blocks_of(count, 2), torch.uint8, device).to(torch.int16)
        stored = ((packed | (packed << 4)) & 0x0F0F).view(torch.int8)
        if count and int(stored.amin()) == 0:
            raise CorruptPayload(f"{self.name} payload holds the stored code 0; they are 1 to 15")
        if count % 2 and int(stored[-1]) != _ZERO:
            raise CorruptPayload(
                f"{self.name} payload of {count} values ends with filler {int(stored[-1])}, "
                f"not {_ZERO}"
            )
        return stored[:count] - _ZERO
