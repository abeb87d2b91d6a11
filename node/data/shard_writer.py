"""Shards, their files and their pages, written so that nothing half-written can be taken for whole:
the index that names them comes last.
"""

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from farflock.node.data.index import (
    ENTRY,
    MAX_PAGE_SHARDS,
    MAX_SHARD_BYTES,
    MAX_TOKEN_FILE_BYTES,
    ShardList,
)
from farflock.node.durable import write_durably
from farflock.swarm.chunk_store import digest_of


class ShardWriter:
    """The shards of one split of an increment, in files in the folder `tokens`.

    A document that does not fit into the rest of a shard begins the next one. One that fits into
    none, of a tokenizer that makes many tokens, is cut into several, each with the end of text."""

    def __init__(
        self, folder: Path, label: str, kind: "np.dtype[np.unsignedinteger]", end_of_text: int
    ) -> None:
        self._folder, self._label, self._width = folder, label, kind.itemsize
        self._end = np.array([end_of_text], dtype=kind).tobytes()
        self._shard, self._documents = bytearray(), 0
        self._file: BinaryIO | None = None
        self._files = self._file_bytes = 0
        self._entries = bytearray()

    def add(self, tokens: bytes) -> None:
        """Write a document, its end not among the tokens."""
        room = MAX_SHARD_BYTES - len(self._end)
        for start in range(0, len(tokens), room) if tokens else (0,):
            piece = tokens[start : start + room]
            if len(self._shard) + len(piece) > room:
                self._close_shard()
            self._shard += piece
            self._shard += self._end
            self._documents += 1

    def finish(self) -> ShardList:
        """Write the last shard and the pages; return what was written."""
        self._close_shard()
        self._close_file()
        return write_pages(self._folder, bytes(self._entries))

    def _close_shard(self) -> None:
        if not self._shard:
            return
        if self._file is None or self._file_bytes + len(self._shard) > MAX_TOKEN_FILE_BYTES:
            self._close_file()
            path = self._folder / token_file(self._label, self._files)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file, self._file_bytes = path.open("wb"), 0
            self._files += 1
        self._file.write(self._shard)
        self._file_bytes += len(self._shard)
        self._entries += entry_of(self._shard, self._width, self._documents)
        self._shard, self._documents = bytearray(), 0

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def entry_of(shard: bytes | bytearray, width: int, documents: int) -> bytes:
    """Return a shard's entry in a page; its tokens are of `width` bytes."""
    entry = np.array([(digest_of(shard), len(shard) // width, documents)], dtype=ENTRY)
    return entry.tobytes()


def write_pages(folder: Path, entries: bytes) -> ShardList:
    """Write the pages of a split's entries, and return what is in them."""
    listed, pages = np.frombuffer(entries, dtype=ENTRY), list[str]()
    for start in range(0, len(listed), MAX_PAGE_SHARDS):
        raw = listed[start : start + MAX_PAGE_SHARDS].tobytes()
        pages.append(digest_of(raw).hex())
        (folder / "pages").mkdir(exist_ok=True)
        write_durably(folder / "pages" / pages[-1], raw)
    return ShardList(
        shards=len(listed),
        tokens=int(listed["tokens"].sum(dtype=np.int64)),
        documents=int(listed["documents"].sum(dtype=np.int64)),
        pages=tuple(pages),
    )


def token_file(label: str, number: int) -> str:
    """Return the path of a file of shards in a prepared folder."""
    return f"tokens/{label}-{number:05}.bin"


def label_of(increment: int, split: str) -> str:
    """Return what the names of a split's files begin with."""
    return f"{increment:03}-{split}"
