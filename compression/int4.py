"""Blockwise int4: as int8 with 15 levels, two values a byte.

Payload: the scales (4 bytes a block), then a byte for every two values: the first in the low half, codes stored as
code + 8; an odd last value is followed by code 0. 4 + 32/block bits a value. Level -8 is never written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.compression.codec import Buffer, Context, CorruptPayload, require_finite, require_length
from farflock.compression.int8 import checked_scales, padded, quantise, scales
from farflock.compression.raw import append, view


@dataclass(frozen=True, slots=True)
class Int4:
    """|x - decode(encode(x))| <= 0.51·scale, scale = absmax(block)/7."""

    block: int = 64

    def __post_init__(self) -> None:
        if not 2 <= self.block <= 65536 or self.block % 2:
            raise ValueError(f"a block of {self.block} values makes no sense; choose an even number up to 65536")

    @property
    def name(self) -> str:
        """int4, or int4:BLOCK."""
        return "int4" if self.block == 64 else f"int4:{self.block}"

    @property
    def biased(self) -> bool:
        """Rounding to nearest is fair."""
        return False

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole blocks."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * -(-count // self.block) + -(-count // 2)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and packed codes."""
        blocks = padded(require_finite(x), self.block)
        scale = scales(blocks, 7.0)
        codes = (quantise(blocks, scale, 7) + 8).to(torch.uint8).reshape(-1)[: x.numel()]
        pairs = (
            padded(codes, 2) if codes.numel() % 2 == 0 else torch.cat((codes, codes.new_full((1,), 8))).reshape(-1, 2)
        )
        return append(out, scale) + append(out, pairs[:, 0] | (pairs[:, 1] << 4))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """code · scale; bad scales and codes are refused."""
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"int4 for {count} values")
        blocks = -(-count // self.block)
        scale = checked_scales(view(payload, 0, blocks, torch.float32))
        packed = view(payload, 4 * blocks, -(-count // 2), torch.uint8)
        codes = torch.stack((packed & 15, packed >> 4), dim=1).reshape(-1)
        if bool((codes == 0).any()) or bool((codes[count:] != 8).any()):
            raise CorruptPayload("a code lies outside 1 to 15, or the filler is not 8")
        values = codes[:count].to(torch.float32) - 8
        out.copy_((padded(values, self.block) * scale[:, None]).reshape(-1)[:count])
