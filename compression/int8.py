"""Blockwise int8: a block's values share a scale, their largest magnitude over 127; 8 + 32/block
bits per value.

Compressing the payload with zstandard does not pay (measured in `zstd.py`). The codec is cheap: it
takes a few times as long as copying the buffer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.blocks import BlockCodec, quantise
from farflock.compression.codec import Buffer, CorruptPayload
from farflock.compression.payload import values_at


@dataclass(frozen=True, slots=True)
class Int8(BlockCodec):
    """|x - decode(encode(x))| <= absmax(block)/254 · (1 + 2^-14) + 2^-119, the last term for blocks
    of denormal size. The payload is all scales (float32), then one signed byte per value."""

    block: int = 256

    kind: ClassVar[str] = "int8"
    kernel: ClassVar[bool] = True
    top: ClassVar[int] = 127

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return scales and codes."""
        scales, codes = quantise(x, self.block, 127)
        return scales, codes[: x.numel()].to(torch.int8)

    def codes(self, payload: Buffer, start: int, count: int, device: torch.device) -> Tensor:
        """Return the codes; refuse the code -128."""
        codes = values_at(payload, start, count, torch.int8, device)
        if count and int(codes.amin()) == -128:
            raise CorruptPayload(f"{self.name} payload holds the code -128; codes are -127 to 127")
        return codes
