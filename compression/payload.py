"""Conversion between values and payload bytes, with the sender's finiteness check in one pass;
shared by all codecs.

Payloads are little endian and unaligned. Values are copied out first, so no tensor ever points into
a peer's message.
"""

import contextlib
import functools
import sys
from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from farflock.compression import native
from farflock.compression.codec import (
    Buffer,
    Codec,
    Context,
    CorruptPayload,
    require_finite,
    require_length,
)

assert sys.byteorder == "little", (
    "payloads are little endian; this code does not swap bytes on big-endian machines"
)

FLOAT_MAX = torch.finfo(torch.float32).max
BF16_MAX_BITS = 0x7F7F
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def _copies(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which this process copies from a CUDA device and to it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has not typed it


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Let what the block copies from a device run beside its other work, and wait for it: on CUDA
    it begins after all that the device was asked before, and nothing that it is asked later waits
    for it. Other devices copy in the order in which they are asked."""
    if device.type != "cuda":
        yield
        return
    stream = _copies(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def to_host(x: Tensor) -> Tensor:
    """Return a tensor's values on the CPU, copied through pinned memory and `aside`; those of the
    CPU are returned themselves."""
    if x.is_cpu:
        return x
    with aside(x.device):
        return x.to("cpu", non_blocking=x.is_cuda)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the CPU on a device. On CUDA they come through pinned memory, beside what it
    computes, and what it is asked from now on waits for them."""
    if device.type != "cuda":
        return values.to(device)
    stream, asked = _copies(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        there = values.pin_memory().to(device, non_blocking=True)
    asked.wait_stream(stream)
    there.record_stream(asked)
    return there


def append(out: bytearray, values: Tensor) -> int:
    """Append a tensor's raw bytes to `out`; return the number of bytes."""
    if not values.numel():
        return 0
    raw = to_host(values.contiguous().view(torch.uint8)).numpy().data
    out += raw
    return raw.nbytes


def values_at(
    payload: Buffer,
    start: int,
    count: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return a copy of the `count` values at byte `start`, on `device` (None: the CPU); the caller
    has checked the length."""
    if not count:
        return torch.empty(0, dtype=dtype, device=device)
    values = torch.frombuffer(
        bytearray(memoryview(payload)[start : start + count * dtype.itemsize]), dtype=dtype
    )
    return values if device is None else to_device(values, device)


def divided(x: Tensor, by: float) -> Tensor:
    """Return x / float32(by), correctly rounded on every device: CUDA divides by a number as if it
    multiplied by the reciprocal, and only by a tensor as IEEE 754 says."""
    return x / x.new_full((), by)


def packed_bits(bits: Tensor) -> Tensor:
    """Return flat zeros and ones as bytes, the first bit lowest, padded with 0."""
    eights = functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (eights << _eight(bits.device)).sum(dim=1, dtype=torch.uint8)


def unpacked_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of `packed_bits`, as uint8."""
    return ((packed[:, None] >> _eight(packed.device)) & 1).view(-1)[:count]


def _eight(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def largest(values: Tensor) -> float:
    """Return the largest magnitude: NaN if any value is NaN, 0 for an empty tensor."""
    peak = native.peak(values)
    if peak is not None:
        return peak
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return float(torch.maximum(-low, high))


def flat(x: Tensor) -> Tensor:
    """Return `x`; raise `UnencodableTensor` unless it is a flat float32 tensor."""
    return x if x.dtype == torch.float32 and x.dim() == 1 else require_finite(x)


def within(x: Tensor, limit: float = FLOAT_MAX) -> Tensor:
    """Return `x` clamped to ±`limit`; raise `UnencodableTensor` unless it is flat, float32 and
    finite. A tensor that needs no clamping, the usual case, is returned itself after one pass."""
    if largest(flat(x)) <= limit:  # false for NaN
        return x
    return require_finite(x).clamp(-limit, limit)


def bf16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return non-negative finite numbers as bf16 bits: nearest, ties to even, never infinity."""
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.clip(max=BF16_MAX_BITS).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the float32 values of bf16 bits, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


class ExactCodec(Codec):
    """A codec whose payloads have exactly `max_bytes` bytes; it uses the native kernel if there is
    one."""

    __slots__ = ()
    kernel: ClassVar[bool] = False
    on_device: ClassVar[bool] = True

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kernel's arguments `block` and `chunk`, as far as the codec has them."""
        return ()

    @abstractmethod
    def write(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Encode as `encode` does, without a kernel."""

    @abstractmethod
    def read(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Decode a payload of the right length as `decode` does, without a kernel."""

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the payload; return the number of bytes appended."""
        if self.kernel and native.encode(self._kind, x, out, *self.numbers):
            return self.max_bytes(x.numel())
        return self.write(x, ctx, out)

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Overwrite `out`; refuse a payload that no encoder writes."""
        if self.kernel and native.decode(self._kind, payload, out, *self.numbers):
            return
        require_length(
            payload, self.max_bytes(out.numel()), f"{self.name} for {out.numel()} values"
        )
        self.read(payload, ctx, out)

    @property
    def _kind(self) -> str:
        return self.name.partition(":")[0]


class FloatCodec(ExactCodec):
    """A codec that sends each value as a float of the type in its name."""

    __slots__ = ()
    kernel: ClassVar[bool] = True
    biased: ClassVar[bool] = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values in the payload."""
        return FLOATS[self.name]

    def granule(self, shape: tuple[int, ...]) -> int:
        """Return 1: any cut is fine."""
        return 1

    def max_bytes(self, count: int) -> int:
        """Return the exact length of the payload."""
        return self.dtype.itemsize * count

    def write(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the rounded values."""
        return append(out, within(x, torch.finfo(self.dtype).max).to(self.dtype))

    def read(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Widen the values; refuse NaN and infinity."""
        values = values_at(payload, 0, out.numel(), self.dtype, out.device)
        if not bool(torch.isfinite(values).all()):
            raise CorruptPayload(f"{self.name} payload holds NaN or infinity")
        out.copy_(values)
