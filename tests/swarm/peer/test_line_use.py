"""The lines of a round are used: the bytes of a mean take little longer than the lines need."""

import asyncio
import random

import pytest
from worlds.herd import identity
from worlds.waiting import now, until

from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Reduction, Stream
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

RATE = 12.5e6
SHARD = 2**19


def shard_of(*names):
    return random.Random("/".join(map(str, names))).randbytes(SHARD)


def reduce(number, shard, inputs):
    return Reduction(shard_of(number, shard))


async def fraction(kind, members, shards):
    """Run a round and return the share of its time in which each line had to be busy."""
    network = SimNetwork(1, LinkModel(RATE, RATE, latency_s=0.001, jitter_s=0.0002))
    records = [
        seal(identity(number), Record("run", identity(number).peer, 1, 1, bytes(32)))
        for number in range(members)
    ]
    peers = [
        Peer(
            RunTerms("run", 7, 2.0),
            identity(number),
            network.links(identity(number).peer),
            None,
            incarnation=1,
            record=lambda record=record: record,
        )
        for number, record in enumerate(records)
    ]
    terms = RoundTerms(kind, shards, deadline_s=100.0)
    stream = Stream("weights", terms, 2 * SHARD, reduce, lambda *shard: True)
    running = [peer.running() for peer in peers]
    for each in running:
        await each.__aenter__()
    peers[0].found()
    await asyncio.gather(*(peer.join(records[:1], 60.0) for peer in peers[1:]))
    await until(
        lambda: all(len(peer.context.views.newest.members) == members for peer in peers),
        60,
        "a view of all",
    )
    first = peers[0].context.views.newest.first_round
    for peer in peers:
        peer.open(stream, first - 1, 0)
    start_s = now()
    outcomes = await asyncio.gather(
        *(
            peer.exchange("weights", first, [shard_of(number, n) for n in range(shards)], tokens=1)
            for number, peer in enumerate(peers)
        )
    )
    took_s = now() - start_s
    assert {(outcome.status, len(outcome.participants)) for outcome in outcomes} == {
        ("ok", members)
    }
    for each in reversed(running):
        await each.__aexit__(None, None, None)
    each_way = (members - 1) * shards * SHARD * (1 if kind == "gather" else 2 / members)
    return each_way / RATE / took_s


@pytest.mark.parametrize(
    ("kind", "members", "shards", "least"),
    [("mean", 2, 20, 0.95), ("mean", 4, 40, 0.9), ("mean", 8, 40, 0.9), ("gather", 8, 6, 0.9)],
)
def test_members_that_exchange_at_the_same_time_keep_all_lines_busy(kind, members, shards, least):
    """Each member asks the others for equal parts of what its line carries in a moment, so none
    waits for a line that is long taken by another, and idles."""

    async def main():
        assert await fraction(kind, members, shards) > least

    run_virtual(main())
