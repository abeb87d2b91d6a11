"""A visitor sees a few documents of a run's data, whose shards members send."""

import pytest
from worlds.chunk_net import LentWorld, MemoryLender
from worlds.prepared import documents, prepared

from farflock.node.data.local_shards import LocalShards, table_of
from farflock.node.data.shard_cache import ShardCache
from farflock.node.process.data_look import read_excerpts
from farflock.node.process.run_data import RunData
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out").content


@pytest.fixture(autouse=True)
def no_thread(monkeypatch):
    class Inline:
        def __init__(self, name):
            pass

        __call__ = staticmethod(inline)

        def close(self):
            pass

    monkeypatch.setattr("farflock.node.process.data_look.Worker", Inline)


def looked(content, folder, held, seed=1):
    """What a visitor reads if a member has shards with these numbers, and its cache after that."""
    table = table_of(content)
    chunks = [content.raw(*table.place(number)) for number in range(len(table))]
    local = LocalShards(table, ShardCache(folder / "cache", 10**9))

    async def whole():
        world = LentWorld()
        world.peer("member", MemoryLender(chunks, held=held, index=content.index_raw))
        links, data = world.network.links("visitor"), RunData([local], [1.0], 0)
        try:
            return await read_excerpts(links, "run", data, ["member"], ByteTokenizer(), seed)
        finally:
            await world.close()

    return run_virtual(whole()), local


def test_the_documents_are_those_of_the_data_and_the_shards_are_kept(content, tmp_path):
    found, local = looked(content, tmp_path, None)
    all_texts = [" ".join(each.decode().split()) for each in documents(content)]
    assert len(found) == 5
    assert all(each.text in all_texts for each in found)
    assert {each.shard for each in found} == {name.hex() for name in local.cache.names}
    assert looked(content, tmp_path, set())[0] == found, "from the cache"
    assert looked(content, tmp_path, None, seed=2)[0] != found


def test_what_no_member_sends_is_empty_and_its_shard_is_named(content, tmp_path):
    found, local = looked(content, tmp_path, set())
    assert [each.text for each in found] == [""] * 5
    names = {local.table.digest(number).hex() for number in range(local.table.train)}
    assert {each.shard for each in found} <= names
