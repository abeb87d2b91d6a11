"""Shards, pages and an index, written so that nothing half-written can be taken for whole: each
file gets its name when it is complete and on the disk."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from farflock.node.data.index import (
    SHARDS_PER_PAGE,
    DataPage,
    DataShard,
    PageContent,
    listed,
)
from farflock.node.tokens.tokenizer import TokenIds


class ShardWriter:
    """Shards of about equal size, each at most `limit_bytes`, for about `total_bytes`.

    A document that does not fit into what is left of a shard begins the next one; only one that is
    longer than a shard is cut. `label` tells writers in one folder apart."""

    def __init__(
        self,
        folder: Path,
        label: str,
        dtype: "np.dtype[np.unsignedinteger]",
        limit_bytes: int,
        total_bytes: int,
    ) -> None:
        self._folder, self._dtype = folder, dtype
        self._unfinished = folder / "shards" / f"unfinished-{label}"
        self._limit = limit_bytes // dtype.itemsize
        total = max(1, total_bytes // dtype.itemsize)
        self._enough = -(-total // -(-total // self._limit))
        self._open: _OpenShard | None = None
        self.shards: list[DataShard] = []

    def add(self, tokens: TokenIds, ends: bool = True) -> None:
        """Write a document; `ends` says that its end is among the tokens."""
        while len(tokens) > self._limit - self._filled:
            if self._filled == 0:
                self._write(tokens[: self._limit], 0)
                tokens = tokens[self._limit :]
            self.finish()
        if len(tokens):
            self._write(tokens, int(ends))
        if self._filled >= self._enough:
            self.finish()

    def finish(self) -> None:
        """Close the shard that is being written, if any."""
        if self._open is not None:
            self.shards.append(self._open.close(self._folder))
            self._open = None

    @property
    def _filled(self) -> int:
        return self._open.tokens if self._open is not None else 0

    def _write(self, tokens: TokenIds, documents: int) -> None:
        self._open = self._open or _OpenShard(self._unfinished, self._dtype)
        self._open.write(tokens, documents)


class _OpenShard:
    """A shard that is being written, under a name that is none of a shard."""

    def __init__(self, path: Path, dtype: "np.dtype[np.unsignedinteger]") -> None:
        self._path, self._dtype = path, dtype
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self.tokens = self._documents = 0

    def write(self, tokens: TokenIds, documents: int) -> None:
        """Append tokens in which so many documents end."""
        self._file.write(np.ascontiguousarray(tokens, dtype=self._dtype).data)
        self.tokens += len(tokens)
        self._documents += documents

    def close(self, folder: Path) -> DataShard:
        """Name the file by its hash and return its entry."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        entry = listed(self._path)
        shard = DataShard(
            sha256=entry.sha256,
            size=entry.size,
            pieces=entry.pieces,
            tokens=self.tokens,
            documents=self._documents,
        )
        self._path.replace(folder / shard.name)
        return shard


def write_pages(folder: Path, shards: Sequence[DataShard]) -> tuple[DataPage, ...]:
    """Write the pages that list these shards; return their entries."""
    return tuple(_page(folder, some) for some in _groups(shards))


def _page(folder: Path, shards: tuple[DataShard, ...]) -> DataPage:
    raw = msgspec.json.format(msgspec.json.encode(PageContent(shards)), indent=1)
    unfinished = folder / "pages" / "unfinished"
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    write_synced(unfinished, raw)
    entry = listed(unfinished)
    page = DataPage(
        sha256=entry.sha256,
        size=entry.size,
        pieces=entry.pieces,
        shards=len(shards),
        tokens=sum(shard.tokens for shard in shards),
    )
    unfinished.replace(folder / page.name)
    return page


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _groups(shards: Sequence[DataShard]) -> Iterator[tuple[DataShard, ...]]:
    for start in range(0, len(shards), SHARDS_PER_PAGE):
        yield tuple(shards[start : start + SHARDS_PER_PAGE])
