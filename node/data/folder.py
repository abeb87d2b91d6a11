"""A prepared folder as it lies on a disk: where each shard is, and its tokens, verified."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflock.node.data.index import (
    INDEX_NAME,
    MAX_TOKEN_FILE_BYTES,
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
        ("part", "<u2"),
        ("file", "<u4"),
        ("offset", "<u4"),
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
        path = self.folder / token_file(label_of(int(shard["part"]), split), int(shard["file"]))
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

    def _listed(self, split: str) -> NDArray[np.void]:
        """Return all shards of a split (n,), of type `SHARD`, with where they lie."""
        found = [
            self._of_part(number, split, part.split(split))
            for number, part in enumerate(self.index.parts)
        ]
        return np.concatenate(found)

    def _of_part(self, number: int, split: str, listed: ShardList) -> NDArray[np.void]:
        kind, shards = self.index.token_type, np.zeros(listed.shards, dtype=SHARD)
        entries = read_entries(listed, kind, self.page)
        for field in ("digest", "tokens", "documents"):
            shards[field] = entries[field]
        shards["part"] = number
        lengths = _laid_out(shards, kind.itemsize)
        for file, length in enumerate(lengths):
            path = self.folder / token_file(label_of(number, split), file)
            found = path.stat().st_size if path.is_file() else 0
            if found != length:
                raise BadIndex(
                    f"{path} has {found:,} bytes, and the index says {length:,}; copy the folder "
                    "again, or prepare the data again"
                )
        return shards


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
    """Say of the shards of a part in which file and where they lie; return the files' lengths."""
    lengths = list[int]()
    files, offsets = np.zeros(len(shards), dtype="<u4"), np.zeros(len(shards), dtype="<u4")
    for place, tokens in enumerate(shards["tokens"].tolist()):
        if not lengths or lengths[-1] + tokens * width > MAX_TOKEN_FILE_BYTES:
            lengths.append(0)
        files[place], offsets[place] = len(lengths) - 1, lengths[-1]
        lengths[-1] += tokens * width
    shards["file"], shards["offset"] = files, offsets
    return lengths


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise BadIndex(
            f"{path} cannot be read ({error.strerror}); name a folder that `farflock data prepare` "
            "made"
        ) from None
