"""The second pass of preparing: bucket after bucket, the documents in their order, each once.

What the folder has already (`seen`) counts as there: it is not written again.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflock.node.data.buckets import Buckets
from farflock.node.data.ordering import IDENTITY, begins, held_out_below, in_order
from farflock.node.data.shard_writer import ShardWriter

_ROWS = 1 << 16  # that are Python's objects at a time


class Writers(NamedTuple):
    """Where documents go: those to train on, and those that are held out."""

    train: ShardWriter
    held_out: ShardWriter


class Merging(NamedTuple):
    """The pass over the documents of all buckets: `share` of them is held out, and equal ones are
    dropped unless `keeps_duplicates`."""

    buckets: Buckets
    share: float
    keeps_duplicates: bool

    def run(
        self,
        writers: Writers,
        seen: "list[SeenFile]",
        new: BinaryIO,
        progress: Callable[[float], None],
    ) -> int:
        """Write the documents, and to `new` their identities; return how many were dropped."""
        dropped = 0
        for bucket in range(len(self.buckets)):
            dropped += self._bucket(bucket, writers, seen, new)
            progress((bucket + 1) / len(self.buckets))
        return dropped

    def _bucket(self, bucket: int, writers: Writers, seen: "list[SeenFile]", new: BinaryIO) -> int:
        records = self.buckets.records(bucket)
        if not len(records):
            return 0
        kept, counts = _distinct(records, self._old(bucket, seen))
        kept["count"] = counts if self.keeps_duplicates else np.minimum(counts, 1)
        written = kept[kept["count"] > 0]
        new.write(_identities(written).tobytes())
        below = held_out_below(self.share)
        with self.buckets.tokens(bucket) as read:
            for own, count, size, offset in _rows(written):
                content = read(size, offset)
                writer = writers.held_out if own < below else writers.train
                for _ in range(count):
                    writer.add(content)
        return int(records["count"].sum(dtype=np.int64) - written["count"].sum(dtype=np.int64))

    def _old(self, bucket: int, seen: "list[SeenFile]") -> NDArray[np.void]:
        if self.keeps_duplicates or not seen:
            return np.zeros(0, dtype=IDENTITY)
        first, stop = self.buckets.key_range(bucket)
        return np.concatenate([each.between(first, stop) for each in seen])


def _distinct(
    records: NDArray[np.void], old: NDArray[np.void]
) -> tuple[NDArray[np.void], NDArray[np.int64]]:
    """Return one record of each kind of equal ones, in their order, and how many there are of each;
    0 if it is among the old ones."""
    # An old one comes before a new one that equals it, and a sort leaves it there.
    whole = np.concatenate([old, _identities(records)])
    order = in_order(whole)
    first = begins(whole[order])
    counted = np.concatenate([np.zeros(len(old), dtype=np.int64), records["count"]])
    starts = np.flatnonzero(first)
    counts = np.add.reduceat(counted[order], starts)
    leaders = order[starts]
    is_new = leaders >= len(old)
    return records[leaders[is_new] - len(old)].copy(), counts[is_new]


def _identities(records: NDArray[np.void]) -> NDArray[np.void]:
    found = np.zeros(len(records), dtype=IDENTITY)
    for name in IDENTITY.names or ():
        found[name] = records[name]
    return found


def _rows(records: NDArray[np.void]) -> Iterator[tuple[int, int, int, int]]:
    for start in range(0, len(records), _ROWS):
        some = records[start : start + _ROWS]
        columns = [some[name].tolist() for name in ("own_low", "count", "size", "offset")]
        yield from zip(*columns, strict=True)


class SeenFile:
    """The identities of an increment's documents, in their order, in a file."""

    def __init__(self, path: Path) -> None:
        size = path.stat().st_size // IDENTITY.itemsize
        self._all = np.memmap(path, dtype=IDENTITY, mode="r") if size else np.zeros(0, IDENTITY)

    def between(self, first: int, stop: int) -> NDArray[np.void]:
        """Return those whose `key_high` is from `first` to below `stop`."""
        return np.array(self._all[self._place(first) : self._place(stop)])

    def _place(self, key: int) -> int:
        """Return how many have a lower `key_high`."""
        low, high = 0, len(self._all)
        while low < high:
            middle = (low + high) // 2
            if int(self._all[middle]["key_high"]) < key:
                low = middle + 1
            else:
                high = middle
        return low
