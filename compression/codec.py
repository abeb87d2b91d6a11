"""The seam between tensors and bytes: `Codec`, its law, and the one error a decoder may raise.

A codec is stateless and pure. What remembers something between calls (error feedback, caches, warm starts) belongs
to a method. Every wire format is written down to the bit in docs/wire-format.md.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview


class CorruptPayload(Exception):
    """A payload that no correct encoder can have written; the message says what was expected and what came."""


class UnencodableTensor(ValueError):
    """The sender's own tensor cannot be encoded (NaN, infinity, wrong type): a fault on this side, never sent."""


@dataclass(frozen=True, slots=True)
class Context:
    """Names one encoding: what codecs derive shared randomness from. Equal on sender and receiver.

    `columns` are the values in a row of the tensor, 0 for a vector.
    """

    run_seed: int = 0
    round: int = 0
    tensor: str = ""
    shard: int = 0
    columns: int = 0


class Codec(Protocol):
    """Turns a flat float32 tensor (one shard) into bytes and back.

    Laws, for every codec in `catalog.CODECS` (compression/check.py has them as functions):

    0. A codec is a frozen value, and equal codecs stand for each other.
    1. `decode(encode(x))` fills `out` with finite values, within the codec's stated bound of `x`.
    2. `encode` writes exactly the number of bytes it returns, at most `max_bytes(len(x))`.
    3. NaN or infinity in `x`: `UnencodableTensor`. Empty and all-zero tensors round-trip.
    4. `decode` of any bytes at all either fills `out` with finite values or raises `CorruptPayload`, and takes no
       memory beyond a small multiple of `out`. A payload of the wrong length is refused before anything is taken.
    5. Both are pure and deterministic; decode gives the same bits on every machine (docs/architecture.md,
       "portable arithmetic": separately rounded + - * / sqrt, comparisons and integers in fp32, each its own call).
    6. Shards that are cut at multiples of `granule` decode as the whole tensor does, unless a step is of all values (ecsq).
    """

    __slots__ = ()

    @property
    def name(self) -> str:
        """The catalogue's name, which travels in manifests: `int8`, `topk:64/4096`."""
        ...

    @property
    def biased(self) -> bool:
        """True if decode(encode(x)) loses mass systematically (sparse, sign): a mean of these needs feedback."""
        ...

    def granule(self, shape: tuple[int, ...]) -> int:
        """Values per indivisible group: a tensor of this shape may be cut into shards at its multiples only."""
        ...

    def max_bytes(self, count: int) -> int:
        """The most bytes that `encode` can write for `count` values; receivers refuse anything longer unseen."""
        ...

    def encode(self, x: Tensor, ctx: Context, out: bytearray) -> int:
        """Append the payload of the flat float32 tensor `x` to `out`; return the number of bytes appended."""
        ...

    def decode(self, payload: Buffer, ctx: Context, out: Tensor) -> None:
        """Overwrite the flat float32 tensor `out` with the decoded values; its length says how many there must be."""
        ...


def require_finite(x: Tensor) -> Tensor:
    """Return `x` if it is a flat, finite float32 tensor on the CPU; raise `UnencodableTensor` otherwise."""
    if x.dtype != torch.float32 or x.dim() != 1 or x.device.type != "cpu":
        raise UnencodableTensor(f"a codec takes flat float32 CPU tensors, got {x.dtype} {tuple(x.shape)} on {x.device}")
    if not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).sum())
        raise UnencodableTensor(f"{bad} of {x.numel()} values are NaN or infinite; refusing to send them")
    return x


def require_length(payload: Buffer, least: int, what: str, most: int | None = None) -> None:
    """Raise `CorruptPayload` unless `payload` has so many bytes: exactly `least`, or any number up to `most`."""
    if not least <= len(payload) <= (least if most is None else most):
        expected = f"{least}" if most is None else f"{least} to {most}"
        raise CorruptPayload(f"{what} needs {expected} bytes, got {len(payload)}")
