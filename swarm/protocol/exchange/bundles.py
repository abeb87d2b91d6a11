"""Bundles: neighbouring shards that are offered, reduced, held and agreed on as one item.

A shard is small, so that it can be decoded and sent on its own: a model of 70 billion parameters
has more than a hundred thousand. What a round says about its content must not grow with that
number. Offers, holdings and close lists therefore name bundles, of which a round has few. The
digest of a bundle is that of its only shard, or of its list: the digests and sizes of its shards.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from farflock.swarm.messages import MAX_BUNDLES, MAX_CHUNK_BYTES, MAX_MEMBERS

_ENTRY = struct.Struct("<32sI")  # a shard's digest and size
MAX_BUNDLE_SHARDS = 65_536  # the list of so many is one chunk
# Two for each of `MAX_MEMBERS` members. More share a mean's work no better and are named in offers,
# reports and reductions, which each member sends to all others.
MAX_MEAN_BUNDLES = 2 * MAX_MEMBERS
MAX_GATHER_BUNDLES = MAX_BUNDLES // MAX_MEMBERS  # of one member
# Shards of a small contribution to a gather, each a bundle: a list would cost one more round trip.
MAX_LONE_SHARDS = 4
assert _ENTRY.size * MAX_BUNDLE_SHARDS <= MAX_CHUNK_BYTES

Entry = tuple[bytes, int]  # the digest and the size of one shard


@dataclass(frozen=True, slots=True)
class BundleCut:
    """The cut of `shards` shards into `bundles` bundles; with `last_alone`, the last has only the
    last shard."""

    shards: int
    bundles: int
    last_alone: bool = False

    @classmethod
    def of_mean(cls, shards: int, *, last_alone: bool = False) -> "BundleCut":
        """Return the cut of a mean: many bundles, because members reduce different ones."""
        cut = shards - last_alone
        return cls(shards, min(cut, MAX_MEAN_BUNDLES) + last_alone, last_alone)

    @classmethod
    def of_gather(cls, shards: int, *, last_alone: bool = False) -> "BundleCut":
        """Return the cut of one contribution to a gather: as few bundles as can be, unless it has
        so few shards that they need no list."""
        cut = shards - last_alone
        few = cut if cut <= MAX_LONE_SHARDS else -(-cut // MAX_BUNDLE_SHARDS)
        return cls(shards, few + last_alone, last_alone)

    def shards_of(self, bundle: int) -> range:
        """Return the shards of a bundle; sizes differ by at most one, and long ones are spread."""
        if self.last_alone and bundle == self.bundles - 1:
            return range(self.shards - 1, self.shards)
        shards, bundles = self.shards - self.last_alone, self.bundles - self.last_alone
        return range(bundle * shards // bundles, (bundle + 1) * shards // bundles)


def max_shards(kind: Literal["mean", "gather"]) -> int:
    """Return the most shards of a stream of this kind."""
    return MAX_BUNDLE_SHARDS * (MAX_GATHER_BUNDLES if kind == "gather" else MAX_MEAN_BUNDLES)


class BadBundle(ValueError):
    """A list of shards that no correct member makes."""


def encode_list(entries: Iterable[Entry]) -> bytes:
    """Return the list of a bundle."""
    return b"".join(_ENTRY.pack(*entry) for entry in entries)


def list_bytes(shards: int) -> int:
    """Return the size of the list of so many shards."""
    return _ENTRY.size * shards


def decode_list(raw: bytes, shards: int, max_shard_bytes: int) -> list[Entry]:
    """Return the entries of a list; raise `BadBundle` if it cannot be that of `shards` shards."""
    if len(raw) != list_bytes(shards):
        raise BadBundle(f"a list of {len(raw)} bytes; {shards} shards have {list_bytes(shards)}")
    entries = list(_ENTRY.iter_unpack(raw))
    if max(size for _, size in entries) > max_shard_bytes:
        raise BadBundle(f"a list with a shard above {max_shard_bytes} bytes")
    return entries
