"""Float32 as it is, 4 bytes a value: the codec that loses nothing, and the yardstick of the others."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression import native
from farflock.compression.codec import Buffer, Context, CorruptPayload, require_length
from farflock.compression.payload import FLOAT_MAX, append, largest, values_at, within


@dataclass(frozen=True, slots=True)
class Raw:
    """decode(encode(x)) has the bits of x."""

    name: ClassVar[str] = "fp32"
    biased: ClassVar[bool] = False

    def granule(self, shape: tuple[int, ...]) -> int:
        """Any cut is fine."""
        return 1

    def max_bytes(self, count: int) -> int:
        """Exactly 4 a value."""
        return 4 * count

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the values."""
        if native.encode("fp32", x, out):
            return self.max_bytes(x.numel())
        return append(out, within(x))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Copy the values; NaN and infinity are refused."""
        if native.decode("fp32", payload, out):
            return
        require_length(payload, self.max_bytes(out.numel()), f"fp32 for {out.numel()} values")
        values = values_at(payload, 0, out.numel(), torch.float32)
        if not largest(values) <= FLOAT_MAX:
            raise CorruptPayload("fp32 payload holds NaN or infinity")
        out.copy_(values)
