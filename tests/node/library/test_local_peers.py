"""The peers of a local swarm, in virtual time."""

import asyncio

import torch
from torch import nn
from worlds.waiting import until

from farflock.node.library.local_swarm import QUICK, LocalPeers
from farflock.node.library.presence import ExternalStep, JoinRequest
from farflock.node.model.replica import PlainReplica
from farflock.node.run.user_terms import fingerprint, wish
from farflock.swarm.compute import inline
from farflock.swarm.peer.peer import STAY_S
from farflock.swarm.sim.virtual_time import run_virtual

COUNT = 8


def join_request():
    model = nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters())
    wished = wish(fingerprint(model, inner), "diloco", {"name": None, "seed": 0}, {})
    return JoinRequest(
        wished, PlainReplica(model, inner, None), ExternalStep(), lambda kind, fields: None
    )


def test_many_peers_are_let_in_by_one_change_of_members():
    peers, everybody = LocalPeers(COUNT, 0, QUICK, inline), asyncio.Barrier(COUNT)

    async def live(rank):
        async with peers.inside(rank, join_request()) as here:
            views = here.peer.context.views
            await until(lambda: len(views.newest.members) == COUNT)
            number = views.newest.number
            await everybody.wait()
            return number

    async def all_lives():
        return await asyncio.gather(*map(live, range(COUNT)))

    assert run_virtual(all_lives()) == [1] * COUNT


def test_a_peer_that_has_left_is_gone_to_the_others_at_once():
    peers, everybody = LocalPeers(2, 0, QUICK, inline), asyncio.Barrier(2)

    async def live(rank):
        async with peers.inside(rank, join_request()) as here:
            views = here.peer.context.views
            await until(lambda: len(views.newest.members) == 2)
            await everybody.wait()
            if rank:
                return
            left_s = asyncio.get_running_loop().time()
            await until(lambda: here.peer.alone)
            return asyncio.get_running_loop().time() - left_s

    async def all_lives():
        return await asyncio.gather(*map(live, range(2)))

    took_s, _ = run_virtual(all_lives())
    assert took_s < STAY_S + 1.0
