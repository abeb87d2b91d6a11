"""Documents in a random order, with little memory, in two passes over the disk.

First each document goes to a bucket, a file, that is drawn for it. Then the buckets are taken one
after the other, and the documents of each in an order that is drawn too. Both together are a
uniform permutation of all documents, whatever the number of buckets (Rao 1961; Sandelius 1962).
All draws depend on the seed, the source's name and the document's number alone.
"""

import functools
import os
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from farflock.node.errors import Failure
from farflock.node.model.random_order import philox_key, raw_outputs
from farflock.node.tokens.tokenizer import TokenIds

BUFFERED_BYTES = 64 << 20  # of all buckets together, before they are written
LOADED_BYTES = 128 << 20  # a larger bucket is mapped

_BLOCK = 1024  # documents that are handled at once
_WORDS = 4  # outputs for each document, of which one is in reserve
# A part of a document in a bucket: the document's draw, which orders the bucket, and its tokens.
_RECORD = np.dtype([("order", "<u8"), ("tokens", "<u8")])
_PART_BYTES = 256  # of memory that a part takes besides its tokens, roughly
_TOKENS, _RECORDS = ".tokens", ".records"


class DocumentDraws:
    """The draws for each document of a source: 64-bit numbers, uniform and independent."""

    def __init__(self, seed: int, source: str) -> None:
        self._key = philox_key(f"farflock-prepared-documents-v1 {seed} {source}")
        self._block = functools.lru_cache(maxsize=2)(self._outputs)

    def of(self, number: int) -> tuple[int, int, int]:
        """Return the draws that decide whether the document is held out, its bucket, and its place
        in it."""
        block, place = divmod(number, _BLOCK)
        held_out, bucket, order, _ = self._block(block)[place]
        return held_out, bucket, order

    def _outputs(self, block: int) -> list[list[int]]:
        words: list[list[int]] = (
            raw_outputs(self._key, (block, 0), _BLOCK * _WORDS).reshape(_BLOCK, _WORDS).tolist()
        )
        return words


class Buckets:
    """Documents in files of a folder: tokens in one, the lengths of parts in another. Nothing is
    sure to be there before `flush`; `sizes` has the bytes of each bucket's files after it."""

    def __init__(self, folder: Path, dtype: "np.dtype[np.unsignedinteger]") -> None:
        self._folder, self._dtype = folder, dtype
        self._tokens: dict[str, list[TokenIds]] = {}
        self._records: dict[str, list[tuple[int, int]]] = {}
        self.sizes: dict[str, tuple[int, int]] = {}
        self.buffered_bytes = 0

    def add(self, bucket: str, order: int, tokens: TokenIds) -> None:
        """Append a part of a document. Parts of one document come one after the other."""
        self._tokens.setdefault(bucket, []).append(tokens)
        self._records.setdefault(bucket, []).append((order, len(tokens)))
        self.buffered_bytes += len(tokens) * self._dtype.itemsize + _PART_BYTES

    def flush(self) -> None:
        """Write what is in memory."""
        for bucket, arrays in self._tokens.items():
            tokens = np.concatenate(arrays).astype(self._dtype, copy=False)
            records = np.array(self._records[bucket], dtype=_RECORD)
            before = self.sizes.get(bucket, (0, 0))
            self._append(bucket + _TOKENS, tokens)
            self._append(bucket + _RECORDS, records)
            self.sizes[bucket] = (before[0] + tokens.nbytes, before[1] + records.nbytes)
        self._tokens, self._records, self.buffered_bytes = {}, {}, 0

    def restore(self, sizes: Mapping[str, tuple[int, int]]) -> None:
        """Go back to buckets as they were when they had these sizes; raise `Failure` if the files
        have become shorter."""
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = {
            bucket + ending: size
            for bucket, both in sizes.items()
            for ending, size in zip((_TOKENS, _RECORDS), both, strict=True)
        }
        for path in list(self._folder.iterdir()):
            if path.name not in kept:
                path.unlink()
        for name, size in kept.items():
            path = self._folder / name
            if not path.is_file() or path.stat().st_size < size:
                raise Failure(str(path), "a part of it is missing", "start over with --force")
            os.truncate(path, size)
        self.sizes = dict(sizes)

    def shuffled(self, bucket: str) -> Iterator[TokenIds]:
        """Yield the documents of a bucket in their drawn order; nothing if there is none."""
        if bucket not in self.sizes:
            return
        records = np.fromfile(self._folder / (bucket + _RECORDS), dtype=_RECORD)
        tokens = self._all_tokens(bucket)
        places = np.argsort(records["order"], kind="stable")
        ends = np.cumsum(records["tokens"])
        borders = _borders(records["order"][places])
        for at in range(0, len(borders) - 1, _BLOCK):  # Python's own integers are large
            some = borders[at : at + _BLOCK + 1]
            parts = places[some[0] : some[-1]]
            stops = ends[parts].tolist()
            starts = (ends[parts] - records["tokens"][parts]).tolist()
            for first, after in pairwise((some - some[0]).tolist()):
                yield joined([tokens[starts[part] : stops[part]] for part in range(first, after)])

    def _all_tokens(self, bucket: str) -> TokenIds:
        path = self._folder / (bucket + _TOKENS)
        if self.sizes[bucket][0] <= LOADED_BYTES:
            return np.fromfile(path, dtype=self._dtype)
        return np.memmap(path, dtype=self._dtype, mode="r")

    def _append(self, name: str, array: NDArray[np.generic]) -> None:
        with (self._folder / name).open("ab", buffering=0) as file:
            left = np.ascontiguousarray(array).view(np.uint8).data
            while left:  # a nearly full disk takes a part, and then complains
                left = left[file.write(left) :]


def _borders(orders: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where each stretch of equal draws, the parts of one document, begins, and the end."""
    inner = np.flatnonzero(np.diff(orders)) + 1
    return np.concatenate([[0], inner, [len(orders)]]).astype(np.int64)


def joined(parts: list[TokenIds]) -> TokenIds:
    """Return the tokens of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    return cast(TokenIds, np.concatenate(parts))
