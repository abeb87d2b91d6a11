"""Blockwise int8: the values of a block share a scale, their largest magnitude over 127; 8 + 32/block bits a value.

zstandard does not pay on it (measured in `zstd.py`), and it is cheap: a few times a copy of the buffer.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression import native
from farflock.compression.blocks import blocks_of, quantise, require_scales, rescale
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import append, values_at


@dataclass(frozen=True, slots=True)
class Int8:
    """|x - decode(encode(x))| <= absmax(block)/254 · (1 + 2^-14) + 2^-119, the last term for blocks of denormal size.

    The payload is all scales (float32), then one signed byte a value.
    """

    block: int = 256

    biased: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 65536:
            raise ValueError(f"int8 in blocks of {self.block} values is not possible; choose 1 to 65536, usually 256")

    @property
    def name(self) -> str:
        """`int8`, or `int8:BLOCK`."""
        return "int8" if self.block == 256 else f"int8:{self.block}"

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole blocks."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * blocks_of(count, self.block) + count

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and codes."""
        if native.encode("int8", x, out, self.block):
            return self.max_bytes(x.numel())
        scales, codes = quantise(x, self.block, 127)
        return append(out, scales) + append(out, codes[: x.numel()].to(torch.int8))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Write code · scale; scales outside their limits and the code -128 are refused."""
        if native.decode("int8", payload, out, self.block):
            return
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"{self.name} for {count} values")
        blocks = blocks_of(count, self.block)
        scales = require_scales(values_at(payload, 0, blocks, torch.float32), 127)
        codes = values_at(payload, 4 * blocks, count, torch.int8)
        if count and int(codes.amin()) == -128:
            raise CorruptPayload(f"{self.name} payload holds the code -128; codes are -127 to 127")
        rescale(out.copy_(codes), scales, self.block)
