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
    """The shards of one split of a part, in files in the folder `tokens`.

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
        self.tokens = self.documents = 0

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
        pages = list[str]()
        page_bytes = MAX_PAGE_SHARDS * ENTRY.itemsize
        for start in range(0, len(self._entries), page_bytes):
            raw = bytes(self._entries[start : start + page_bytes])
            pages.append(digest_of(raw).hex())
            (self._folder / "pages").mkdir(exist_ok=True)
            write_durably(self._folder / "pages" / pages[-1], raw)
        return ShardList(
            shards=len(self._entries) // ENTRY.itemsize,
            tokens=self.tokens,
            documents=self.documents,
            pages=tuple(pages),
        )

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
        tokens = len(self._shard) // self._width
        entry = np.array([(digest_of(self._shard), tokens, self._documents)], dtype=ENTRY)
        self._entries += entry.tobytes()
        self.tokens += tokens
        self.documents += self._documents
        self._shard, self._documents = bytearray(), 0

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def token_file(label: str, number: int) -> str:
    """Return the path of a file of shards in a prepared folder."""
    return f"tokens/{label}-{number:05}.bin"


def label_of(part: int, split: str) -> str:
    """Return what the names of a split's files begin with."""
    return f"{part:03}-{split}"
