"""Unchanged float32, 4 bytes a value, the baseline; and half precision, 2 bytes a value: fp16 (11
significant bits, up to 65504) and bf16 (8, and the range of float32).

fp16 is finer for values between 2^-14 and 65504; bf16 keeps its 8 bits everywhere, and zstd can
shrink it.

Payloads are just the bytes of values, so those of neighbouring small segments can be joined, coded
by one call, and cut again: bytes and values are those of the segments one by one. Segments of other
codecs, and long ones, are coded one by one (node/train/shards.py).
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from farflock.compression.codec import Codec
from farflock.compression.payload import FloatCodec

RUN_VALUES = 65_536  # in a run of small shards: 256 KiB of float32, which fit into a core's cache
LENGTH_BYTES = 4  # before each segment

Sizes = Sequence[Sequence[int]]  # in bytes, of the segments of each shard


@dataclass(frozen=True, slots=True)
class Raw(FloatCodec):
    """Unchanged float32: decode(encode(x)) has the bits of x."""

    name: ClassVar[str] = "fp32"


@dataclass(frozen=True, slots=True)
class Half(FloatCodec):
    """Half precision, rounded to nearest, ties to even: |x - decode(encode(x))| <= max(2^-11·|x|,
    2^-25) (fp16), max(2^-8·|x|, 2^-134) (bf16).

    The bound of fp16 holds up to 65504. Larger magnitudes are deliberately sent as 65504: the
    update keeps its sign and is far too large anyway, and a peer that refused to send would lose
    its whole round. bf16 has no such limit in practice: what would round to infinity (above
    3.39e38) becomes its largest number, within the bound.
    """

    name: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        if self.name not in ("fp16", "bf16"):
            raise ValueError(f"half precision {self.name!r} is not known; choose fp16 or bf16")


def value_bytes(codec: Codec) -> int:
    """Return the bytes of one value; 0 if payloads cannot be joined."""
    return codec.dtype.itemsize if isinstance(codec, FloatCodec) else 0


def runs(counts: Iterable[int]) -> list[range]:
    """Return the runs of shards that have these numbers of values: of neighbours with at most
    `RUN_VALUES` together, or of one shard."""
    starts, room, end = [], -1, 0
    for end, count in enumerate(counts):
        if count > room:
            starts.append(end)
            room = RUN_VALUES
        room -= count
    return [range(*ends) for ends in zip(starts, [*starts[1:], end + 1], strict=True)]


def bare(sizes: Sizes, payloads: Sequence[bytes]) -> bytes | None:
    """Return the segments of these payloads without their lengths; None if one differs."""
    pieces = []
    for of_shard, payload in zip(sizes, payloads, strict=True):
        at = 0
        for size in of_shard:
            if payload[at : at + LENGTH_BYTES] != _length(size):
                return None
            at += LENGTH_BYTES + size
            pieces.append(payload[at - size : at])
        if at != len(payload):
            return None
    return b"".join(pieces)


def dressed(sizes: Sizes, raw: bytes) -> list[bytes]:
    """Return the payloads of which `raw` has the segments: the inverse of `bare`."""
    payloads, at = [], 0
    for of_shard in sizes:
        pieces: list[bytes] = []
        for size in of_shard:
            pieces += _length(size), raw[at : at + size]
            at += size
        payloads.append(b"".join(pieces))
    return payloads


@functools.lru_cache(maxsize=1024)
def _length(size: int) -> bytes:
    return size.to_bytes(LENGTH_BYTES, "little")
