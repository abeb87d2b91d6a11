"""The shards of prepared data by number, as the index lists them: no shard has to be here."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from farflock.node.data.index import (
    ENTRY,
    SPLITS,
    BadIndex,
    DataIndex,
    read_entries,
    read_index,
)

MAX_FETCHED_SHARDS = 1 << 20  # of data that are not on this machine


class Page(NamedTuple):
    """A page of an index: its hash in hex, and its bytes."""

    name: str
    size: int


def pages_of(index: DataIndex) -> list[Page]:
    """Return the pages of an index, each once; raise `BadIndex` if it lists so many shards that no
    machine should fetch their list."""
    lists = [increment.split(split) for split in SPLITS for increment in index.increments]
    if sum(listed.shards for listed in lists) > MAX_FETCHED_SHARDS:
        raise BadIndex(
            f"the run's data have more than {MAX_FETCHED_SHARDS:,} shards, whose list is too long "
            "to fetch; get a copy of the prepared folder, and name it with --data"
        )
    found = {
        name: Page(name, listed.on_page(place) * ENTRY.itemsize)
        for listed in lists
        for place, name in enumerate(listed.pages)
    }
    return list(found.values())


class ShardTable:
    """All shards of an index by number: first those to train on, by increments, then the held-out.

    `page` gives the bytes of a page of this name. Raise `BadIndex` if the index is not the one with
    this root, or a page is not what it says."""

    def __init__(self, raw: bytes, root: str, page: Callable[[str], bytes]) -> None:
        self.index, self.root, self.index_bytes = read_index(raw, "the index", root), root, len(raw)
        kind = self.index.token_type
        lists = [
            [
                read_entries(increment.split(split), kind, page)
                for increment in self.index.increments
            ]
            for split in SPLITS
        ]
        self.train = sum(map(len, lists[0]))  # as many are trained on
        self._entries = np.concatenate([entries for split in lists for entries in split])
        self.all_tokens = int(self._entries["tokens"].sum(dtype=np.int64))
        self._numbers = {digest: n for n, digest in enumerate(map(bytes, self._entries["digest"]))}

    def __len__(self) -> int:
        return len(self._entries)

    def number(self, digest: bytes) -> int | None:
        """Return the number of a shard; None if it is no shard of these data."""
        return self._numbers.get(digest)

    def digest(self, number: int) -> bytes:
        """Return the BLAKE3 hash of a shard."""
        digest: bytes = self._entries[number]["digest"].tobytes()
        return digest

    def tokens(self, number: int) -> int:
        """Return the number of a shard's tokens."""
        return int(self._entries[number]["tokens"])

    def size(self, number: int) -> int:
        """Return the bytes of a shard."""
        return self.tokens(number) * self.index.token_type.itemsize

    def documents(self, number: int) -> int:
        """Return the number of a shard's documents."""
        return int(self._entries[number]["documents"])

    def train_sizes(self) -> list[int]:
        """Return the tokens of each shard to train on."""
        sizes: list[int] = self._entries["tokens"][: self.train].tolist()
        return sizes

    def place(self, number: int) -> tuple[str, int]:
        """Return the split of a shard, and its number there."""
        return ("train", number) if number < self.train else ("held-out", number - self.train)
