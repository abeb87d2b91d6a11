"""Float32 as it is: 4 bytes a value, little endian; the codec that loses nothing."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.codec import Buffer, Context, CorruptPayload, require_finite, require_length

assert sys.byteorder == "little", "payloads are little endian; big-endian machines are not supported yet"


@dataclass(frozen=True, slots=True)
class Raw:
    """decode(encode(x)) == x."""

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
        return append(out, require_finite(x))

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Copy the values; NaN and infinity are refused."""
        require_length(payload, self.max_bytes(out.numel()), f"fp32 for {out.numel()} values")
        copy_finite(view(payload, 0, out.numel(), torch.float32), out)


def append(out: bytearray, values: Tensor) -> int:
    """Append a tensor's raw bytes; returns their number."""
    if not values.numel():
        return 0
    raw = memoryview(values.contiguous().view(torch.uint8).numpy())
    out += raw
    return raw.nbytes


def view(payload: Buffer, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` values of the payload from byte `start` on, copied: payloads need not be aligned or writable."""
    stop = start + count * dtype.itemsize
    return torch.frombuffer(bytearray(payload[start:stop]), dtype=dtype) if count else torch.empty(0, dtype=dtype)


def copy_finite(values: Tensor, out: Tensor) -> None:
    """Write float values to `out`, or raise `CorruptPayload` if one is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        raise CorruptPayload("a value is NaN or infinite")
    out.copy_(values)
