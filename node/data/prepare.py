"""`farflock data prepare`: from files to a folder of prepared data, or to one more increment of it.

    find files -> read and tokenize -> buckets -> shards -> pages -> index

The work is done beside the folder's place, in NAME.partial, and moved when everything is on the
disk. What was broken off goes on where it stopped, if neither the files nor the options have
changed. The root depends on the texts, the tokenizer and the options alone: not on the files' names
or order, the machine, its number of cores, or how often the work was broken off.
"""

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from farflock.node.data.folder import PreparedFolder
from farflock.node.data.index import (
    INDEX_NAME,
    MAX_INCREMENTS,
    PATHS_NAME,
    SPLITS,
    TOKENIZER_NAME,
    DataIndex,
    Increment,
    TokenizerFile,
    token_type,
)
from farflock.node.data.merging import Merging, SeenFile, Writers
from farflock.node.data.shard_writer import ShardWriter, label_of
from farflock.node.data.sorting import STATE, Sorting, SortingState, read_state, save_state
from farflock.node.data.sources import SourceFile
from farflock.node.data.tables import require_reader
from farflock.node.durable import NoLocks, locked, sync_folder, write_durably
from farflock.node.errors import Failure, Usage
from farflock.node.tokens.json_tokenizer import JsonTokenizer, chunk_names
from farflock.node.tokens.tokenizer import Tokenizer

VERSION = 1  # of what is made of equal texts and options
HELD_OUT = 0.005  # of the documents, if nothing else is said
SORTING_SHARE = 0.9  # of the work, for the progress
PARTIAL = ".partial"
_ORIGINS = "prepared-from.json"  # in a finished folder; not a part of the data
_FOLDERS = ("tokens", "pages", "seen")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_BYTES_PER_TOKEN = 4  # of text, roughly, for a tokenizer that is not bytes

Say = Callable[[str], None]


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that the result depends on: the field of JSON lines with the text, the share of
    documents that is held out, and whether equal documents stay. `strict` refuses what cannot be
    read, which is counted otherwise."""

    field: str = "text"
    held_out: float = HELD_OUT
    keep_duplicates: bool = False
    strict: bool = False


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A finished folder, what of the sources could not be read, in number and the first ones in
    words, and how many documents were dropped because there is an equal one."""

    content: PreparedFolder
    skipped: int = 0
    named: tuple[str, ...] = ()
    duplicates: int = 0


class Preparation:
    """The making of a folder out of files, or with `adds` of another increment of it."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        tokenizer: Tokenizer,
        options: PrepareOptions,
        target: Path,
        adds: bool = False,
    ) -> None:
        self.files, self.tokenizer, self.options, self.adds = files, tokenizer, options, adds
        self.target = target.expanduser().absolute()
        self.partial = self.target.with_name(self.target.name + PARTIAL)
        end = tokenizer.end_of_text
        if end is None:
            raise Usage(
                "--tokenizer",
                "nothing says which of its tokens ends a document",
                "name the token with --end-of-text",
            )
        self.end_of_text = end
        _require_options(options)
        if rows := next((file.path for file in files if file.kind == "rows"), None):
            require_reader(rows)

    def run(
        self, *, cores: int, clock: Callable[[], float], progress: Callable[[float], None], say: Say
    ) -> Prepared:
        """Make the folder, or the rest of it, and return what it has; raise `Failure` or `Usage` if
        something is in the way, or the disk is full."""
        with _disk_full_explained(self.partial):
            before = self._before()
            if before is not None and self.fingerprint in _origins(before):
                shutil.rmtree(self.partial, ignore_errors=True)  # of a process that ended just then
                say(f"{self.target} holds these data already")
                return Prepared(content=before)
            self.partial.mkdir(parents=True, exist_ok=True)
            with _alone(self.partial):
                sorting = self._sorting(say)
                if not sorting.state.finished:
                    total = max(1, sorting.total_bytes)
                    sorting.run(
                        cores,
                        clock,
                        lambda done: progress(min(1.0, done / total) * SORTING_SHARE),
                        self.options.strict,
                    )
                increment, duplicates = self._merged(sorting, before, progress)
                state = sorting.state
                if increment.train.shards or (before and increment.held_out.shards):
                    self._moved(increment, before)
                else:
                    shutil.rmtree(self.partial)
                    self._require_something(before, state)
                    say("nothing in these files is new")
        return Prepared(
            content=PreparedFolder(self.target),
            skipped=state.skipped,
            named=tuple(state.named),
            duplicates=duplicates,
        )

    @property
    def fingerprint(self) -> str:
        """The hash of all that the result depends on, and of the paths and times of its files."""
        definition = self.tokenizer.hash if isinstance(self.tokenizer, JsonTokenizer) else ""
        given = (VERSION, self.options, list(self.files), self.end_of_text, definition)
        return hashlib.sha256(msgspec.json.encode(given)).hexdigest()

    @property
    def guessed_bytes(self) -> int:
        """Roughly the room that the work takes: that of the tokens twice."""
        tokens = sum(file.size for file in self.files)
        if isinstance(self.tokenizer, JsonTokenizer):
            tokens //= _BYTES_PER_TOKEN
        return 2 * tokens * token_type(self.tokenizer.vocab_size).itemsize

    def _before(self) -> PreparedFolder | None:
        """Return the data that are there already, if that may be; raise `Failure` if not."""
        there = self.target.exists() and (not self.target.is_dir() or any(self.target.iterdir()))
        if not there:
            if self.adds:
                raise Failure(str(self.target), "there is nothing to add to", "leave out --add")
            return None
        before = PreparedFolder(self.target)
        if not self.adds and self.fingerprint not in _origins(before):
            raise Failure(
                str(self.target),
                "it holds other prepared data",
                "choose another name, or add to them with --add",
            )
        if (self.target / PATHS_NAME).exists():
            why = "its shards lie in files that others have made"
            raise Failure(str(self.target), why, "prepare the texts into a folder of their own")
        self._require_alike(before.index)
        return before

    def _require_alike(self, index: DataIndex) -> None:
        name = index.tokenizer and index.tokenizer.hash
        ours = self.tokenizer.hash if isinstance(self.tokenizer, JsonTokenizer) else None
        if (name, index.end_of_text) != (ours, self.end_of_text):
            why = "the data there have another tokenizer, or another end of text"
            raise Usage("--tokenizer", why, f"name {self.target / TOKENIZER_NAME}, or bytes")
        if index.held_out != self.options.held_out:
            why = f"{index.held_out} of the data there is held out"
            raise Usage("--held-out", why, f"use {index.held_out}")
        if len(index.increments) >= MAX_INCREMENTS:
            why = f"it has {MAX_INCREMENTS} parts already"
            raise Failure(str(self.target), why, "prepare all sources together, under another name")

    def _sorting(self, say: Say) -> Sorting:
        """Return the first pass as far as an earlier attempt came, or at its beginning."""
        state = read_state(self.partial)
        others = [each for each in self.partial.iterdir() if not each.name.startswith(STATE)]
        if state is None and others:
            why = "it is there, and was not begun by this command"
            raise Failure(str(self.partial), why, "move it away")
        if state is not None and state.fingerprint != self.fingerprint:
            why = "it was begun with other options, or its sources have changed since"
            raise Failure(str(self.partial), why, "give the same options, or remove it")
        if state is None:
            self._tell_room(say)
            state = SortingState(fingerprint=self.fingerprint)
            save_state(self.partial, state)  # before anything else: this tells whose folder it is
        else:
            say(f"going on with {self.partial}")
        return Sorting(self.partial, self.files, self.tokenizer, self.options.field, state)

    def _tell_room(self, say: Say) -> None:
        free, needed = shutil.disk_usage(self.partial).free, self.guessed_bytes
        verdict = "" if needed < free else ", which may not be enough"
        say(
            f"needs about {_size(needed)} on the disk, twice what the data take; {_size(free)} are"
            f" free{verdict}"
        )

    def _merged(
        self, sorting: Sorting, before: PreparedFolder | None, progress: Callable[[float], None]
    ) -> tuple[Increment, int]:
        """Write the increment's files; return it, and how many documents were dropped."""
        done = self.partial / "done"
        if done.exists():
            shutil.rmtree(done)
        for name in _FOLDERS:
            (done / name).mkdir(parents=True)
        number = 0 if before is None else len(before.index.increments)
        kind = token_type(self.tokenizer.vocab_size)
        labels = [label_of(number, split) for split in SPLITS]
        writers = Writers(*(ShardWriter(done, each, kind, self.end_of_text) for each in labels))
        seen = [SeenFile(self.target / "seen" / f"{increment:03}") for increment in range(number)]
        merging = Merging(sorting.buckets, self.options.held_out, self.options.keep_duplicates)
        with (done / "seen" / f"{number:03}").open("wb") as new:
            duplicates = merging.run(
                writers,
                seen,
                new,
                lambda share: progress(SORTING_SHARE + share * (1 - SORTING_SHARE)),
            )
        increment = Increment(train=writers.train.finish(), held_out=writers.held_out.finish())
        return increment, duplicates

    def _require_something(self, before: PreparedFolder | None, state: SortingState) -> None:
        if before is None:
            why = f"of {len(self.files):,} files no document is left"
            unread = f", and {state.named[0]}" if state.named else ""
            raise Failure("there is nothing to train on", f"{why}{unread}", "name more text")

    def _moved(self, increment: Increment, before: PreparedFolder | None) -> None:
        """Move the increment into the folder, and put the index that names it there last."""
        done = self.partial / "done"
        increments = () if before is None else before.index.increments
        index = DataIndex(
            vocabulary=self.tokenizer.vocab_size,
            end_of_text=self.end_of_text,
            held_out=self.options.held_out,
            tokenizer=self._tokenizer_file(done),
            increments=(*increments, increment),
        )
        origins = [*(_origins(before) if before else ()), self.fingerprint]
        write_durably(done / _ORIGINS, msgspec.json.encode(origins))
        write_durably(done / INDEX_NAME, index.encode())
        for name in (*_FOLDERS, "."):
            sync_folder(done / name)
        if before is None:
            os.replace(done, self.target)
        else:
            self._mixed_in(done)
        sync_folder(self.target.parent)
        shutil.rmtree(self.partial)

    def _mixed_in(self, done: Path) -> None:
        """Move the files of a further increment to those of the others; until the index is there,
        what the folder holds is what it held before."""
        files = [each for each in sorted(done.rglob("*")) if each.is_file()]
        for path in (each for each in files if each.name != INDEX_NAME):
            os.replace(path, self.target / path.relative_to(done))
        for name in (*_FOLDERS, "."):
            sync_folder(self.target / name)
        os.replace(done / INDEX_NAME, self.target / INDEX_NAME)
        sync_folder(self.target)

    def _tokenizer_file(self, done: Path) -> TokenizerFile | None:
        if not isinstance(self.tokenizer, JsonTokenizer):
            return None
        raw = self.tokenizer.raw
        write_durably(done / TOKENIZER_NAME, raw)
        return TokenizerFile(hash=self.tokenizer.hash, bytes=len(raw), chunks=chunk_names(raw))


def _require_options(options: PrepareOptions) -> None:
    if not 0 <= options.held_out <= 0.5:
        raise Usage("--held-out", f"{options.held_out} is no share to hold out", "use 0 to 0.5")
    if not all(options.field.split(".")):
        raise Usage("--field", f"{options.field!r} has an empty name", "use a.b for nested names")


def _origins(content: PreparedFolder) -> list[str]:
    """Return the fingerprints of the increments of a folder."""
    try:
        found = msgspec.json.decode((content.folder / _ORIGINS).read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return []
    return found[
        : len(content.index.increments)
    ]  # one more may be of an addition that was broken off


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
def _alone(folder: Path) -> Iterator[None]:
    """Keep a second process from working in the folder."""
    try:
        with locked(folder):
            yield
    except BlockingIOError:
        why = "another process is at work there"
        raise Failure(str(folder), why, "wait for it, or stop it") from None
    except NoLocks as error:
        remedy = "choose a folder on a disk of this machine"
        raise Failure(str(folder), str(error.strerror), remedy) from None


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
