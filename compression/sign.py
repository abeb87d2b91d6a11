"""One bit a value: its sign, times the mean magnitude of its block.

As in signSGD with error feedback (Karimireddy and others, arXiv:1901.09847, the scaled sign), with a scale for each block
instead of one for all. The mean magnitude is the scale with the least squared error.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from farflock.compression.blocks import blocks_of, mean_magnitudes, require_scales, rescale
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import append, values_at


@dataclass(frozen=True, slots=True)
class Sign:
    """|x - decode(encode(x))| <= absmax(block) · (1 + 2^-14) + block · 2^-126.

    Biased: the order of magnitudes inside a block is lost, so a mean of these needs feedback. The payload is all scales
    (float32), then a bit for each value, eight to a byte, the first lowest: 1 if the value is below 0.
    """

    block: int = 256

    biased: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 65536:
            raise ValueError(f"sign in blocks of {self.block} values is not possible; choose a number from 1 to 65536")

    @property
    def name(self) -> str:
        """`sign`, or `sign:BLOCK`."""
        return "sign" if self.block == 256 else f"sign:{self.block}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole blocks."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * blocks_of(count, self.block) + blocks_of(count, 8)

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and sign bits."""
        scales = mean_magnitudes(x, self.block)
        negative = np.packbits((x < 0).numpy(), bitorder="little")
        return append(out, scales) + append(out, torch.from_numpy(negative))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Write plus or minus the scale; scales outside their limits and a bit after the last value are refused."""
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"{self.name} for {count} values")
        scales = require_scales(values_at(payload, 0, blocks_of(count, self.block), torch.float32), 1)
        packed = np.frombuffer(payload, dtype=np.uint8, offset=4 * len(scales))
        if count % 8 and packed[-1] >> count % 8:
            raise CorruptPayload(f"{self.name} payload has a bit set after the last of {count} values")
        negative = torch.from_numpy(np.unpackbits(packed, count=count, bitorder="little"))
        rescale(out.copy_(negative).mul_(-2).add_(1), scales, self.block)
