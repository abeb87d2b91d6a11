"""`farflock data prepare`: from sources to a folder of prepared data.

    find files -> read and tokenize -> buckets -> shards -> pages -> index

The folder is made beside its place, as NAME.partial, and gets its name when everything in it is on
the disk. What was broken off goes on where it stopped, if neither the sources nor the options have
changed. Equal sources and options give an equal root, however often that happened. The sizes of
files count, since the number of buckets is guessed from them: a packed copy gives another order.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from farflock.node.data.conversations import require_conversations
from farflock.node.data.documents import ReadingOptions
from farflock.node.data.index import (
    INDEX_NAME,
    MAX_HELD_OUT,
    MAX_PAGES,
    MAX_SHARD_BYTES,
    PIECE_BYTES,
    SHARD_BYTES,
    SHARDS_PER_PAGE,
    TOKENIZER_NAME,
    BadIndex,
    DataIndex,
    DataSource,
    TokenizerFile,
    listed,
    read_index,
    root_of,
    token_bytes,
)
from farflock.node.data.shard_writer import ShardWriter, write_pages, write_synced
from farflock.node.data.shuffle import Buckets
from farflock.node.data.sorting import (
    UNFINISHED_STATE,
    Sorting,
    SortingOptions,
    SortingState,
    SourceCounts,
    guessed_tokens,
    held_out_bucket,
    save_state,
    state_path,
)
from farflock.node.data.sources import FoundFiles, SourceFile, find_files
from farflock.node.errors import Failure, Usage
from farflock.node.state.paths import sync
from farflock.node.tokens.chat import chat_format
from farflock.node.tokens.marks import MAX_MARKED_VOCABULARY
from farflock.node.tokens.tokenizer import ByteTokenizer, TokenIds, Tokenizer

VERSION = 1  # of what is made of equal sources and options
HELD_OUT = 0.005  # of the documents, if nothing else is said
MIN_SHARD_BYTES = 4096
MIN_HELD_OUT_TOKENS, OF_TOKENS = 256, 10_000  # of a source, or as large a share of a smaller one
_SORTING_SHARE = 0.9  # of the work, for the progress
_ORIGIN = "prepared-from.json"  # in a finished folder; not a part of the data
_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)

_Say = Callable[[str], None]
_Progress = Callable[[float], None]


class PreparedData(msgspec.Struct, frozen=True, kw_only=True):
    """A finished folder. `skipped` counts the documents of each source that could not be read; it
    is empty for a folder that was there already."""

    folder: Path
    root: str
    index: DataIndex
    skipped: dict[str, int]


class Preparation:
    """The making of one folder out of files."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        tokenizer: Tokenizer,
        options: SortingOptions,
        target: Path,
    ) -> None:
        _require_options(options, tokenizer)
        self.files, self.tokenizer, self.options = files, tokenizer, options
        self.target = target.expanduser().absolute()
        self.partial = self.target.with_name(self.target.name + _PARTIAL)
        self.definition: bytes | None = getattr(tokenizer, "raw", None)

    def run(
        self,
        *,
        threads: int,
        clock: Callable[[], float],
        progress: _Progress,
        say: _Say,
        force: bool = False,
    ) -> PreparedData:
        """Make the folder, or the rest of it, and return what it has; raise `Failure` or `Usage` if
        something is in the way, or the disk is full. `force` replaces other prepared data."""
        with _disk_full_explained(self.partial):
            if (there := self._finished_before(force)) is not None:
                say(f"{self.target} holds these data already")
                return there
            self.partial.mkdir(parents=True, exist_ok=True)
            with _locked(self.partial):
                sorting = self._resumed(force, say)
                if not sorting.state.finished:
                    sorting.run(
                        threads, clock, lambda share: progress(min(1.0, share) * _SORTING_SHARE)
                    )
                index = self._written(sorting, progress, say)
                return self._moved(index, sorting.state.counts)

    @property
    def fingerprint(self) -> str:
        """The hash of all that the result depends on, and of the paths and times of its sources."""
        definition = hashlib.sha256(self.definition or b"").hexdigest()
        given = (VERSION, self.options, self.files, self.tokenizer.end_of_text, definition)
        return hashlib.sha256(msgspec.json.encode(given)).hexdigest()

    @property
    def guessed_bytes(self) -> int:
        """Roughly the room that the work takes: that of the tokens twice."""
        reading = self.options.reading
        tokens = sum(guessed_tokens(file, self.tokenizer, reading) for file in self.files)
        return 2 * tokens * token_bytes(self.tokenizer.vocab_size, reading.has_marks)

    # what is there

    def _finished_before(self, force: bool) -> PreparedData | None:
        """Return the same data if they are there already; raise `Failure` for anything else."""
        if not os.path.lexists(self.target) or (
            self.target.is_dir() and not any(self.target.iterdir())
        ):
            return None
        try:
            with (self.target / INDEX_NAME).open("rb") as file:
                raw = file.read(PIECE_BYTES + 1)
            index = read_index(raw, str(self.target / INDEX_NAME))
        except (OSError, BadIndex):
            raise Failure(
                str(self.target), "it is there, and is not prepared data", "choose another name"
            ) from None
        origin = self.target / _ORIGIN
        if origin.is_file() and origin.read_bytes() == self._origin():
            return PreparedData(folder=self.target, root=root_of(raw), index=index, skipped={})
        if not force:
            raise Failure(
                str(self.target),
                "it holds data that were prepared from other sources or with other options",
                "choose another name, or replace them with --force",
            )
        return None

    def _resumed(self, force: bool, say: _Say) -> Sorting:
        """Return the first pass as far as an earlier attempt came, or at its beginning."""
        given = (self.partial, self.files, self.tokenizer, self.options)
        path = state_path(self.partial)
        if path.is_file():
            state = _read_state(path)
            try:
                if state is None or state.fingerprint != self.fingerprint:
                    _require_nothing_done(self.partial, state)
                else:
                    sorting = Sorting(*given, state)
                    say(f"going on with {self.partial}")
                    return sorting
            except Failure:
                if not force:
                    raise
            _empty(self.partial)
        elif any(each.name != UNFINISHED_STATE for each in self.partial.iterdir()):
            raise Failure(
                str(self.partial), "it is there, and was not begun by this command", "move it away"
            )
        self._tell_room(say)
        state = SortingState(fingerprint=self.fingerprint)
        save_state(self.partial, state)  # before anything else: this tells whose folder it is
        return Sorting(*given, state)

    def _tell_room(self, say: _Say) -> None:
        free = shutil.disk_usage(self.partial).free
        needed = self.guessed_bytes
        verdict = "" if needed < free else ", which may not be enough"
        say(f"needs about {_size(needed)} on the disk; {_size(free)} are free{verdict}")

    # the second pass

    def _written(self, sorting: Sorting, progress: _Progress, say: _Say) -> DataIndex:
        """Write everything of the folder; return its index."""
        counts = sorting.state.counts
        folder = self.partial / "done"
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()
        total, before = sum(each.tokens for each in counts.values()), 0
        sources = {}
        for name, each in counts.items():

            def tell(tokens: int, before: int = before) -> None:
                share = (before + tokens) / max(1, total)
                progress(_SORTING_SHARE + (1 - _SORTING_SHARE) * share)

            sources[name] = self._source(folder, name, each, sorting, tell, say)
            before += each.tokens
        vocabulary, has_marks = self.tokenizer.vocab_size, self.options.reading.has_marks
        index = DataIndex(
            vocabulary=vocabulary,
            token_bytes=token_bytes(vocabulary, has_marks),
            end_of_text=self.tokenizer.end_of_text,
            tokenizer=self._tokenizer_file(folder),
            answers=has_marks or msgspec.UNSET,
            sources=sources,
        )
        write_synced(folder / INDEX_NAME, index.encode())
        write_synced(folder / _ORIGIN, self._origin())
        for place in (folder / "shards", folder / "pages", folder):
            sync(place)
        return index

    def _source(
        self,
        folder: Path,
        name: str,
        counts: SourceCounts,
        sorting: Sorting,
        tell: Callable[[int], None],
        say: _Say,
    ) -> DataSource:
        counts, buckets, drawn = _divided(name, counts, sorting)
        train, held = self._writers(folder, sorting.dtype, counts)
        more = _held_out_more(counts, self.options)
        if counts.tokens - counts.held_out_tokens - more < 1:
            raise Failure(
                f"the source {name!r} has {counts.tokens} tokens",
                "there is nothing to train on",
                "name a source with more text",
            )
        for tokens in _in_order(sorting.buckets, drawn):
            held.add(tokens)
        done = counts.held_out_tokens
        rest = counts.tokens - counts.held_out_tokens - more
        for tokens, ends, is_held in _tail_cut(_in_order(sorting.buckets, buckets), rest, more):
            (held if is_held else train).add(tokens, ends)
            done += len(tokens)
            tell(done)
        train.finish()
        held.finish()
        if more:
            say(f"{name}: few documents were drawn to be held out, so the end of the others is too")
        if len(train.shards) > MAX_PAGES * SHARDS_PER_PAGE:
            raise Failure(name, "it has too many shards", "choose a larger --shard-bytes")
        return DataSource(
            documents=sum(shard.documents for shard in train.shards),
            tokens=sum(shard.tokens for shard in train.shards),
            pages=write_pages(folder, train.shards),
            held_out=tuple(held.shards),
        )

    def _writers(
        self, folder: Path, dtype: "np.dtype[np.unsignedinteger]", counts: SourceCounts
    ) -> tuple[ShardWriter, ShardWriter]:
        limit, width = self.options.shard_bytes, dtype.itemsize
        held = width * (counts.held_out_tokens + _held_out_more(counts, self.options))
        train = width * counts.tokens - held
        # Two shards beside each other have more than one may have: these are at most MAX_HELD_OUT.
        held_limit = min(max(limit, 3 * held // MAX_HELD_OUT), MAX_SHARD_BYTES)
        return (
            ShardWriter(folder, "train", dtype, limit, train),
            ShardWriter(folder, "held-out", dtype, held_limit, held),
        )

    def _tokenizer_file(self, folder: Path) -> TokenizerFile | None:
        if self.definition is None:
            return None
        path = folder / TOKENIZER_NAME
        write_synced(path, self.definition)
        entry = listed(path)
        return TokenizerFile(sha256=entry.sha256, size=entry.size, pieces=entry.pieces)

    def _origin(self) -> bytes:
        return msgspec.json.encode({"fingerprint": self.fingerprint})

    def _moved(self, index: DataIndex, counts: dict[str, SourceCounts]) -> PreparedData:
        """Give the folder its name, and remove what it was made of."""
        old = self.target.with_name(self.target.name + ".old")
        if self.target.is_dir():
            if old.exists():
                shutil.rmtree(old)
            self.target.rename(old)
        (self.partial / "done").rename(self.target)
        sync(self.target.parent)
        shutil.rmtree(self.partial)
        if old.exists():
            shutil.rmtree(old)
        return PreparedData(
            folder=self.target,
            root=root_of(index.encode()),
            index=index,
            skipped={name: each.skipped for name, each in counts.items()},
        )


def _held_out_more(counts: SourceCounts, options: SortingOptions) -> int:
    """Return how many tokens are to be held out besides those of the documents that were drawn."""
    if options.held_out == 0:
        return 0
    least = min(MIN_HELD_OUT_TOKENS, max(1, counts.tokens * MIN_HELD_OUT_TOKENS // OF_TOKENS))
    width = options.shard_bytes // 4
    wanted = max(least, min(int(counts.tokens * options.held_out), width))
    enough = counts.held_out_tokens >= max(least, wanted // 2)
    return 0 if enough else min(wanted - counts.held_out_tokens, counts.tokens // 2)


def _divided(
    name: str, counts: SourceCounts, sorting: Sorting
) -> tuple[SourceCounts, list[str], list[str]]:
    """Return a source's counts, the buckets to train on, and those that were drawn to be held out.
    If every document was drawn, it is as if none had been: their end is held out."""
    drawn = [held_out_bucket(name)]
    if counts.held_out_tokens < counts.tokens:
        return counts, sorting.names_of(name), drawn
    return msgspec.structs.replace(counts, held_out_tokens=0), drawn, []


def _in_order(buckets: Buckets, names: Iterable[str]) -> Iterator[TokenIds]:
    for name in names:
        yield from buckets.shuffled(name)


def _tail_cut(
    documents: Iterable[TokenIds], rest: int, more: int
) -> Iterator[tuple[TokenIds, bool, bool]]:
    """Yield documents, or their pieces: the tokens, whether they end there, and whether they are
    held out: about the last `more` tokens, after the first `rest`. A document at the border is held
    out whole unless that would be far too much."""
    start = 0
    for tokens in documents:
        room = rest - start
        if len(tokens) <= room:
            yield tokens, True, False
        elif room <= 0 or (start > 0 and len(tokens) <= 2 * more):
            yield tokens, True, True
        else:
            yield tokens[:room], False, False
            yield tokens[room:], True, True
        start += len(tokens)


def chat_preparation(
    named: Sequence[str],
    tokenizer: Tokenizer,
    template: str | None,
    target: Path,
    *,
    held_out: float = HELD_OUT,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    skip: bool = False,
) -> tuple[FoundFiles, Preparation]:
    """Return the files of conversations that sources name, and the making of a folder out of them;
    `skip` leaves out what cannot be read. Raise `Usage` if there are none, for files of other
    kinds, and for a template with bytes."""
    found = find_files(named, text_endings=())
    require_conversations(found.files)
    if template is not None and isinstance(tokenizer, ByteTokenizer):
        raise Usage(
            "--chat-template",
            "the tokens are bytes, which have no turns of a chat",
            "name a tokenizer with --tokenizer",
        )
    reading = ReadingOptions(
        skip=skip,
        vocabulary=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        chat=chat_format(tokenizer, template),
    )
    options = SortingOptions(seed=seed, held_out=held_out, shard_bytes=shard_bytes, reading=reading)
    return found, Preparation(found.files, tokenizer, options, target)


def _require_options(options: SortingOptions, tokenizer: Tokenizer) -> None:
    if options.reading.has_marks and tokenizer.vocab_size > MAX_MARKED_VOCABULARY:
        raise Usage(
            "--tokenizer",
            f"it has {tokenizer.vocab_size:,} tokens, which leave no bit to mark a prompt with",
            f"use one of at most {MAX_MARKED_VOCABULARY:,}",
        )
    if not 0 <= options.held_out <= 0.5:
        raise Usage("--held-out", f"{options.held_out} is no share to hold out", "use 0 to 0.5")
    if not MIN_SHARD_BYTES <= options.shard_bytes <= MAX_SHARD_BYTES:
        raise Usage(
            "--shard-bytes",
            f"{options.shard_bytes:,} is out of range",
            f"use {MIN_SHARD_BYTES:,} to {MAX_SHARD_BYTES:,}",
        )
    if not all(options.reading.field.split(".")):
        raise Usage("--field", f"{options.reading.field!r} has an empty name", "use a.b for nested")


def _require_nothing_done(partial: Path, state: SortingState | None) -> None:
    """Raise `Failure` if an attempt that cannot be taken up again has come far enough to ask."""
    if state is None or state.files or state.parts:
        raise Failure(
            str(partial),
            "it was begun with other options, or its sources have changed since",
            "give the same options, or start over with --force",
        )


def _empty(folder: Path) -> None:
    for path in list(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _read_state(path: Path) -> SortingState | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=SortingState)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


@contextlib.contextmanager
def _disk_full_explained(partial: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise Failure(
            f"the disk of {partial} is full",
            "what was done so far stays there",
            "free some space, and the same command goes on where it stopped",
        ) from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second process from working in the folder, where the system can."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Failure(
            str(folder), "another process is at work there", "wait for it, or stop it"
        ) from None
    finally:
        os.close(place)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
