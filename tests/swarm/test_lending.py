"""Chunks that lie on a disk are served, below all others, and to each asker in turn."""

import asyncio

from worlds.chunk_net import MemoryLender, data_of, fetch, in_virtual_time
from worlds.waiting import now

from farflock.swarm.chunk_server import MAX_WANTS, PIECE_BYTES
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.messages import MAX_CHUNK_BYTES, Want

SHARDS = [data_of(MAX_CHUNK_BYTES, seed) for seed in range(3)]


def lends(peer, *chunks, **options):
    lender = MemoryLender(chunks, **options)
    peer.lending.lenders[lender.root] = lender
    return lender


@in_virtual_time
async def test_a_lent_chunk_comes_whole_though_it_is_in_no_store(net):
    lender = lends(net.peer("holder"), *SHARDS)
    reader = net.peer("reader")
    assert await fetch(reader, SHARDS[1], ["holder"])
    assert reader.store.get(digest_of(SHARDS[1])) == SHARDS[1]
    assert lender.reads == 1, "the pieces of a chunk need one read"


@in_virtual_time
async def test_one_that_is_gone_when_it_is_read_is_a_miss(net):
    lender = lends(net.peer("holder"), *SHARDS)

    async def read(digest):
        return None

    lender.read = read
    reader = net.peer("reader")
    done = await reader.fetch(
        digest_of(SHARDS[0]), len(SHARDS[0]), lambda: ["holder"], "pin", 30.0, final=True
    )
    assert not done
    assert now() < 1.0


@in_virtual_time
async def test_while_other_chunks_wait_lent_ones_get_a_quarter_of_the_line(net):
    holder = net.peer("holder", *(data_of(MAX_CHUNK_BYTES, 10 + seed) for seed in range(20)))
    lends(holder, *SHARDS)
    greedy, gentle = net.peer("greedy"), net.peer("gentle")
    others = asyncio.gather(
        *(fetch(greedy, data_of(MAX_CHUNK_BYTES, 10 + seed), ["holder"]) for seed in range(20))
    )
    data = asyncio.gather(*(fetch(gentle, shard, ["holder"]) for shard in SHARDS))
    await asyncio.sleep(3.0)
    lent = holder.lending.sent_bytes
    rest = net.sent_bytes["holder"] - lent
    assert 0.15 * rest < lent < 0.5 * rest
    await others
    await data


@in_virtual_time
async def test_askers_take_turns(net):
    lends(net.peer("holder"), *SHARDS)
    one, other = net.peer("one"), net.peer("other")
    first = asyncio.ensure_future(fetch(one, SHARDS[0], ["holder"]))
    await asyncio.sleep(0.1)
    await fetch(other, SHARDS[1], ["holder"])
    alone_s = len(SHARDS[1]) / net.rate
    assert now() < 2.5 * alone_s, "it shares the line from the start"
    await first


@in_virtual_time
async def test_a_gentle_fetch_has_little_under_way_and_still_uses_the_line(net):
    lends(net.peer("holder"), *SHARDS)
    reader, asked = net.peer("reader"), []

    def tap(sender, to, message, body):
        if isinstance(message, Want):
            asked.append(message.stop - message.start)
        return message, body

    net.tap = tap
    began_s = now()
    for shard in SHARDS:
        assert await reader.fetch(
            digest_of(shard), len(shard), lambda: ["holder"], "pin", 30.0, gently=True
        )
    assert max(asked) <= 1.3e6, "about what a holder sends in a third of a second"
    assert asked[0] == 2 * PIECE_BYTES
    assert now() - began_s < 2 * sum(map(len, SHARDS)) / net.rate


@in_virtual_time
async def test_requests_for_lent_chunks_are_bounded(net):
    holder = net.peer("holder")
    lends(holder, *SHARDS)
    net.peer("asker")
    digest = digest_of(SHARDS[0])
    for place in range(MAX_WANTS + 5):
        holder.receive("asker", Want(digest, 0, PIECE_BYTES * (place + 1)), b"")
    assert holder.dropped["too many wants"] == 5
    holder.receive("asker", Want(digest, PIECE_BYTES, PIECE_BYTES), b"")
    assert holder.dropped["senseless want"] == 1


@in_virtual_time
async def test_a_chunk_of_a_round_does_not_wait_for_those_that_are_fetched_gently(net):
    round_chunk = data_of(2**20, 50)
    many = [data_of(MAX_CHUNK_BYTES, 60 + seed) for seed in range(10)]
    lends(net.peer("holder", round_chunk), *many)
    reader = net.peer("reader")
    data = [
        asyncio.ensure_future(
            reader.fetch(digest_of(each), len(each), lambda: ["holder"], "pin", 60.0, gently=True)
        )
        for each in many
    ]
    await asyncio.sleep(1.0)
    began_s = now()
    assert reader.last_heard_s < 0, "data are no sign that missed rounds come"
    assert await fetch(reader, round_chunk, ["holder"])
    assert reader.last_heard_s > began_s
    assert now() - began_s < 5 * len(round_chunk) / net.rate, "though 40 MiB are under way"
    assert all(await asyncio.gather(*data))
