"""The first pass of preparing: read the sources, tokenize them, and sort documents into buckets.

The pass can be broken off anywhere and taken up again: its state, saved every few seconds, says how
many parts of documents were read, and how long each bucket was.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from farflock.node.data.buckets import Buckets, BucketSize, bucket_bits
from farflock.node.data.documents import BadDocuments, Passage, read_documents
from farflock.node.data.index import token_type
from farflock.node.data.ordering import DocumentIds, document_hash
from farflock.node.data.sources import SourceFile
from farflock.node.durable import write_durably
from farflock.node.tokens.tokenizer import TokenIds, Tokenizer

STATE = "state.json"
SAVE_EVERY_S = 10.0
HELD_BYTES = 96 << 20  # of documents in memory before buckets are written
BATCH_BYTES, BATCH_PASSAGES = 1 << 20, 4096  # of text that one call tokenizes
MAX_WORKERS = 8  # calls at once, each of which may use several threads
MAX_NAMED = 20  # documents that could not be read, in words


class SortingState(msgspec.Struct, kw_only=True):
    """The place that the pass has reached: files read to their end, passages read of the next, and
    the bytes of the buckets' files. `fingerprint` stands for all that the result depends on."""

    fingerprint: str
    files: int = 0
    passages: int = msgspec.field(default=0, name="parts")
    finished: bool = False
    skipped: int = 0
    named: list[str] = msgspec.field(default_factory=list)
    buckets: dict[int, BucketSize] = msgspec.field(default_factory=dict)


class _Item(NamedTuple):
    """A passage, and how far the pass is after it: files, passages of the next, bytes of all."""

    passage: Passage
    files: int
    file_passages: int
    read_bytes: int


class _Tokenized(NamedTuple):
    """The outcome of a passage: the hash of its text, and its tokens; or why there are none."""

    digest: bytes
    tokens: bytes
    fault: str = ""


class Sorting:
    """The pass over all files, from where `state` says to the end."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[SourceFile],
        tokenizer: Tokenizer,
        field: str,
        state: SortingState,
    ) -> None:
        self._folder, self._files, self._tokenizer = folder, files, tokenizer
        self._field, self.state = field, state
        self._kind = token_type(tokenizer.vocab_size)
        self._identities = DocumentIds()
        self.total_bytes = sum(file.size for file in files)
        self.buckets = Buckets(folder / "buckets", bucket_bits(self.total_bytes), state.buckets)

    def run(
        self,
        cores: int,
        clock: Callable[[], float],
        progress: Callable[[int], None],
        strict: bool = False,
    ) -> None:
        """Read to the end; `progress` takes the bytes that are read. Raise `BadDocuments` for one
        that cannot be read if that is `strict`, else count and name it."""
        saved_s = clock()
        for items, made in self._ahead(min(cores, MAX_WORKERS)):
            for item, found in zip(items, made, strict=True):
                self._take(item.passage, found, strict)
            last = items[-1]
            self.state.files, self.state.passages = last.files, last.file_passages
            if self.buckets.held_bytes > HELD_BYTES or clock() - saved_s > SAVE_EVERY_S:
                self.save()
                saved_s = clock()
            progress(last.read_bytes)
        self.state.files, self.state.passages, self.state.finished = len(self._files), 0, True
        self.save()

    def save(self) -> None:
        """Write everything that is in memory, and the state, so that there is always a whole
        one."""
        self.buckets.flush()
        self.state.buckets = self.buckets.sizes
        save_state(self._folder, self.state)

    def _take(self, passage: Passage, found: _Tokenized, strict: bool) -> None:
        if found.fault:
            if strict:
                raise BadDocuments(f"{found.fault}, or leave out --strict")
            self.state.skipped += 1
            if len(self.state.named) < MAX_NAMED:
                self.state.named.append(found.fault)
            return
        identity = self._identities.of(found.digest, passage.number)
        if found.tokens:  # some tokenizers leave nothing of some texts
            self.buckets.add(identity, found.tokens)

    def _ahead(self, workers: int) -> Iterator[tuple[list[_Item], list[_Tokenized]]]:
        """Yield batches in order, with what became of them; threads work ahead on some."""
        waiting = collections.deque[tuple[list[_Item], Future[list[_Tokenized]]]]()
        pool = ThreadPoolExecutor(workers, "tokenize")
        try:
            for batch in self._batches():
                waiting.append((batch, pool.submit(partial(self._tokenized, batch))))
                if len(waiting) > 2 * workers:
                    first, made = waiting.popleft()
                    yield first, made.result()
            while waiting:
                first, made = waiting.popleft()
                yield first, made.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _tokenized(self, batch: list[_Item]) -> list[_Tokenized]:
        encoded = self._tokenizer.encode_batch([item.passage.raw.decode() for item in batch])
        return [self._of(item, ids) for item, ids in zip(batch, encoded, strict=True)]

    def _of(self, item: _Item, ids: TokenIds) -> _Tokenized:
        if item.passage.fault:
            return _Tokenized(b"", b"", item.passage.fault)
        digest = document_hash(item.passage.raw)
        if (ids == self._tokenizer.end_of_text).any():
            path = self._files[item.files].path
            why = f"a text in {path} has the token that ends documents"
            return _Tokenized(digest, b"", f"{why}; name another with --end-of-text")
        return _Tokenized(digest, np.ascontiguousarray(ids, dtype=self._kind).tobytes())

    def _batches(self) -> Iterator[list[_Item]]:
        batch, size = list[_Item](), 0
        for item in self._items():
            if batch and (
                size + len(item.passage.raw) > BATCH_BYTES or len(batch) >= BATCH_PASSAGES
            ):
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += len(item.passage.raw)
        if batch:
            yield batch

    def _items(self) -> Iterator[_Item]:
        """Yield what was not taken yet."""
        done_bytes = sum(file.size for file in self._files[: self.state.files])
        known, first = self.state.passages, self.state.files
        for place in range(first, len(self._files)):
            file = self._files[place]
            for number, passage in enumerate(read_documents(file, self._field), 1):
                if number > known:
                    yield _Item(passage, place, number, done_bytes + passage.read_bytes)
                elif passage.number == 0 and not passage.fault:
                    self._identities.of(document_hash(passage.raw), 0)
            known, done_bytes = 0, done_bytes + file.size


def save_state(folder: Path, state: SortingState) -> None:
    """Write the state in place of the one before."""
    write_durably(folder / STATE, msgspec.json.encode(state))


def read_state(folder: Path) -> SortingState | None:
    """Return the state of an earlier process, or None if there is none that can be read."""
    try:
        return msgspec.json.decode((folder / STATE).read_bytes(), type=SortingState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
