"""A peer's place in its samples: at most 200 bytes, from which it goes on without the past.

    version (1 byte), number of sources (1), fingerprint of the stream (8), samples drawn (8),
    for each source its epoch (3) and the shards of its group that it is done with (1), the group
    (4), its number in there (3) and the shards that are late (1), CRC-32 (4)

Integers are little-endian; a byte of shards has a bit for each, that of the first is the lowest.
The block of samples (mixture.py) follows from how many are drawn.
"""

import struct
import zlib
from typing import NamedTuple

MAX_CURSOR_BYTES = 200
MAX_SOURCES = 14  # so that their places fit
FINGERPRINT_BYTES = 8
_VERSION = 1
_HEAD, _PLACE, _CHECK = struct.Struct("<BB8sQ"), struct.Struct("<III"), struct.Struct("<I")
_DRAWN_LIMIT = 1 << 63


class BadCursor(ValueError):
    """Bytes that are no cursor, or that of other samples; the message names the remedy."""


class SourcePlace(NamedTuple):
    """The next sample of a source: its number in the order of a group of shards of an epoch.

    Where shards of the group were late, it is read in several passes: `done` are those of passes
    before, and `late` those that are in no pass yet. Bit n is that of the group's shard n."""

    epoch: int = 0
    group: int = 0
    number: int = 0
    done: int = 0
    late: int = 0

    def packed(self) -> tuple[int, int, int]:
        """Return three numbers of 32 bits."""
        return self.epoch | self.done << 24, self.group, self.number | self.late << 24


def _unpacked(first: int, group: int, last: int) -> SourcePlace:
    low = (1 << 24) - 1
    return SourcePlace(first & low, group, last & low, first >> 24, last >> 24)


class Cursor(NamedTuple):
    """The next sample of a stream: how many were drawn before it, and the place in each source.

    The fingerprint is that of all else that the samples depend on."""

    fingerprint: bytes
    drawn: int
    places: tuple[SourcePlace, ...]

    def encode(self) -> bytes:
        """Return the cursor's bytes."""
        head = _HEAD.pack(_VERSION, len(self.places), self.fingerprint, self.drawn)
        body = b"".join([head, *(_PLACE.pack(*place.packed()) for place in self.places)])
        return body + _CHECK.pack(zlib.crc32(body))


def read_cursor(raw: bytes, fingerprint: bytes, sources: int) -> Cursor:
    """Return the cursor of a stream with this fingerprint and number of sources; raise `BadCursor`
    if it is not one."""
    if len(raw) != _HEAD.size + sources * _PLACE.size + _CHECK.size:
        raise _damaged(f"it has {len(raw)} bytes")
    body, (check,) = raw[: -_CHECK.size], _CHECK.unpack(raw[-_CHECK.size :])
    version, count, found, drawn = _HEAD.unpack_from(body)
    if zlib.crc32(body) != check or count != sources or drawn >= _DRAWN_LIMIT:
        raise _damaged("its content contradicts itself")
    if version != _VERSION:
        raise BadCursor(f"the position in the data has version {version}; update farflock")
    if found != fingerprint:
        raise BadCursor(
            "the position in the data is that of another run, or of other data; move it away to "
            "start at the first sample"
        )
    places = tuple(_unpacked(*place) for place in _PLACE.iter_unpack(body[_HEAD.size :]))
    return Cursor(found, drawn, places)


def _damaged(why: str) -> BadCursor:
    return BadCursor(
        f"the position in the data is damaged ({why}); move it away to start at the first sample"
    )
