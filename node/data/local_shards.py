"""The shards of prepared data that this machine has, in a folder in place or in the cache, as it
reads them and lends them to others."""

from functools import partial
from pathlib import Path

from farflock.node.data.folder import PreparedFolder, tokens_of
from farflock.node.data.index import BadIndex, read_index
from farflock.node.data.shard_cache import ShardCache, ShardNeeds
from farflock.node.data.shard_table import ShardTable, pages_of
from farflock.node.tokens.tokenizer import TokenIds
from farflock.swarm.chunk_store import is_intact
from farflock.swarm.compute import Compute, inline
from farflock.swarm.messages import MAX_HELD_CHUNKS


class LocalShards:
    """The shards of one root that are here. `compute` runs what reads the disk for others.

    It is a lender of chunks (swarm/lending.py): of the index, of its pages, and of shards."""

    def __init__(
        self,
        table: ShardTable,
        cache: ShardCache,
        folder: PreparedFolder | None = None,
        compute: Compute = inline,
    ) -> None:
        self.table, self.cache, self._folder, self._compute = table, cache, folder, compute
        self.root, self.index_bytes = bytes.fromhex(table.root), table.index_bytes
        self._pages = {bytes.fromhex(page.name) for page in pages_of(table.index)}
        self._bitmap, self._version = b"", -1

    # as a lender

    def __contains__(self, digest: bytes) -> bool:
        if digest == self.root or digest in self._pages:
            return True
        number = self.table.number(digest)
        return number is not None and self.has(number)

    def held(self, first: int) -> bytes:
        """Return which shards are here, from number `first` on, as a bitmap."""
        return self._all_held()[first // 8 : (first + MAX_HELD_CHUNKS) // 8]

    async def read(self, digest: bytes) -> bytes | None:
        """Return a chunk, verified; None if it is not here any more, or is damaged."""
        return await self._compute(partial(self.raw, digest))

    # what is here

    @property
    def in_place(self) -> Path | None:
        """The folder that has all of the shards; None if they come from other peers."""
        return None if self._folder is None else self._folder.folder

    @property
    def count(self) -> int:
        """The number of shards that are here."""
        bits = int.from_bytes(self._all_held(), "little")
        return bits.bit_count()

    def has(self, number: int) -> bool:
        """Return whether a shard is here."""
        return self._folder is not None or self.table.digest(number) in self.cache.names

    def keep(self, number: int, raw: bytes, needs: ShardNeeds) -> None:
        """Keep a shard in the cache; raise `CacheFull` if it is not needed and there is no room."""
        self.cache.keep(self.table.digest(number), raw, needs)

    def raw(self, digest: bytes) -> bytes | None:
        """Return a chunk, verified; None if it is not here or is damaged."""
        number = self.table.number(digest)
        try:
            if number is None:
                return self._index_chunk(digest.hex())
            if self._folder is None:
                return self.cache.read(digest)
            raw = self._folder.raw(*self.table.place(number))
        except (OSError, BadIndex):
            return None
        return raw if is_intact(raw, digest) else None

    def tokens(self, number: int) -> TokenIds | None:
        """Return the tokens of a shard (n,); None if it is not here. Raise `BadIndex` if it is
        damaged in its folder, or is not what the index says."""
        if self._folder is not None:
            return self._folder.read(*self.table.place(number))
        raw = self.cache.read(self.table.digest(number))
        return None if raw is None else self.tokens_in(number, raw)

    def tokens_in(self, number: int, raw: bytes) -> TokenIds:
        """Return the tokens of a shard with these bytes, verified (n,). Raise `BadIndex` if they
        are not what the index says."""
        tokens = tokens_of(raw, self.table.index, self.table.documents(number))
        if tokens is None:
            raise BadIndex(
                f"the shard {self.table.digest(number).hex()[:16]}… of the run's data is not what"
                " its index says; tell the run's founder"
            )
        return tokens

    def _index_chunk(self, name: str) -> bytes | None:
        if self._folder is None:
            return self.cache.index(name)
        is_root = name == self.table.root
        raw = self._folder.index_raw if is_root else self._folder.page(name)
        return raw if is_intact(raw, bytes.fromhex(name)) else None

    def _all_held(self) -> bytes:
        if self._version != self.cache.version:
            self._version, self._bitmap = self.cache.version, self._mapped()
        return self._bitmap

    def _mapped(self) -> bytes:
        bits = bytearray(-(-len(self.table) // 8))
        for number in range(len(self.table)):
            if self.has(number):
                bits[number // 8] |= 1 << number % 8
        return bytes(bits)


def table_of(folder: PreparedFolder) -> ShardTable:
    """Return the shards of a prepared folder by number."""
    return ShardTable(folder.index_raw, folder.root, folder.page)


def cached_table(root: str, cache: ShardCache) -> ShardTable | None:
    """Return the shards of an index that is in the cache, with all of its pages; else None. Raise
    `BadIndex` if it is no index."""
    raw = cache.index(root)
    if raw is None:
        return None
    pages = {page.name: cache.index(page.name) for page in pages_of(read_index(raw, "it", root))}
    found = {name: page for name, page in pages.items() if page is not None}
    return ShardTable(raw, root, found.__getitem__) if len(found) == len(pages) else None
