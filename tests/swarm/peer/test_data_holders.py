"""Who holds which chunks of data is asked; who sends a false one is named and left out."""

import pytest
from worlds.chunk_net import LentWorld, MemoryLender, data_of
from worlds.waiting import now

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_HELD_CHUNKS, DataHeld, DataQuery
from farflock.swarm.peer.data_holders import LASTS_S, has
from farflock.swarm.sim.virtual_time import run_virtual

SHARDS = [data_of(200_000, seed) for seed in range(10)]
ROOT = MemoryLender(SHARDS).root


def in_a_world(main):
    """Run a test `main(world)` in virtual time."""

    def test():
        async def whole():
            world = LentWorld()
            try:
                await main(world)
            finally:
                await world.close()

        run_virtual(whole())

    test.__doc__ = main.__doc__
    return test


@in_a_world
async def test_each_says_what_it_has_and_how_large_the_index_is(world):
    reader = world.peer("reader")
    world.peer("a", MemoryLender(SHARDS, held={0, 9}))
    world.peer("b", MemoryLender(SHARDS, held=range(5)))
    world.peer("c")
    await reader.ask(["a", "b", "c"], ROOT, 0)
    assert sorted(reader.holders(ROOT, 0)) == ["a", "b"]
    assert reader.holders(ROOT, 9) == ["a"]
    assert reader.holders(ROOT, 7) == []
    assert reader.index_sizes(ROOT) == {"a": 5, "b": 5}
    assert now() < 0.5


@in_a_world
async def test_who_does_not_answer_is_waited_for_only_so_long_and_answers_age(world):
    reader = world.peer("reader")
    world.peer("a", MemoryLender(SHARDS))
    await reader.ask(["a", "nobody"], ROOT, 0, timeout_s=2.0)
    assert now() == pytest.approx(2.0)
    assert reader.holders(ROOT, 3) == ["a"]
    world.network.kill("a")
    await reader.ask(["a"], ROOT, 0, timeout_s=LASTS_S)
    assert reader.holders(ROOT, 3) == []


@in_a_world
async def test_an_answer_that_nobody_asked_for_is_not_taken_in(world):
    reader = world.peer("reader")
    reader.receive("a", 1, DataHeld(ROOT, 0, 5, b"\xff"))
    assert not reader.holders(ROOT, 0)


@in_a_world
async def test_a_flood_of_questions_is_not_answered(world):
    holder = world.peer("holder", MemoryLender(SHARDS))
    world.peer("asker")
    for _ in range(1000):
        holder.receive("asker", 1, DataQuery(ROOT, 0))
    holder.receive("other", 1, DataQuery(ROOT, MAX_HELD_CHUNKS - 1))
    dropped = world.contexts["holder"].counters["dropped: question about data"]
    assert 800 < dropped < 1000


@in_a_world
async def test_a_chunk_comes_from_a_holder_and_takes_no_room_afterwards(world):
    reader = world.peer("reader")
    world.peer("a", MemoryLender(SHARDS))
    digest = digest_of(SHARDS[4])
    assert await reader.fetch(digest, len(SHARDS[4]), ["a"], 10.0) == SHARDS[4]
    assert reader.fetched_bytes == len(SHARDS[4])
    assert not world.contexts["reader"].store.size_bytes


def test_who_sends_a_false_chunk_is_named_and_left_out(caplog):
    async def main(world):
        reader = world.peer("reader")
        digest, false = digest_of(SHARDS[4]), data_of(200_000, 77)
        world.peer("liar", MemoryLender(SHARDS, false={digest: false}))
        await reader.ask(["liar"], ROOT, 0)
        assert await reader.fetch(digest, len(false), reader.holders(ROOT, 4), 10.0) is None
        assert not reader.holders(ROOT, 4)
        world.peer("honest", MemoryLender(SHARDS))
        await reader.ask(["liar", "honest"], ROOT, 0)
        assert reader.holders(ROOT, 5) == ["honest"]
        assert await reader.fetch(digest, len(false), ["honest"], 10.0) == SHARDS[4]

    in_a_world(main)()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("liar sent a false copy of ")


def test_a_bit_beyond_a_bitmap_is_not_set():
    assert [number for number in range(30) if has(b"\x05\x00\x80", number)] == [0, 2, 23]
    assert not has(b"", 0)
