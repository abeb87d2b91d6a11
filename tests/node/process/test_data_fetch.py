"""Files come piece by piece, and whatever reads or downloads ends soon after it is given up."""

import asyncio
import logging
import time
from functools import partial

import numpy as np
import pytest
from worlds.chunk_net import Net
from worlds.folders.web_copy import web_copy
from worlds.prepared import write_shards
from worlds.waiting import until

from farflock.node.data.index import PIECE_BYTES
from farflock.node.data.local_data import LocalData
from farflock.node.data.mirror import Mirror
from farflock.node.process.data_fetch import DataFetcher, NothingCame
from farflock.swarm.compute import Worker
from farflock.swarm.sim.virtual_time import run_virtual

SOON_S = 3.0  # far less than a server here is silent


@pytest.fixture
def server():
    with web_copy() as made:
        yield made


@pytest.fixture
def shard(tmp_path, server):
    tokens = np.random.default_rng(1).integers(2**16, size=3 * PIECE_BYTES // 2 + 5, dtype="<u2")
    (made,) = write_shards(tmp_path / "there", [tokens])
    server.files[made.name] = (tmp_path / "there" / made.name).read_bytes()
    return made


@pytest.fixture
def worker():
    made = Worker("test")
    yield made
    made.close()


@pytest.fixture
def fetcher(tmp_path, server, worker):
    local = LocalData("ab" * 32, (), tmp_path / "cache")
    mirrors = [Mirror("http://127.0.0.1:9"), Mirror(f"{server.url}/copy")]
    return DataFetcher(local, Net().peer("me"), list, mirrors, worker)


def ended_soon(worker):
    began_s = time.monotonic()
    worker.close()  # waits for the thread
    return time.monotonic() - began_s < SOON_S


def test_a_file_comes_from_a_web_server_after_one_that_is_gone(server, shard, fetcher):
    seen = []
    asyncio.run(fetcher.bring(shard, progress=seen.append))
    assert fetcher.local.find(shard).read_bytes() == server.files[shard.name]
    assert seen == [0, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES, shard.size]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_is_given_up_ends_within_a_piece_and_its_whole_pieces_count(
    tmp_path, server, shard, fetcher, worker, ranges
):
    server.held, server.ranges = 2 * PIECE_BYTES + 1000, ranges
    seen = []

    async def give_up():
        task = asyncio.create_task(fetcher.bring(shard, progress=seen.append))
        came_s = []
        for pieces in (1, 2):
            await until(lambda: PIECE_BYTES * pieces in seen, SOON_S)  # noqa: B023
            came_s.append(fetcher.came_s)
        assert 0 < came_s[0] <= came_s[1]
        await asyncio.sleep(0.05)  # the third piece is being read
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert ended_soon(worker)
    server.held, server.asked[:] = None, []
    other = Worker("other")
    again = DataFetcher(
        LocalData("ab" * 32, (), tmp_path / "cache"),
        Net().peer("me"),
        list,
        [Mirror(f"{server.url}/copy")],
        other,
    )
    asyncio.run(again.bring(shard, progress=seen.append))
    other.close()
    assert again.local.find(shard).read_bytes() == server.files[shard.name]
    assert [asked for _, asked in server.asked] == [f"bytes={2 * PIECE_BYTES}-{shard.size - 1}"]


def test_reading_that_nobody_awaits_any_more_ends_with_a_piece(fetcher, worker):
    async def give_up():
        began = asyncio.Event()
        loop = asyncio.get_running_loop()

        def endless(after):
            loop.call_soon_threadsafe(began.set)
            while True:
                after(1)

        task = asyncio.create_task(fetcher.reading(endless))
        await began.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert ended_soon(worker)


def test_servers_without_the_file_are_named_now_and_then(server, shard, fetcher, caplog):
    server.files.clear()

    async def wait():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await fetcher.bring(shard)

    module = "farflock.node.process.data_fetch"
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{module}.LOOK_EVERY_S", 0.05)
        asyncio.run(wait())
    assert len(server.asked) > 2
    assert [record.message.count("cannot be had") for record in caplog.records] == [1, 1]


def test_what_comes_too_slowly_is_given_up(tmp_path):
    async def whole():
        local = LocalData("ab" * 32, (), tmp_path / "cache")
        fetcher = DataFetcher(local, Net().peer("me"), list, (), Worker("unused"))
        ended = []

        async def come(times):
            try:
                for _ in range(times):
                    await asyncio.sleep(8)
                    fetcher.came_s = asyncio.get_running_loop().time()
                await asyncio.sleep(9)
                return "all"
            finally:
                ended.append(asyncio.get_running_loop().time())

        assert await fetcher.coming(come(5), 10) == "all"
        for call in (partial(come, 5), partial(come, 0)):
            with pytest.raises(NothingCame):
                await fetcher.coming(call(), 7)
        task = asyncio.create_task(fetcher.coming(come(5), 10))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [49, 56, 63, 64]

    run_virtual(whole())
