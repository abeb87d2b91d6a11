"""Blockwise int8: each block of values shares a float32 scale, its largest magnitude divided by 127.

Payload: the scales (4 bytes a block), then one signed byte a value: 8 + 32/block bits a value. -128 is never written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from farflock.compression.codec import Buffer, Context, CorruptPayload, require_finite, require_length
from farflock.compression.raw import append, view

MAX_SCALE = 1e36  # times 127 it is still finite


@dataclass(frozen=True, slots=True)
class Int8:
    """|x - decode(encode(x))| <= 0.51·scale, scale = absmax(block)/127."""

    block: int = 256

    def __post_init__(self) -> None:
        if not 1 <= self.block <= 65536:
            raise ValueError(f"a block of {self.block} values makes no sense; choose 1 to 65536, usually 256")

    @property
    def name(self) -> str:
        """int8, or int8:BLOCK."""
        return "int8" if self.block == 256 else f"int8:{self.block}"

    @property
    def biased(self) -> bool:
        """Rounding to nearest is fair."""
        return False

    def granule(self, shape: tuple[int, ...]) -> int:
        """Whole blocks."""
        return self.block

    def max_bytes(self, count: int) -> int:
        """Exactly this."""
        return 4 * -(-count // self.block) + count

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append scales and codes."""
        blocks = padded(require_finite(x), self.block)
        scale = scales(blocks, 127.0)
        codes = quantise(blocks, scale, 127)
        return append(out, scale) + append(out, codes.reshape(-1)[: x.numel()].to(torch.int8))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """code · scale; negative, huge and NaN scales are refused."""
        count = out.numel()
        require_length(payload, self.max_bytes(count), f"int8 for {count} values")
        blocks = -(-count // self.block)
        scale = checked_scales(view(payload, 0, blocks, torch.float32))
        codes = view(payload, 4 * blocks, count, torch.int8).to(torch.float32)
        out.copy_((padded(codes, self.block) * scale[:, None]).reshape(-1)[:count])


def padded(x: Tensor, block: int) -> Tensor:
    """The values as rows of `block`, the last one filled up with zeros; no rows if there are no values."""
    missing = -x.numel() % block
    return (functional.pad(x, (0, missing)) if missing else x).reshape(-1, block)


def scales(blocks: Tensor, largest: float) -> Tensor:
    """absmax/largest of each row, so small that decoding cannot overflow; rows of zeros have scale 0."""
    if not blocks.numel():
        return torch.empty(0)
    return (blocks.abs().amax(dim=1) / torch.tensor(largest)).clamp(max=MAX_SCALE)


def quantise(blocks: Tensor, scale: Tensor, largest: int) -> Tensor:
    """round(x/scale) in [-largest, largest]; 0 where the scale is 0."""
    safe = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (blocks / safe[:, None]).round().clamp(-largest, largest)


def checked_scales(scale: Tensor) -> Tensor:
    """The scales, or `CorruptPayload` if one is negative, too large or NaN."""
    if not bool(((scale >= 0) & (scale <= MAX_SCALE)).all()):
        raise CorruptPayload(f"a scale lies outside [0, {MAX_SCALE:g}]")
    return scale
