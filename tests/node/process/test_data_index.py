"""The index of a run's data comes from members before they count a newcomer, or it is refused."""

import msgspec
import numpy as np
import pytest
from worlds.chunk_net import LentWorld
from worlds.prepared import prepared

from farflock.node.data.index import ENTRY, BadIndex, root_of
from farflock.node.data.local_shards import LocalShards, cached_table, table_of
from farflock.node.data.shard_cache import ShardCache
from farflock.node.data.shard_table import MAX_FETCHED_SHARDS, ShardTable, pages_of
from farflock.node.errors import RefusedByRun
from farflock.node.process.data_index import fetch_table
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.sim.virtual_time import run_virtual


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out", held_out=0.1).content


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 10**9)


class Lender:
    """What a member lends: chunks of an index, which may be anything."""

    def __init__(self, root, chunks, size=None):
        self.root, self.chunks = root, chunks
        self.index_bytes = len(chunks[root]) if size is None else size

    def __contains__(self, digest):
        return digest in self.chunks

    def held(self, first):
        return b""

    async def read(self, digest):
        return self.chunks[digest]


def fetched(root, cache, *lenders):
    """The table that a newcomer fetches; no thread, since time is virtual."""

    async def whole():
        world = LentWorld()
        for name, lender in enumerate(lenders):
            world.peer(str(name), lender)
        names = [str(name) for name in range(len(lenders))]
        try:
            return await fetch_table(world.network.links("newcomer"), "run", root, names, cache)
        finally:
            await world.close()

    return run_virtual(whole())


@pytest.fixture(autouse=True)
def inline(monkeypatch):
    class Inline:
        def __init__(self, name):
            pass

        async def __call__(self, work):
            return work()

        def close(self):
            pass

    monkeypatch.setattr("farflock.node.process.data_index.Worker", Inline)


def test_a_newcomer_gets_the_index_and_its_pages_and_keeps_them(content, cache):
    member = LocalShards(table_of(content), cache, content)
    table = fetched(content.root, cache, member)
    assert table.index == content.index
    assert table.train == content.shards("train")
    assert [table.tokens(n) for n in range(table.train)] == list(content.sizes("train"))
    for number in range(len(table)):
        place = content.place(*table.place(number))
        assert (table.digest(number), table.size(number)) == (place.digest, place.size)
        assert table.number(place.digest) == number
    again = ShardCache(cache.folder, 10**9)
    assert fetched(content.root, again).root == content.root, "nobody has to be asked again"


def test_who_lies_about_its_size_is_passed_over(content, cache):
    honest = LocalShards(table_of(content), ShardCache(cache.folder / "other", 10), content)
    root = bytes.fromhex(content.root)
    for size in (1, 5000):
        false = Lender(root, {root: bytes(size)})
        table = fetched(content.root, ShardCache(cache.folder / str(size), 10), false, honest)
        assert table.root == content.root


def test_if_nobody_sends_it_the_run_is_refused(content, cache):
    with pytest.raises(RefusedByRun, match="none of 1 members sent its index; get a copy"):
        fetched(content.root, cache, Lender(bytes(32), {bytes(32): b""}))


def index_with(content, **change):
    """An index that lists something else, and its root."""
    increment = msgspec.structs.replace(
        content.index.increments[0],
        train=msgspec.structs.replace(content.index.increments[0].train, **change),
    )
    raw = msgspec.structs.replace(content.index, increments=(increment,)).encode()
    return raw, root_of(raw)


def lent(raw, *pages):
    chunks = {digest_of(each): each for each in (raw, *pages)}
    return Lender(digest_of(raw), chunks)


def test_an_index_that_lies_about_counts_is_refused(content, cache):
    pages = [content.page(page.name) for page in pages_of(content.index)]
    raw, root = index_with(content, tokens=content.index.increments[0].train.tokens + 1)
    with pytest.raises(RefusedByRun, match=r"the index says .* tokens, and its pages list"):
        fetched(root, cache, lent(raw, *pages))


def test_a_page_that_lists_what_no_shard_can_be_is_refused(content, cache):
    held = [content.page(name) for name in content.index.increments[0].held_out.pages]
    page = np.zeros(1, dtype=ENTRY).tobytes()
    raw, root = index_with(content, shards=1, tokens=0, documents=0, pages=(digest_of(page).hex(),))
    with pytest.raises(RefusedByRun, match="lists what no shard can be"):
        fetched(root, cache, lent(raw, page, *held))


def test_an_index_of_too_many_shards_is_refused_before_its_pages_are_fetched(content, cache):
    count = MAX_FETCHED_SHARDS + 1
    names = tuple(f"{place:064x}" for place in range(-(-count // 65536)))
    raw, root = index_with(content, shards=count, pages=names)
    with pytest.raises(RefusedByRun, match="more than 1,048,576 shards"):
        fetched(root, cache, lent(raw))


def test_bytes_that_are_no_index_are_refused(cache):
    raw = b'{"version": 1, "parts": 7}'
    with pytest.raises(RefusedByRun, match="does not describe prepared data"):
        fetched(root_of(raw), cache, lent(raw))


def test_a_cache_without_one_of_the_pages_has_no_table(content, cache):
    cache.keep_index(content.root, content.index_raw)
    assert cached_table(content.root, cache) is None
    with pytest.raises(BadIndex):
        ShardTable(content.index_raw, "0" * 64, content.page)
