"""Peers that serve a part of every stage of a model: their rounds of each stage, and their
views."""

import asyncio

import pytest
from worlds.herd import reduce
from worlds.peers import identity, peer_in
from worlds.waiting import until

from farflock.swarm.messages import Prepare
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.streams import Stream
from farflock.swarm.protocol.views import view_key
from farflock.swarm.roles import EVERY
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

STAGES, SHARDS = (0, 1), 2


def stream(stage, wants="all"):
    terms = RoundTerms("mean", SHARDS, uniform=True)
    return Stream(
        f"grad/{stage}", terms, 100_000, reduce, lambda *shard: True, stage=stage, wants=wants
    )


def peer_of(network, number):
    return peer_in(network, identity(number), RunTerms("run", 7, 2.0), number + 1)


def among(count):
    """Run a test `main(peers)` with `count` replicas of two stages, all of them members."""

    def decorate(main):
        def test():
            async def whole():
                network = SimNetwork(3)
                peers = [peer_of(network, number) for number in range(count)]
                record = peers[0].membership.book.make()
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(live(peer, [] if peer is peers[0] else [record]))
                        for peer in peers
                    ]
                    await until(
                        lambda: all(peer.membership.is_member for peer in peers), 30.0, "everybody"
                    )
                    await until(
                        lambda: len(peers[0].context.views.newest.members) == count,
                        30.0,
                        "one view",
                    )
                    await main(peers)
                    for task in tasks:
                        task.cancel()

            run_virtual(whole())

        test.__name__ = main.__name__
        return test

    return decorate


async def live(peer, records):
    async with peer.running():
        if records:
            await peer.join(records, 30.0)
        else:
            peer.found()
        for stage in STAGES:
            peer.open(stream(stage))
        await asyncio.sleep(1e6)


async def round_of(peers, stage, number):
    shards = [b'{"name": "x"}'] * SHARDS
    return await asyncio.gather(
        *(peer.exchange(f"grad/{stage}", number, shards, tokens=5) for peer in peers),
        return_exceptions=True,
    )


@among(2)
async def test_members_of_every_stage_are_in_each_stages_group_at_its_own_pace(peers):
    view = peers[0].context.views.newest
    assert [member.stage for member in view.members] == [EVERY, EVERY]
    for stage, count in ((0, 3), (1, 1)):
        for number in range(count):
            for outcome in await round_of(peers, stage, number):
                assert set(outcome.participants) == {peer.me for peer in peers}
    assert [peers[0].rounds.newest(f"grad/{stage}") for stage in STAGES] == [2, 0]


@among(3)
async def test_with_replicas_alone_a_wanted_view_also_holds_the_stages_rounds_back(
    peers,
):
    """Otherwise the view could begin with a round in which some have voted, and neither could ever
    be decided."""
    await round_of(peers, 0, 0)
    before = peers[0].context.views.newest
    silent = before.index(peers[2].me, peers[2].context.incarnation)
    ask = Prepare(view_key(before.number + 1), before.hash, (1, silent))
    peers[0].membership.receive(peers[2].me, peers[2].context.incarnation, ask)
    assert [peers[0].context.views.blocked(number, 0) for number in (0, 1)] == [False, True]
    assert peers[0].context.views.blocked(0, 1)


@pytest.mark.parametrize(
    ("after", "expected"), [((7, 3), {0: 7, 1: 3, None: -1}), ((2, 9), {0: 2, 1: 9, None: -1})]
)
def test_how_far_logs_reach_back_is_asked_of_one_stage(after, expected):
    async def main():
        peer = peer_of(SimNetwork(3), 0)
        async with peer.running():
            peer.found()
            for stage, number in zip(STAGES, after, strict=True):
                peer.open(stream(stage), number)
            return {stage: peer.reach(stage) for stage in (0, 1, None)}

    assert run_virtual(main()) == expected
