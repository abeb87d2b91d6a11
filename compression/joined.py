"""Small shards coded together, where a payload is just the bytes of its values.

In fp32, fp16 and bf16 the values of neighbouring segments can be joined, coded by one call, and cut
again: bytes and values are those of the segments one by one. Codecs of other kinds, and long
shards, are coded segment by segment (shards.py).
"""

import functools
from collections.abc import Iterable, Sequence

from farflock.compression.codec import Codec
from farflock.compression.payload import FloatCodec

RUN_VALUES = 65_536  # in a run of small shards: 256 KiB of float32, which fit into a core's cache
LENGTH_BYTES = 4  # before each segment

Sizes = Sequence[Sequence[int]]  # in bytes, of the segments of each shard


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
    parts = []
    for of_shard, payload in zip(sizes, payloads, strict=True):
        at = 0
        for size in of_shard:
            if payload[at : at + LENGTH_BYTES] != _length(size):
                return None
            at += LENGTH_BYTES + size
            parts.append(payload[at - size : at])
        if at != len(payload):
            return None
    return b"".join(parts)


def dressed(sizes: Sizes, raw: bytes) -> list[bytes]:
    """Return the payloads of which `raw` has the segments: the inverse of `bare`."""
    payloads, at = [], 0
    for of_shard in sizes:
        parts: list[bytes] = []
        for size in of_shard:
            parts += _length(size), raw[at : at + size]
            at += size
        payloads.append(b"".join(parts))
    return payloads


@functools.lru_cache(maxsize=1024)
def _length(size: int) -> bytes:
    return size.to_bytes(LENGTH_BYTES, "little")
