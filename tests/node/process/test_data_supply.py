"""Shards come ahead of need, each as its hash says, and no others than the reader will read."""

import asyncio

import numpy as np
import pytest
from worlds.chunk_net import LentWorld, MemoryLender
from worlds.prepared import prepared
from worlds.waiting import now, until

from farflock.node.data.coming_shards import FetchedShards
from farflock.node.data.local_shards import LocalShards, table_of
from farflock.node.data.samples import SampleReader, Text
from farflock.node.data.shard_cache import ShardCache
from farflock.node.data.shard_order import SampleStream, ShardOrder
from farflock.node.process.data_supply import GIVE_UP_S, DataSupply
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.sim.virtual_time import run_virtual

LENGTH = 20


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out", held_out=0.1).content


@pytest.fixture
def cache(tmp_path):
    return ShardCache(tmp_path / "cache", 10**9)


class Supplied:
    """A peer with an empty disk that trains on a folder's data, and the members that hold them."""

    def __init__(self, world, content, cache):
        self.world, self.content = world, content
        # The reader has no thread of its own here, and must not wait.
        self.source = FetchedShards(LocalShards(table_of(content), cache), lambda: True)
        self.holders, self.members = world.peer("reader"), []
        self.supply = DataSupply(
            [self.source], self.holders, lambda: self.members, lambda work: asyncio.sleep(0, work())
        )

    def member(self, name, held=None, false=None):
        table = self.source.local.table
        chunks = [self.content.raw(*table.place(number)) for number in range(len(table))]
        raw = self.content.index_raw
        self.members.append(name)
        lender = MemoryLender(chunks, held=held, index=raw, false=false)
        return self.world.peer(name, lender)

    async def read(self, reader, count):
        """Read one sample after the other, each once its group is here."""
        found = []
        for number in range(count):
            await until(lambda: not self.source.missing)
            found.append(reader.read(number, 1)[0].tolist())
        return found


def supplied(content, cache, main):
    async def whole():
        world = LentWorld()
        peer = Supplied(world, content, cache)
        try:
            async with peer.supply.running():
                await main(peer)
        finally:
            await world.close()

    run_virtual(whole())


def reader_of(source):
    return SampleReader(Text((source,), (1.0,)), SampleStream(1, "reader"), LENGTH)


def test_what_is_fetched_is_what_the_pure_function_predicts_and_each_shard_is_as_its_hash_says(
    content, cache
):
    async def main(peer):
        peer.member("a")
        peer.member("b", held=range(5))
        reader = reader_of(peer.source)
        seen = await peer.read(reader, 150)
        place = reader.cursor(150).places[0]
        assert place.epoch == 0
        assert place.group > 1
        order = ShardOrder(SampleStream(1, "reader"), content.root, content.shards("train"))
        await until(lambda: not peer.source.missing)
        groups = range(place.group + 1)
        predicted = {n for group in groups for n in order.group(0, group)}
        predicted |= set(order.group(*order.after(0, place.group)))
        assert {number for _, number in peer.supply.fetched} == predicted
        assert len(peer.supply.fetched) == len(predicted), "none twice"
        table = peer.source.local.table
        assert cache.names == {table.digest(number) for number in predicted}
        for digest in cache.names:
            assert digest_of(cache.read(digest)) == digest
        plain = SampleReader(
            Text((FetchedShards(LocalShards(table_of(content), cache, content)),), (1.0,)),
            SampleStream(1, "reader"),
            LENGTH,
        )
        assert seen == plain.read(0, 150).tolist(), "the samples of who has all"

    supplied(content, cache, main)


def test_what_is_in_the_cache_is_not_fetched_again(content, cache):
    async def first(peer):
        peer.member("a")
        reader_of(peer.source)
        await until(lambda: not peer.source.missing)

    async def second(peer):
        reader = reader_of(peer.source)
        assert not peer.source.missing
        await peer.read(reader, 1)
        assert not peer.supply.fetched

    supplied(content, cache, first)
    supplied(content, ShardCache(cache.folder, 10**9), second)


def test_a_shard_that_nobody_has_is_said_with_its_hash_skipped_and_counted(content, cache, caplog):
    order = ShardOrder(SampleStream(1, "reader"), content.root, content.shards("train"))
    lost = order.group(0, 1)[0]

    async def main(peer):
        peer.member("a", held=set(range(len(peer.source.local.table))) - {lost})
        reader = reader_of(peer.source)
        await asyncio.sleep(2 * GIVE_UP_S)
        table, first = peer.source.local.table, order.group(0, 0)[0]
        assert not caplog.records, "it is not needed yet"
        number = 0
        while reader.cursor(number).places[0].group == 0:
            reader.read(number, 1)
            number += 1
        assert peer.source.local.has(first)
        peer.source.expect(order.group(0, 1), order.group(0, 2))
        await until(lambda: lost not in peer.source.missing)
        (said,) = [record.getMessage() for record in caplog.records]
        assert f"nobody has the shard {table.digest(lost).hex()[:16]}…" in said
        for _ in range(30):
            await until(lambda: not peer.source.missing)
            reader.read(number, 1)
            number += 1
        assert lost not in peer.source.seen
        assert peer.source.counts.skipped == 1
        assert peer.source.counts.skipped_tokens == table.tokens(lost)

    supplied(content, cache, main)


def test_who_sends_a_false_shard_is_left_out_and_the_true_one_comes_from_another(
    content, cache, caplog
):
    async def main(peer):
        table = peer.source.local.table
        false = {table.digest(n): bytes(table.size(n)) for n in range(len(table))}
        peer.member("liar", false=false)
        reader_of(peer.source)
        await asyncio.sleep(10)
        assert not cache.names
        peer.member("honest")
        await until(lambda: not peer.source.missing)
        assert peer.holders.left_out == {"liar"}

    supplied(content, cache, main)
    assert len([r for r in caplog.records if "liar sent a false copy" in r.getMessage()]) == 1


def test_a_full_disk_ends_what_waits_for_it_and_nothing_is_half_written(
    content, cache, monkeypatch
):
    async def main(peer):
        def full(old, new):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.replace", full)
        peer.member("a")
        reader = reader_of(peer.source)
        await until(lambda: peer.source.failure is not None)
        with pytest.raises(OSError, match="No space"):
            reader.read(0, 1)

    supplied(content, cache, main)
    assert not list(cache.folder.rglob("*.partial"))


class Web:
    """Servers that have all shards."""

    def __init__(self, content):
        self.content, self.asked = content, []

    async def fetch(self, table, number):
        self.asked.append(number)
        return self.content.raw(*table.place(number))


def test_what_no_member_delivers_comes_from_the_web(content, cache):
    async def main(peer):
        peer.supply.web = Web(content)
        first = ShardOrder(SampleStream(1, "reader"), content.root, content.shards("train"))
        peer.member("a", held=first.group(0, 0))
        reader = reader_of(peer.source)
        await until(lambda: not peer.source.missing)
        assert peer.supply.web.asked == first.group(0, 1)
        await peer.read(reader, 10)

    supplied(content, cache, main)


def test_the_first_shard_comes_before_all_others(content, cache):
    async def main(peer):
        peer.member("a")
        reader_of(peer.source)
        await until(lambda: peer.supply.fetched)
        order = ShardOrder(SampleStream(1, "reader"), content.root, content.shards("train"))
        assert peer.supply.fetched[0][1] == order.group(0, 0)[0]
        assert now() < 2.0
        assert np.array_equal(
            peer.source.read(order.group(0, 0)[0]), content.read("train", order.group(0, 0)[0])
        )

    supplied(content, cache, main)
