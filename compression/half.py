"""Half precision: fp16 (10 fraction bits, up to 65504) and bf16 (7 fraction bits, the range of fp32); 2 bytes a value.

Rounding is to nearest, ties to even, the same on every machine. What does not fit is clamped to the largest finite value:
pseudo-gradients are far below it, and a clamped update does less harm than a lost round.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from farflock.compression.codec import Buffer, Context, require_finite, require_length
from farflock.compression.raw import append, copy_finite, view

_TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Half:
    """|x - decode(encode(x))| <= 2^-11·|x| (fp16, down to 2^-14, below that 2^-25) or 2^-8·|x| (bf16)."""

    name: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        if self.name not in _TYPES:
            raise ValueError(f"half precision {self.name!r} is not known; choose fp16 or bf16")

    @property
    def biased(self) -> bool:
        """Rounding to nearest is fair."""
        return False

    def granule(self, shape: tuple[int, ...]) -> int:
        """Any cut is fine."""
        return 1

    def max_bytes(self, count: int) -> int:
        """Exactly 2 a value."""
        return 2 * count

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the rounded values."""
        kind = _TYPES[self.name]
        limit = torch.finfo(kind).max
        return append(out, require_finite(x).clamp(-limit, limit).to(kind).view(torch.int16))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Widen the values; NaN and infinity are refused."""
        require_length(payload, self.max_bytes(out.numel()), f"{self.name} for {out.numel()} values")
        copy_finite(view(payload, 0, out.numel(), torch.int16).view(_TYPES[self.name]).to(torch.float32), out)
