"""The first pass of preparing: read the sources, tokenize them, and sort documents into buckets.

The pass can be broken off anywhere and taken up again: its state, saved every few seconds, says how
many parts of documents were read, and how long each bucket was.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from farflock.node.data.conversations import ConversationTokenizer
from farflock.node.data.documents import BadDocuments, Part, ReadingOptions, read_documents
from farflock.node.data.index import token_bytes
from farflock.node.data.shuffle import BUFFERED_BYTES, Buckets, DocumentDraws, joined
from farflock.node.data.sources import SourceFile
from farflock.node.tokens.chat import ChatFormat, Turns
from farflock.node.tokens.tokenizer import TokenIds, Tokenizer, token_array

STATE, UNFINISHED_STATE = "state.json", "state.unfinished"
SAVE_EVERY_S = 10.0
MAX_BUCKETS = 1 << 14  # of one source
UNKNOWN_BUCKETS = 64  # of a source whose size is not known
THREAD_CHARS, BATCH_CHARS = 1 << 18, 1 << 22  # of text, tokenized at once by a thread and by all
BATCH_PARTS = 4096
AHEAD = 2  # batches that are being tokenized while others are read and written
_TEXT_BYTES_PER_TOKEN = 4  # roughly, of a tokenizer that is not bytes
_CAP_SHARE = 0.9  # of the held-out shard, which should hardly ever become full


class SourceCounts(msgspec.Struct, kw_only=True):
    """The documents that were read of a source so far. `held_out` is the choice for the document
    that is being read, None between documents."""

    numbers: int = 0  # documents
    tokens: int = 0
    held_out_tokens: int = 0
    skipped: int = 0
    held_out: bool | None = None


class SortingState(msgspec.Struct, kw_only=True):
    """The place that the pass has reached: files read to their end, parts read of the next, and the
    bytes of the buckets' files. `fingerprint` stands for all that the result depends on."""

    fingerprint: str
    files: int = 0
    parts: int = 0
    finished: bool = False
    counts: dict[str, SourceCounts] = msgspec.field(default_factory=dict)
    buckets: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class SortingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the result depends on. `held_out` is a share of
    the documents."""

    seed: int
    held_out: float
    shard_bytes: int
    reading: ReadingOptions


class SourcePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The way in which the documents of a source are dealt out: over so many buckets, and held out
    where a draw of 64 bits is below `held_below`, until `held_out_cap` tokens are."""

    buckets: int
    held_below: int
    held_out_cap: int

    @classmethod
    def of(
        cls, files: Sequence[SourceFile], tokenizer: Tokenizer, options: SortingOptions
    ) -> "SourcePlan":
        """Plan for the files of one source, by their sizes."""
        width = token_bytes(tokenizer.vocab_size, options.reading.has_marks)
        size = width * sum(guessed_tokens(file, tokenizer, options.reading) for file in files)
        unknown = any(file.size == 0 and file.kind == "hub" for file in files)
        share = min(options.held_out, _CAP_SHARE * options.shard_bytes / max(size, 1))
        return cls(
            buckets=max(
                min(-(-size // options.shard_bytes), MAX_BUCKETS), UNKNOWN_BUCKETS if unknown else 1
            ),
            held_below=int(share * 2**64),
            held_out_cap=options.shard_bytes // width,
        )


def guessed_tokens(file: SourceFile, tokenizer: Tokenizer, reading: ReadingOptions) -> int:
    """Return roughly how many tokens a file has."""
    if file.kind == "tokens":
        return file.size // reading.token_bytes
    return file.text_bytes // (1 if tokenizer.vocab_size <= 256 else _TEXT_BYTES_PER_TOKEN)


class _Batch(msgspec.Struct):
    """Parts of one source that are tokenized together, and how far the pass is after them."""

    source: str
    parts: list[Part]
    files: int
    file_parts: int
    read_bytes: int


class Sorting:
    """The pass over all files, from where `state` says to the end.

    Raise `Failure` if a bucket of that state is damaged."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[SourceFile],
        tokenizer: Tokenizer,
        options: SortingOptions,
        state: SortingState,
    ) -> None:
        self._folder, self._files, self._tokenizer = folder, files, tokenizer
        self._reading, self.state = options.reading, state
        width = token_bytes(tokenizer.vocab_size, self._reading.has_marks)
        self.dtype: np.dtype[np.unsignedinteger] = np.dtype(f"<u{width}")
        self.buckets = Buckets(folder / "buckets", self.dtype)
        self.buckets.restore(state.buckets)
        self._end = token_array([tokenizer.end_of_text], tokenizer.vocab_size)
        self._conversations = None
        if isinstance(self._reading.chat, ChatFormat):
            self._conversations = ConversationTokenizer(tokenizer, self._reading.chat)
        names = list(dict.fromkeys(file.source for file in files))
        self._plans = {
            name: SourcePlan.of([each for each in files if each.source == name], tokenizer, options)
            for name in names
        }
        self._draws = {name: DocumentDraws(options.seed, name) for name in names}
        for name in names:
            state.counts.setdefault(name, SourceCounts())

    def names_of(self, source: str) -> list[str]:
        """Return the buckets of a source, whether there is anything in them or not."""
        return [f"{source}.{place:05}" for place in range(self._plans[source].buckets)]

    def run(
        self, threads: int, clock: Callable[[], float], progress: Callable[[float], None]
    ) -> None:
        """Read to the end; `progress` takes the share that was read."""
        total = max(1, sum(file.size for file in self._files))
        saved_s = clock()
        for batch, tokens in _ahead(self._batches(threads), self._tokenized):
            for part, ids in zip(batch.parts, tokens, strict=True):
                self._take(batch.source, part, ids)
            self.state.files, self.state.parts = batch.files, batch.file_parts
            if self.buckets.buffered_bytes > BUFFERED_BYTES or clock() - saved_s > SAVE_EVERY_S:
                self._save()
                saved_s = clock()
            progress(batch.read_bytes / total)
        self.state.files, self.state.parts, self.state.finished = len(self._files), 0, True
        self._save()

    def _save(self) -> None:
        self.buckets.flush()
        self.state.buckets = dict(self.buckets.sizes)
        save_state(self._folder, self.state)

    def _take(self, source: str, part: Part, tokens: TokenIds | None) -> None:
        """Put a part of a document into the document's bucket."""
        counts = self.state.counts[source]
        held_below, bucket, order = self._draws[source].of(counts.numbers)
        first = counts.held_out is None
        if counts.held_out is None:
            counts.held_out = self._is_held_out(source, part, held_below)
        if tokens is None:
            counts.skipped += 1
        elif len(tokens) or not (first and part.last):
            name = f"{source}.{bucket % self._plans[source].buckets:05}"
            name = held_out_bucket(source) if counts.held_out else name
            tokens = joined([tokens, self._end]) if part.last else tokens
            self.buckets.add(name, order, tokens)
            counts.tokens += len(tokens)
            counts.held_out_tokens += len(tokens) if counts.held_out else 0
        if part.last:
            counts.numbers += 1
            counts.held_out = None

    def _is_held_out(self, source: str, part: Part, draw: int) -> bool:
        if part.held_out is not None:
            return part.held_out
        plan, counts = self._plans[source], self.state.counts[source]
        return draw < plan.held_below and counts.held_out_tokens < plan.held_out_cap

    def _tokenized(self, batch: _Batch) -> list[TokenIds | None]:
        contents = [part.content for part in batch.parts]
        texts = [each for each in contents if isinstance(each, str)]
        turns = [each for each in contents if isinstance(each, Turns)]
        encoded: dict[type, Iterator[TokenIds]] = {str: iter(self._tokenizer.encode_batch(texts))}
        if self._conversations is not None:
            encoded[Turns] = iter(self._conversations.encode_batch(turns))
        return [
            next(encoded[type(each)]) if isinstance(each, str | Turns) else each
            for each in contents
        ]

    def _batches(self, threads: int) -> Iterator[_Batch]:
        """Yield what is still to be read. No batch has parts of two sources."""
        limit = min(threads * THREAD_CHARS, BATCH_CHARS)
        batch, chars = None, 0
        for source, part, files, file_parts, read_bytes in self._parts():
            size = 0 if part.content is None else len(part.content)
            if batch is not None and (
                batch.source != source or chars + size > limit or len(batch.parts) >= BATCH_PARTS
            ):
                yield batch
                batch = None
            if batch is None:
                batch, chars = _Batch(source, [], 0, 0, 0), 0
            batch.parts.append(part)
            batch.files, batch.file_parts, batch.read_bytes = files, file_parts, read_bytes
            chars += size
        if batch is not None:
            yield batch

    def _parts(self) -> Iterator[tuple[str, Part, int, int, int]]:
        """Yield each part that was not taken yet: its source, the part itself, the files and the
        parts of the next file that are done after it, and the bytes that are read."""
        done_bytes = sum(file.size for file in self._files[: self.state.files])
        known = self.state.parts
        for place in range(self.state.files, len(self._files)):
            file = self._files[place]
            for number, part in enumerate(read_documents(file, self._reading), 1):
                if number > known:
                    yield file.source, part, place, number, done_bytes + part.read_bytes
            _require_unchanged(file)
            known, done_bytes = 0, done_bytes + file.size


def _require_unchanged(file: SourceFile) -> None:
    """Raise `BadDocuments` if a file was written while it was read."""
    if file.changed_ns:
        found = os.stat(file.path)
        if (found.st_size, found.st_mtime_ns) != (file.size, file.changed_ns):
            raise BadDocuments(
                f"{file.path} was changed while it was read; wait until nobody writes it, and start"
                " over with --force"
            )


def held_out_bucket(source: str) -> str:
    """Return the name of the bucket with the documents of a source that are held out."""
    return f"{source}.held-out"


def state_path(folder: Path) -> Path:
    """Return where the state of a preparation is."""
    return folder / STATE


def save_state(folder: Path, state: SortingState) -> None:
    """Write the state so that there is always a whole one."""
    unfinished = folder / UNFINISHED_STATE
    unfinished.write_bytes(msgspec.json.encode(state))
    os.replace(unfinished, state_path(folder))


def _ahead(
    batches: Iterator[_Batch], work: Callable[[_Batch], list[TokenIds | None]]
) -> Iterator[tuple[_Batch, list[TokenIds | None]]]:
    """Yield each batch with what `work` makes of it, in order; a thread works ahead on a few."""
    waiting = list[tuple[_Batch, Future[list[TokenIds | None]]]]()
    pool = ThreadPoolExecutor(1, "tokenize")
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(work, batch)))
            if len(waiting) > AHEAD:
                first, result = waiting.pop(0)
                yield first, result.result()
        for batch, result in waiting:
            yield batch, result.result()
    finally:
        pool.shutdown(cancel_futures=True)
