"""One bit per value: its sign, times the mean magnitude of its block.

This is the scaled sign of signSGD with error feedback (Karimireddy et al., arXiv:1901.09847), but
with a scale for each block instead of one for the whole tensor. The mean magnitude is the scale
with the least squared error.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.blocks import BlockCodec, blocks_of, mean_magnitudes
from farflock.compression.codec import Buffer, CorruptPayload
from farflock.compression.payload import packed_bits, unpacked_bits, values_at


@dataclass(frozen=True, slots=True)
class Sign(BlockCodec):
    """|x - decode(encode(x))| <= absmax(block) · (1 + 2^-14) + block · 2^-126. Biased: magnitudes
    inside a block are lost, so a mean needs error feedback. The payload is all scales (float32),
    then a bit for each value, eight to a byte, the first lowest: 1 if the value is below 0."""

    block: int = 256

    kind: ClassVar[str] = "sign"
    per_byte: ClassVar[int] = 8
    kernel: ClassVar[bool] = True
    top: ClassVar[int] = 1
    biased: ClassVar[bool] = True

    def quantised(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales and the packed sign bits."""
        scales = mean_magnitudes(x, self.block)
        return scales, packed_bits(x < 0)

    def codes(self, payload: Buffer, start: int, count: int, device: torch.device) -> Tensor:
        """Return 1 or -1 for each value; refuse a bit after the last value."""
        packed = values_at(payload, start, blocks_of(count, 8), torch.uint8, device)
        if count % 8 and int(packed[-1]) >> count % 8:
            raise CorruptPayload(
                f"{self.name} payload has a bit set after the last of {count} values"
            )
        return 1 - 2 * unpacked_bits(packed, count).view(torch.int8)
