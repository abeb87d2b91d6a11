"""The seam between tensors and bytes: `Codec`, its laws, and the one error that a decoder may
raise.

A codec is stateless and pure. Whatever keeps state between calls (error feedback, caches, warm
starts) belongs to a method. docs/wire-format.md defines every wire format to the bit.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview


class CorruptPayload(Exception):
    """Raised for a payload that no correct encoder can have written; the message says what was
    expected."""


class UnencodableTensor(ValueError):
    """Raised if the sender's own tensor cannot be encoded (NaN, infinity, wrong type)."""


@dataclass(frozen=True, slots=True)
class Context:
    """The identity of one encoding, equal at sender and receiver; codecs derive shared randomness
    from it. `columns` is the number of values in a row of the tensor, 0 for a vector."""

    run_seed: int = 0
    round: int = 0
    tensor: str = ""
    shard: int = 0
    columns: int = 0


class Codec(Protocol):
    """An encoder of flat float32 tensors (one shard each) to bytes, with its decoder.

    Laws, for every codec in `catalog.CODECS` (compression/check.py has 0 to 6 as functions):

    0. A codec is a frozen value, and equal codecs are interchangeable.
    1. `decode(encode(x))` fills `out` with finite values, within the codec's stated bound of `x`.
    2. `encode` writes exactly the number of bytes it returns, at most `max_bytes(len(x))`.
    3. `encode` raises `UnencodableTensor` if `x` has a NaN or infinity. Empty and all-zero tensors
       round-trip.
    4. `decode` of any bytes at all either fills `out` with finite values or raises
       `CorruptPayload`, and allocates at most a small multiple of `out`. It refuses a payload of
       the wrong length before it allocates anything.
    5. Both are pure and deterministic; `decode` gives the same bits on every machine
       (docs/architecture.md, "portable arithmetic": + - * / sqrt in fp32, each its own call and so
       separately rounded, comparisons, and integers).
    6. Shards cut at multiples of `granule` decode as the whole tensor does, unless a step depends
       on all values (ecsq).
    7. `x` and `out` may be on any device. `decode` gives the same bits there as on the CPU; the
       payload of `encode` may differ, within the bound.
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The catalog's name, as used in manifests: `int8`, `topk:64/4096`."""
        ...

    @property
    def biased(self) -> bool:
        """True if mass is systematically lost (sparse, sign): a mean then needs error feedback."""
        ...

    @property
    def on_device(self) -> bool:
        """True if values on a device are coded there, so that little more than the payload is
        copied; otherwise they are copied and coded on the CPU."""
        ...

    def granule(self, shape: tuple[int, ...]) -> int:
        """Return the length at whose multiples a tensor of this shape may be cut."""
        ...

    def max_bytes(self, count: int) -> int:
        """Return the largest number of bytes for `count` values; receivers refuse longer payloads
        unread."""
        ...

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the payload of the flat float32 tensor `x` to `out`; return the number of bytes
        appended."""
        ...

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Overwrite the flat float32 tensor `out` with the payload's `len(out)` values."""
        ...


def require_finite(x: Tensor) -> Tensor:
    """Return `x`; raise `UnencodableTensor` unless it is a flat, finite float32 tensor."""
    if x.dtype != torch.float32 or x.dim() != 1:
        raise UnencodableTensor(
            f"a codec takes flat float32 tensors, got {x.dtype} {tuple(x.shape)}"
        )
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise UnencodableTensor(
            f"{bad} of {x.numel()} values are NaN or infinite; refusing to send them"
        )
    return x


def require_length(
    payload: Buffer, min_length: int, what: str, max_length: int | None = None
) -> None:
    """Raise `CorruptPayload` unless `payload` has from `min_length` to `max_length` bytes.

    Without `max_length`, it must have exactly `min_length`."""
    if not min_length <= len(payload) <= (min_length if max_length is None else max_length):
        expected = f"{min_length}" if max_length is None else f"{min_length} to {max_length}"
        raise CorruptPayload(f"{what} needs {expected} bytes, got {len(payload)}")
