"""Who holds which chunks of data is asked; who sends a false one is named and left out."""

import asyncio

import pytest
from worlds.chunk_net import LentWorld, MemoryLender, data_of
from worlds.waiting import now

from farflock.swarm.chunk_server import PIECE_BYTES
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.chunks import GENTLE_CHUNK_S, GENTLE_SILENCE_S
from farflock.swarm.messages import MAX_HELD_CHUNKS, DataHeld, DataQuery, Piece
from farflock.swarm.peer.data_holders import LASTS_S, has
from farflock.swarm.sim.network import LinkModel
from farflock.swarm.sim.virtual_time import run_virtual

SHARDS = [data_of(200_000, seed) for seed in range(10)]
ROOT = MemoryLender(SHARDS).root


class Mute(MemoryLender):
    """Has all chunks, and never sends any."""

    async def read(self, digest):
        await asyncio.sleep(1e6)


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


def test_who_says_another_size_of_a_chunk_is_named_and_left_out_at_once(caplog):
    async def main(world):
        reader = world.peer("reader")
        digest, longer = digest_of(SHARDS[4]), data_of(300_000, 77)
        world.peer("liar", MemoryLender(SHARDS, false={digest: longer}))
        assert await reader.fetch(digest, len(SHARDS[4]), ["liar"], 300.0) is None
        assert now() < 2.0
        assert reader.left_out == {"liar"}

    in_a_world(main)()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("liar sent a false copy of ")


@in_a_world
async def test_who_sends_nothing_is_given_up_after_a_while_however_long_a_chunk_may_take(world):
    reader = world.peer("reader")
    world.peer("mute", Mute(SHARDS))
    digest = digest_of(SHARDS[4])
    assert await reader.fetch(digest, len(SHARDS[4]), ["mute"], 300.0) is None
    assert now() == pytest.approx(GENTLE_SILENCE_S, abs=1.0)


@in_a_world
async def test_a_slow_holder_does_not_hold_a_chunk_if_another_has_it(world):
    reader = world.peer("reader")
    for name in ("slow", "fast"):
        world.peer(name, MemoryLender(SHARDS))
    world.network.set_link("slow", LinkModel(2e4, 2e4))
    for shard in SHARDS:
        assert await reader.fetch(digest_of(shard), len(shard), ["slow", "fast"], 300.0) == shard
    assert now() < 30.0, "2 MB take 100 s from the slow one"


@in_a_world
async def test_a_lone_slow_holder_is_waited_for_as_long_as_it_sends(world):
    reader, long = world.peer("reader"), data_of(2_000_000)
    world.peer("slow", MemoryLender([long]))
    world.network.set_link("slow", LinkModel(3e4, 3e4))
    assert await reader.fetch(digest_of(long), len(long), ["slow"], 300.0) == long
    assert now() > 2 * GENTLE_SILENCE_S


@in_a_world
async def test_a_chunk_may_take_any_time_from_a_lone_holder_that_goes_on_sending(world):
    reader, long = world.peer("reader"), data_of(2_000_000)
    world.peer("slow", MemoryLender([long]))
    world.network.set_link("slow", LinkModel(4e3, 4e3))
    assert await reader.fetch(digest_of(long), len(long), ["slow"]) == long
    assert 500.0 < now() < 700.0


@in_a_world
async def test_a_faster_holder_that_is_known_later_takes_over_from_a_slow_one(world):
    reader, long, known = world.peer("reader"), data_of(2_000_000), []
    world.peer("slow", MemoryLender([long]))
    world.peer("fast", MemoryLender([long]))
    world.network.set_link("slow", LinkModel(4e3, 4e3))
    asyncio.get_running_loop().call_later(60.0, known.append, "fast")
    found = await reader.fetch(digest_of(long), len(long), ["slow"], known=lambda: known)
    assert found == long
    assert now() < 120.0, "it takes 500 s from the slow one"


@in_a_world
async def test_a_chunk_of_which_nothing_comes_is_given_up_while_others_come(world):
    reader = world.peer("reader")
    never, long = data_of(2_000_000, 1), data_of(2_000_000, 2)
    world.peer("mute", Mute([never]))
    world.peer("slow", MemoryLender([long]))
    world.network.set_link("slow", LinkModel(1e4, 1e4))
    other = asyncio.create_task(reader.fetch(digest_of(long), len(long), ["slow"]))
    assert await reader.fetch(digest_of(never), len(never), ["mute"]) is None
    assert now() == pytest.approx(GENTLE_CHUNK_S, abs=1.0)
    assert await other == long


@in_a_world
async def test_who_sends_one_piece_again_and_again_is_given_up(world):
    reader, long = world.peer("reader"), data_of(2_000_000)
    digest, chunks = digest_of(long), world.contexts["reader"].chunks
    world.peer("mute", Mute([long]))
    fetching = asyncio.create_task(reader.fetch(digest, len(long), ["mute"]))
    piece = Piece(digest, 0, len(long))
    while not fetching.done():
        await asyncio.sleep(5.0)
        chunks.receive("mute", piece, long[:PIECE_BYTES])
    assert await fetching is None
    assert now() < GENTLE_SILENCE_S + 10.0


def test_a_bit_beyond_a_bitmap_is_not_set():
    assert [number for number in range(30) if has(b"\x05\x00\x80", number)] == [0, 2, 23]
    assert not has(b"", 0)
