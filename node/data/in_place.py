"""Files of tokens that others have made, as shards where they lie: nothing is copied.

nanoGPT's train.bin (data/openwebtext/prepare.py there) and datatrove's .ds (pipeline/tokens) have
nothing but tokens; those of llm.c and modded-nanogpt have a header of 1,024 bytes in front. Tokens
are as wide as in any prepared data, 16 bits for a vocabulary up to 65,536. A shard is as many whole
documents as fit into it, in the order of the file.

The folder that is made has no tokens of its own:

    in-place.json        the paths of the files
    places/PPP-SPLIT     for each shard its file (its number in the list) and its first byte there
                         (little-endian, 32 and 64 bits)

Neither belongs to the data: the root is that of the shards, wherever they lie.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farflock.node.data.index import (
    INDEX_NAME,
    MAX_SHARD_BYTES,
    PATHS_NAME,
    PLACE,
    PLACES_NAME,
    SPLITS,
    TOKENIZER_NAME,
    DataIndex,
    Increment,
    TokenizerFile,
    token_type,
)
from farflock.node.data.shard_writer import entry_of, label_of, write_pages
from farflock.node.durable import sync_folder, write_durably
from farflock.node.errors import Failure, Usage
from farflock.node.tokens.json_tokenizer import JsonTokenizer, chunk_names

HELD_OUT = 0.005  # of the shards, where no file is held out
_HEADER_BYTES = 1024
_HEADER_MAGIC = (20240520, 20240801)  # the first of 256 integers (llm.c, dev/data/data_common.py)


class LeftOut(NamedTuple):
    """Tokens that are in no shard: documents that are longer than one, and what follows the last
    end of text of each file."""

    documents: int = 0
    tokens: int = 0


class _Shard(NamedTuple):
    entry: bytes
    file: int
    offset: int


class InPlace:
    """The making of a folder for files of tokens. `held_out` are those that are not trained on;
    without any, a share of the shards is, by their hashes."""

    def __init__(
        self, files: Sequence[Path], held_out: Sequence[Path], tokenizer: JsonTokenizer
    ) -> None:
        end = tokenizer.end_of_text
        if end is None:
            why = "nothing says which of its tokens ends a document"
            raise Usage("--tokenizer", why, "name the token with --end-of-text")
        self._files = [path.expanduser().absolute() for path in (*files, *held_out)]
        self._trained, self._tokenizer, self._end = len(files), tokenizer, end
        self._kind = token_type(tokenizer.vocab_size)
        self._left = LeftOut()

    def make(self, target: Path, progress: Callable[[float], None]) -> LeftOut:
        """Make the folder; raise `Usage` for a file that has other tokens than the tokenizer's, and
        `Failure` if the folder is there."""
        target = target.expanduser().absolute()
        if target.exists():
            raise Failure(str(target), "it is there already", "choose another name")
        splits = self._split(self._shards(progress))
        partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
        try:
            self._write(partial, splits)
            os.replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        sync_folder(target.parent)
        return self._left

    def _shards(self, progress: Callable[[float], None]) -> list[list[_Shard]]:
        """Return the shards of each file."""
        total, before, found = sum(map(_size, self._files)), 0, list[list[_Shard]]()
        for number, path in enumerate(self._files):
            shards = list[_Shard]()
            for shard in self._cut(number, path):
                shards.append(shard)
                progress((before + shard.offset) / total)
            found.append(shards)
            before += _size(path)
        return found

    def _split(self, found: list[list[_Shard]]) -> tuple[list[_Shard], list[_Shard]]:
        trained = [shard for shards in found[: self._trained] for shard in shards]
        held_out = [shard for shards in found[self._trained :] for shard in shards]
        if len(found) == self._trained and len(trained) > 1:
            some = math.ceil(len(trained) * HELD_OUT)
            held_out = sorted(trained, key=lambda shard: shard.entry)[:some]
            trained = sorted(set(trained).difference(held_out), key=_in_order)
        if not trained:
            why = f"it has no token {self._end}, which ends documents"
            raise Usage(str(self._files[0]), why, "name that token with --end-of-text")
        return trained, held_out

    def _cut(self, number: int, path: Path) -> Iterator[_Shard]:
        """Yield the shards of a file."""
        width = self._kind.itemsize
        with path.open("rb") as file:
            start, size = _first(file.read(4)), _size(path)
            if (size - start) % width:
                why = f"it has {size - start:,} bytes, no whole number of tokens of {width}"
                raise Usage(str(path), why, "name the tokenizer that made it")
            while start < size:
                raw = os.pread(file.fileno(), MAX_SHARD_BYTES // width * width, start)
                tokens = self._checked(path, raw)
                ends = np.flatnonzero(tokens == self._end)
                if len(ends):
                    raw = raw[: (int(ends[-1]) + 1) * width]
                    yield _Shard(entry_of(raw, width, len(ends)), number, start)
                    start += len(raw)
                else:
                    start = self._passed(path, file.fileno(), start)

    def _passed(self, path: Path, file: int, start: int) -> int:
        """Return the place after a document that fits into no shard, or has no end."""
        width, place = self._kind.itemsize, start
        while raw := os.pread(file, MAX_SHARD_BYTES // width * width, place):
            ends = np.flatnonzero(self._checked(path, raw) == self._end)
            if len(ends):
                self._left = self._left._replace(documents=self._left.documents + 1)
                return place + (int(ends[0]) + 1) * width
            place += len(raw)
        self._left = self._left._replace(tokens=self._left.tokens + (place - start) // width)
        return place

    def _checked(self, path: Path, raw: bytes) -> NDArray[np.unsignedinteger]:
        tokens = np.frombuffer(raw, dtype=self._kind)
        if len(tokens) and (highest := int(tokens.max())) >= self._tokenizer.vocab_size:
            why = f"it has the token {highest:,}, and the tokenizer {self._tokenizer.vocab_size:,}"
            raise Usage(str(path), why, "name the tokenizer that made it")
        return tokens

    def _write(self, folder: Path, splits: tuple[list[_Shard], list[_Shard]]) -> None:
        (folder / PLACES_NAME).mkdir(parents=True)
        lists = []
        for split, shards in zip(SPLITS, splits, strict=True):
            lists.append(write_pages(folder, b"".join(shard.entry for shard in shards)))
            places = np.array([(shard.file, shard.offset) for shard in shards], dtype=PLACE)
            write_durably(folder / PLACES_NAME / label_of(0, split), places.tobytes())
        raw = self._tokenizer.raw
        write_durably(folder / TOKENIZER_NAME, raw)
        write_durably(folder / PATHS_NAME, msgspec.json.encode(list(map(str, self._files))))
        index = DataIndex(
            vocabulary=self._tokenizer.vocab_size,
            end_of_text=self._end,
            held_out=HELD_OUT if self._trained == len(self._files) else 0.0,
            tokenizer=TokenizerFile(
                hash=self._tokenizer.hash, bytes=len(raw), chunks=chunk_names(raw)
            ),
            increments=(Increment(train=lists[0], held_out=lists[1]),),
        )
        write_durably(folder / INDEX_NAME, index.encode())


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise Usage(str(path), str(error.strerror), "check the path") from None
    if not path.is_file() or not size:
        raise Usage(str(path), "it is no file of tokens", "name one, as nanoGPT's train.bin is")
    return size


def _first(mark: bytes) -> int:
    """Return the place of the first token."""
    return _HEADER_BYTES if int.from_bytes(mark, "little") in _HEADER_MAGIC else 0


def _in_order(shard: _Shard) -> tuple[int, int]:
    return shard.file, shard.offset
