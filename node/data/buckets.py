"""Buckets of documents: what pass one sorts roughly, so that pass two can sort each in memory.

A bucket has the documents whose key begins with certain bits: so the buckets in turn give the order
of all. It consists of two files, the tokens of its documents, and a record for each of these.
Equal documents that are in memory together become one record with a count.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from farflock.node.data.ordering import IDENTITY, DocumentId
from farflock.node.errors import Failure

BUCKET_BYTES = 16 << 20  # of the sources' files, about, for each bucket
MAX_BUCKET_BITS = 12
WHOLE_BYTES = 192 << 20  # of a bucket's tokens that are read at once
RECORD = np.dtype([*IDENTITY.descr, ("count", "<u4"), ("size", "<u4"), ("offset", "<u8")])


class BucketSize(msgspec.Struct, array_like=True):
    """The bytes of a bucket's files."""

    records: int = 0
    tokens: int = 0


def bucket_bits(source_bytes: int) -> int:
    """Return how many bits of a key tell buckets apart, for sources of this size."""
    return min(MAX_BUCKET_BITS, max(0, (source_bytes - 1) // BUCKET_BYTES).bit_length())


class Buckets:
    """The buckets in a folder, which are appended to until they are read.

    Raise `Failure` if there is less on the disk than `sizes` says: an earlier process was at work
    when the machine failed. More is what it did after it had saved its state, and is cut off."""

    def __init__(self, folder: Path, bits: int, sizes: dict[int, BucketSize]) -> None:
        self._folder, self._bits, self.sizes = folder, bits, sizes
        self._held: dict[int, dict[DocumentId, tuple[bytes, int]]] = {}
        self.held_bytes = 0
        folder.mkdir(parents=True, exist_ok=True)
        for bucket in range(1 << bits):
            size = sizes.get(bucket, BucketSize())
            for path, wanted in zip(self._paths(bucket), (size.records, size.tokens), strict=True):
                _cut_to(path, wanted)

    def add(self, identity: DocumentId, tokens: bytes) -> None:
        """Put a document into its bucket."""
        held = self._held.setdefault(identity.key_high >> (64 - self._bits), {})
        before = held.get(identity)
        if before is None:
            self.held_bytes += len(tokens) + _HELD_COST
        held[identity] = (tokens, 1 if before is None else before[1] + 1)

    def flush(self) -> None:
        """Write what is in memory."""
        for bucket, held in self._held.items():
            size = self.sizes.setdefault(bucket, BucketSize())
            records, offset = np.zeros(len(held), dtype=RECORD), size.tokens
            for place, (identity, (tokens, count)) in enumerate(held.items()):
                records[place] = (*identity, count, len(tokens), offset)
                offset += len(tokens)
            paths = self._paths(bucket)
            _append(paths[0], records.tobytes())
            _append(paths[1], b"".join(tokens for tokens, _ in held.values()))
            size.records += records.nbytes
            size.tokens = offset
        self._held, self.held_bytes = {}, 0

    def __len__(self) -> int:
        return 1 << self._bits

    def key_range(self, bucket: int) -> tuple[int, int]:
        """Return the first `key_high` of a bucket, and that of the next one."""
        width = 1 << (64 - self._bits)
        return bucket * width, (bucket + 1) * width

    def records(self, bucket: int) -> NDArray[np.void]:
        """Return the records of a bucket (n,), in the order in which they came."""
        path, _ = self._paths(bucket)
        return np.fromfile(path, dtype=RECORD) if path.exists() else np.zeros(0, dtype=RECORD)

    @contextlib.contextmanager
    def tokens(self, bucket: int) -> Iterator[Callable[[int, int], bytes]]:
        """Yield a function that returns some bytes of a bucket's tokens: a number, from an
        offset. Documents are small, and disks slow where they lie: so it reads all at once, unless
        that is more than memory should hold, as of a bucket with a very long text."""
        descriptor = os.open(self._paths(bucket)[1], os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size > WHOLE_BYTES:
                yield lambda size, offset: os.pread(descriptor, size, offset)
            else:
                whole = os.pread(descriptor, WHOLE_BYTES, 0)
                yield lambda size, offset: whole[offset : offset + size]
        finally:
            os.close(descriptor)

    def _paths(self, bucket: int) -> tuple[Path, Path]:
        return self._folder / f"{bucket:04}.records", self._folder / f"{bucket:04}.tokens"


_HELD_COST = 400  # bytes that a document takes in memory beside its tokens, about


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def _cut_to(path: Path, size: int) -> None:
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise Failure(
            str(path),
            f"it has {found:,} bytes, and had {size:,} before",
            f"remove {path.parents[1]}, and begin again",
        )
    if found > size:
        os.truncate(path, size)
