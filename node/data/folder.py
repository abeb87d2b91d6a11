"""A prepared folder as it lies on a disk: where each shard is, and its tokens, verified."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from farflock.node.data.index import (
    INDEX_NAME,
    MAX_TOKEN_FILE_BYTES,
    PATHS_NAME,
    PLACE,
    PLACES_NAME,
    SPLITS,
    BadIndex,
    DataIndex,
    ShardList,
    read_entries,
    read_index,
    root_of,
)
from farflock.node.data.shard_writer import label_of, token_file
from farflock.node.tokens.tokenizer import TokenIds
from farflock.swarm.chunk_store import is_intact
from farflock.swarm.messages import MAX_CHUNK_BYTES

SHARD = np.dtype(
    [
        ("digest", "V32"),
        ("tokens", "<u4"),
        ("documents", "<u4"),
        ("increment", "<u2"),
        ("file", "<u4"),
        ("offset", "<u8"),
    ]
)


class ShardPlace(NamedTuple):
    """Where a shard lies: its digest, its file, its first byte there, and its bytes."""

    digest: bytes
    path: Path
    offset: int
    size: int


class PreparedFolder:
    """A folder of prepared data; raise `BadIndex` if it is none, or not the one with this root, or
    if a file is missing or has another size than the index says. No shard is read."""

    def __init__(self, folder: Path, root: str | None = None) -> None:
        self.folder = folder
        self.index_raw = raw = _read(folder / INDEX_NAME, MAX_CHUNK_BYTES + 1)
        self.index: DataIndex = read_index(raw, str(folder / INDEX_NAME), root)
        self.root = root_of(raw)
        self._elsewhere = _paths_elsewhere(folder)
        self._shards = {split: self._listed(split) for split in SPLITS}

    def shards(self, split: str) -> int:
        """Return the number of shards of `train` or `held-out`."""
        return len(self._shards[split])

    def sizes(self, split: str) -> Sequence[int]:
        """Return the tokens of each shard of a split."""
        sizes: list[int] = self._shards[split]["tokens"].tolist()
        return sizes

    def place(self, split: str, number: int) -> ShardPlace:
        """Return where a shard lies."""
        shard = self._shards[split][number]
        if self._elsewhere:
            path = self._elsewhere[int(shard["file"])]
        else:
            path = self.folder / token_file(
                label_of(int(shard["increment"]), split), int(shard["file"])
            )
        size = int(shard["tokens"]) * self.index.token_type.itemsize
        return ShardPlace(shard["digest"].tobytes(), path, int(shard["offset"]), size)

    def page(self, name: str) -> bytes:
        """Return a page of the index, unverified."""
        return _read(self.folder / "pages" / name, MAX_CHUNK_BYTES + 1)

    def raw(self, split: str, number: int) -> bytes:
        """Return the bytes of a shard, unverified."""
        place = self.place(split, number)
        with place.path.open("rb") as file:
            return os.pread(file.fileno(), place.size, place.offset)

    def read(self, split: str, number: int) -> TokenIds:
        """Return the tokens of a shard (n,); raise `BadIndex` unless they are what the index says:
        its hash, its documents, and tokens of the vocabulary."""
        place = self.place(split, number)
        raw = self.raw(split, number)
        if not is_intact(raw, place.digest):
            raise BadIndex(
                f"a shard in {place.path} is damaged at byte {place.offset:,}; copy the file again,"
                " or prepare the data again"
            )
        documents = int(self._shards[split][number]["documents"])
        tokens = tokens_of(raw, self.index, documents)
        if tokens is None:
            raise BadIndex(
                f"a shard in {place.path} is not {documents:,} documents of"
                f" {self.index.vocabulary:,} tokens; prepare the data again"
            )
        return tokens

    def rows(self, split: str, starts: NDArray[np.int64], length: int) -> TokenIds:
        """Return runs of tokens (n, length) that begin at these positions (n,) of a split, whose
        shards follow one another; raise as `read` does. Only shards that have a part are read."""
        found: TokenIds = np.zeros((len(starts), length), dtype=self.index.token_type)
        begin = 0
        for number, tokens in enumerate(self._shards[split]["tokens"].tolist()):
            end = begin + tokens
            wanted = np.flatnonzero((starts < end) & (starts + length > begin))
            if len(wanted):
                copy_rows(self.read(split, number), begin, starts, found, wanted)
            begin = end
        return found

    def _listed(self, split: str) -> NDArray[np.void]:
        """Return all shards of a split (n,), of type `SHARD`, with where they lie."""
        found = [
            self._of_increment(number, split, increment.split(split))
            for number, increment in enumerate(self.index.increments)
        ]
        return np.concatenate(found)

    def _of_increment(self, number: int, split: str, listed: ShardList) -> NDArray[np.void]:
        kind, shards = self.index.token_type, np.zeros(listed.shards, dtype=SHARD)
        entries = read_entries(listed, kind, self.page)
        for field in ("digest", "tokens", "documents"):
            shards[field] = entries[field]
        shards["increment"] = number
        if self._elsewhere:
            self._place_elsewhere(shards, label_of(number, split))
            return shards
        lengths = _laid_out(shards, kind.itemsize)
        for file, length in enumerate(lengths):
            path = self.folder / token_file(label_of(number, split), file)
            if (found := _size(path)) != length:
                raise BadIndex(
                    f"{path} has {found:,} bytes, and the index says {length:,}; copy the folder "
                    "again, or prepare the data again"
                )
        return shards

    def _place_elsewhere(self, shards: NDArray[np.void], label: str) -> None:
        """Say of the shards of a split where they lie in files that others have made."""
        path = self.folder / PLACES_NAME / label
        raw = _read(path, (len(shards) + 1) * PLACE.itemsize)
        places = np.frombuffer(raw[: len(raw) // PLACE.itemsize * PLACE.itemsize], dtype=PLACE)
        sizes = np.array([_size(each) for each in self._elsewhere], dtype=np.uint64)
        if len(raw) != len(shards) * PLACE.itemsize or (places["file"] >= len(sizes)).any():
            raise BadIndex(f"{path} is damaged; make the folder again with `farflock data index`")
        ends = places["offset"] + shards["tokens"] * np.uint64(self.index.token_type.itemsize)
        if (short := np.flatnonzero(ends > sizes[places["file"]])).size:
            found = self._elsewhere[int(places["file"][short[0]])]
            raise BadIndex(f"{found} is gone, or shorter than its index says; put it back")
        shards["file"], shards["offset"] = places["file"], places["offset"]


def _paths_elsewhere(folder: Path) -> list[Path]:
    """Return the files of tokens that a folder lists; none if it has its own."""
    path = folder / PATHS_NAME
    if not path.exists():
        return []
    try:
        return list(map(Path, msgspec.json.decode(_read(path, MAX_CHUNK_BYTES), type=list[str])))
    except msgspec.MsgspecError:
        why = f"{path} is damaged; make the folder again with `farflock data index`"
        raise BadIndex(why) from None


def copy_rows(
    shard: TokenIds,
    begin: int,
    starts: NDArray[np.int64],
    found: TokenIds,
    rows: NDArray[np.int64],
) -> None:
    """Copy to some rows of `found`, which begin at `starts`, what a shard has of them; the position
    of its first token is `begin`."""
    for row in rows:
        first = max(int(starts[row]), begin)
        last = min(int(starts[row]) + found.shape[1], begin + len(shard))
        at = first - int(starts[row])
        found[row, at : at + last - first] = shard[first - begin : last - begin]


def tokens_of(raw: bytes, index: DataIndex, documents: int) -> TokenIds | None:
    """Return the tokens of an intact shard (n,); None if they are not as many documents of the
    vocabulary as its index says."""
    tokens: TokenIds = np.frombuffer(raw, dtype=index.token_type)
    ends = int((tokens == index.end_of_text).sum())
    fine = (
        int(tokens.max()) < index.vocabulary
        and int(tokens[-1]) == index.end_of_text
        and ends == documents
    )
    return tokens if fine else None


def _laid_out(shards: NDArray[np.void], width: int) -> list[int]:
    """Say of an increment's shards in which file and where they lie; return the files' lengths."""
    shards["file"], shards["offset"], lengths = lay_out(shards["tokens"].tolist(), width)
    return lengths


def lay_out(tokens: Sequence[int], width: int) -> tuple[list[int], list[int], list[int]]:
    """Return in which file of an increment each of its shards lies, which have so many tokens of
    `width` bytes, and at which byte; and the files' lengths."""
    files, offsets, lengths = list[int](), list[int](), list[int]()
    for count in tokens:
        if not lengths or lengths[-1] + count * width > MAX_TOKEN_FILE_BYTES:
            lengths.append(0)
        files.append(len(lengths) - 1)
        offsets.append(lengths[-1])
        lengths[-1] += count * width
    return files, offsets, lengths


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise BadIndex(
            f"{path} cannot be read ({error.strerror}); name a folder that `farflock data prepare` "
            "made"
        ) from None
