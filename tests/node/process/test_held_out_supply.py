"""Held-out shards come to a machine without a folder, verified, below what training waits for."""

import asyncio

import numpy as np
import pytest
from worlds.chunk_net import LentWorld, MemoryLender
from worlds.prepared import prepared
from worlds.waiting import until

from farflock.node.assembly.text import RunText
from farflock.node.data.local_shards import LocalShards, table_of
from farflock.node.data.shard_cache import ShardCache
from farflock.node.model.data import evaluation_rows
from farflock.node.process.data_supply import GIVE_UP_S, DataSupply, HeldOutSupply
from farflock.node.process.run_data import RunData
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.sim.virtual_time import run_virtual

SEQ, SEQUENCES = 16, 20


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out", held_out=0.4).content


class Newcomer:
    """A member with an empty disk and so much room in its cache, and the members to ask."""

    def __init__(self, world, content, folder, room):
        self.world, self.content, self.members = world, content, []
        self.table = table_of(content)
        self.local = LocalShards(self.table, ShardCache(folder / "cache", room))
        self.data = RunData([self.local], [1.0], 0)
        self.rows = self.data.hold_out(SEQ, SEQUENCES)
        self.holders = world.peer("newcomer")
        self.source = self.data.sources[0]
        self.supply = DataSupply(
            [self.source], self.holders, lambda: self.members, lambda work: asyncio.sleep(0, work())
        )
        self.bringing = HeldOutSupply(self.supply, self.rows)

    def member(self, name, held=None, false=None):
        chunks = [self.content.raw(*self.table.place(number)) for number in range(len(self.table))]
        lender = MemoryLender(chunks, held=held, index=self.content.index_raw, false=false)
        self.members.append(name)
        self.world.peer(name, lender)
        return lender

    @property
    def wanted(self):
        return [shard.number for shard in self.rows.missing]


@pytest.fixture
def world(content, tmp_path):
    """Run a test of a newcomer, which asks for held-out shards meanwhile."""

    def tried(main, room=10**9):
        async def whole():
            world = LentWorld()
            newcomer = Newcomer(world, content, tmp_path, room)
            task = asyncio.create_task(newcomer.bringing.run())
            try:
                async with newcomer.supply.running():
                    await main(newcomer)
            finally:
                task.cancel()
                await world.close()

        run_virtual(whole())

    return tried


def expected(content):
    whole = RunText((content,), (1.0,), ByteTokenizer()).held_out()
    return evaluation_rows(whole, SEQ, SEQUENCES)


@pytest.mark.parametrize("room", [10**9, 0])
def test_a_member_without_a_folder_gets_the_sequences_of_those_with_one(world, content, room):
    async def main(newcomer):
        wanted = set(newcomer.wanted)
        assert len(wanted) > 2
        table = newcomer.table
        newcomer.member("liar", false={table.digest(n): bytes(table.size(n)) for n in wanted})
        await asyncio.sleep(20)
        assert newcomer.rows.rows is None
        newcomer.member("honest")
        await until(lambda: newcomer.rows.rows is not None)
        assert np.array_equal(newcomer.rows.rows, expected(content))
        assert newcomer.holders.left_out == {"liar"}
        kept = {n for n in range(len(newcomer.table)) if newcomer.local.has(n)}
        assert kept == (wanted if room else set()), "with no room, the sequences alone"

    world(main, room)


def test_what_the_cache_has_is_not_fetched_again(world, content):
    async def first(newcomer):
        newcomer.member("a")
        await until(lambda: newcomer.rows.rows is not None)

    async def second(newcomer):
        assert np.array_equal(newcomer.rows.rows, expected(content))

    world(first)
    world(second)


def test_they_wait_while_training_waits_for_a_shard(world):
    async def main(newcomer):
        newcomer.source.expect([0], [1])
        lender = newcomer.member("a", held=set(range(1, len(newcomer.table))))
        await asyncio.sleep(GIVE_UP_S / 2)
        assert newcomer.wanted, "shard 0 is read now, and nobody has it"
        assert not any(newcomer.local.has(number) for number in newcomer.wanted)
        lender.numbers.add(0)
        await until(lambda: newcomer.rows.rows is not None)
        assert newcomer.local.has(0)

    world(main)


def test_a_held_out_shard_that_nobody_has_is_said_once_and_asked_for_on(world, content, caplog):
    async def main(newcomer):
        lost = newcomer.wanted[1]
        lender = newcomer.member("a", held=set(range(len(newcomer.table))) - {lost})
        await asyncio.sleep(4 * GIVE_UP_S)
        (said,) = [record.getMessage() for record in caplog.records]
        digest = newcomer.table.digest(lost).hex()[:16]
        assert f"nobody has the held-out shard {digest}… of the run's data" in said
        lender.numbers.add(lost)
        await until(lambda: newcomer.rows.rows is not None, 2 * GIVE_UP_S)

    world(main)
