"""Blockwise int4: as int8 with codes from -7 to 7, two a byte; 4 + 32/block bits a value.

Blocks are short because 15 levels leave little room: one large value makes all others of its block coarse.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression import native
from farflock.compression.blocks import blocks_of, quantise, require_scales, rescale
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import append, values_at

_ZERO = 8  # how code 0 is stored: codes -7 to 7 travel as 1 to 15


@dataclass(frozen=True, slots=True)
class Int4:
    """|x - decode(encode(x))| <= absmax(block)/14 · (1 + 2^-18) + 2^-123, the last term for blocks of denormal size.

    The payload is all scales (float32), then a byte for every two values, the first in the low half.
    """

    block: int = 64

    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 2 <= self.block <= 65536 or self.block % 2:
            raise ValueError(
                f"int4 in blocks of {self.block} values is not possible; choose an even number from 2 to 65536"
            )

    @property
    def name(self) -> str:
        """`int4`, or `int4:BLOCK`."""
        return "int4" if self.block == 64 else f"int4:{self.block}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole blocks."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * blocks_of(count, self.block) + blocks_of(count, 2)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and packed codes."""
        if native.encode("int4", x, out, self.block):
            return self.max_bytes(x.numel())
        scales, codes = quantise(x, self.block, 7)
        pairs = (codes.to(torch.int8) + _ZERO).view(torch.int16)[: blocks_of(x.numel(), 2)]  # 0x0B0A for codes A, B
        return append(out, scales) + append(out, ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Write code · scale; scales outside their limits, the stored code 0 and a filler other than 8 are refused."""
        if native.decode("int4", payload, out, self.block):
            return
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"{self.name} for {count} values")
        blocks = blocks_of(count, self.block)
        scales = require_scales(values_at(payload, 0, blocks, torch.float32), 7)
        packed = values_at(payload, 4 * blocks, blocks_of(count, 2), torch.uint8).to(torch.int16)
        stored = ((packed | (packed << 4)) & 0x0F0F).view(torch.int8)
        if count and int(stored.amin()) == 0:
            raise CorruptPayload(f"{self.name} payload holds the stored code 0; they are 1 to 15")
        if count % 2 and int(stored[-1]) != _ZERO:
            raise CorruptPayload(
                f"{self.name} payload of {count} values ends with filler {int(stored[-1])}, not {_ZERO}"
            )
        rescale(out.copy_(stored[:count] - _ZERO), scales, self.block)
