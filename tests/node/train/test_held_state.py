"""What a node tells the keys of its view that it holds, while it trains on."""

import asyncio

import pytest
import torch
from worlds.switchboard import Spawner

from farflock.node.train.driver import Driver
from farflock.node.train.held_state import OwnHeldState
from farflock.optimizers.method import All, Exchange, ExchangeKey, RandomGroups
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.chunk_store import Store
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.sim.network import SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

STATE = {"w": torch.ones(2)}


class Method:
    """One stream, whose states are all equal, or each peer's own."""

    def __init__(self, equality, group):
        self.equality, self.group = equality, group

    def streams(self, replica):
        return [Exchange(ExchangeKey("x", 0), "gather", self.group, {})]


@pytest.mark.parametrize(
    ("method", "is_hashed"),
    [(Method("exact", All()), True), (Method("close", RandomGroups(2)), False)],
    ids=["exact", "pairs"],
)
def test_a_state_is_told_after_each_round_and_at_once_where_it_is_not_hashed(method, is_hashed):
    hashed = []

    async def compute(work):
        hashed.append(work)
        return work()

    async def main():
        world = Spawner()
        links = SimNetwork(1).links("me")
        context = PeerContext("run", 0, 1, links, Store(2**20), world.spawn, compute=compute)
        driver = Driver(method, replica=None)
        driver.begin({"x": 6}, 100)
        own = OwnHeldState(context, driver, None, compute, lambda: STATE)
        own.open()
        for last in (6, 7):
            driver.begin({"x": last}, 100 + last)
            assert (own.kept() is None) == is_hashed
            await asyncio.sleep(0)
            held = own.kept()
            assert (held.first, held.tokens) == (last + 1, 100 + last)
            assert held.state == (state_hash(STATE) if is_hashed else b"")
        assert len(hashed) == (2 if is_hashed else 0)
        assert not world.failures

    run_virtual(main())
