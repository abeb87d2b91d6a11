"""A node whose parameters have silently parted from the others' finds out and takes over theirs."""

import asyncio

import pytest
import torch

from farflock.swarm.sim.virtual_time import run_virtual

TOKENS, DAMAGED_AT = 3600, 9
OPTIONS = {
    "demo": {"codec": "topk:32/4096", "check_rounds": 6},
    "flexdemo": {"rate": 0.25, "check_rounds": 6},
}


def params(node):
    return node.loop.driver.replica.read(node.loop.driver.replica.names, "param")


def damage(node, scale):
    """Every parameter is a little off: the work of another processor, or of bad memory."""
    generator = torch.Generator().manual_seed(5)
    held = params(node)
    size = sum(float(x.square().sum()) for x in held.values()) / sum(
        x.numel() for x in held.values()
    )
    noise = {
        name: torch.randn(x.shape, generator=generator) * (scale * size**0.5)
        for name, x in held.items()
    }
    node.loop.driver.replica.write({name: x + noise[name] for name, x in held.items()}, "param")


async def train(bench, victim, scale):
    """Three nodes to the end, one of them damaged on its way: each adoption, and the nodes."""
    adopted, nodes = [], {}

    async def live(number):
        async with bench.peer(number).running() as peer:

            def told(kind, fields):
                if kind == "adopt":
                    adopted.append((number, fields["reason"]))

            node = nodes[number] = bench.node(peer, told)
            quick = node.loop.train

            async def step(work):
                if number == victim and node.loop.step == DAMAGED_AT:
                    damage(node, scale)
                return await quick(work)

            node.loop.train = step
            if number == 0:
                node.found()
            else:
                await node.join([bench.record(other) for other in range(number)], 60.0)
            while len(peer.context.views.newest.members) < 3:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.1)
            await node.loop.run(TOKENS, drain_s=30.0)
            done.append(number)
            while len(done) < 3:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.5)
            await node.loop.begin_step()

    done = []
    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(live(number))
            await asyncio.sleep(1.0)
    return adopted, nodes


def apart(nodes):
    """The largest difference of parameters between nodes that have applied equally many rounds."""
    by_round = {}
    for node in nodes.values():
        by_round.setdefault(node.loop.driver.method._book.number, []).append(params(node))
    return max(
        float((one[name] - each[0][name]).abs().max())
        for each in by_round.values()
        for one in each
        for name in one
    )


@pytest.mark.parametrize(("method", "victim"), [("demo", 0), ("flexdemo", 2)])
def test_a_replica_that_drifted_away_adopts_the_state_of_the_others(bench, text, method, victim):
    made = bench(text, method, peers=3, total=TOKENS, **OPTIONS[method])
    adopted, nodes = run_virtual(train(made, victim, 0.1))
    assert [number for number, _ in adopted] == [victim]
    assert "more than 1.00%" in adopted[0][1]
    assert apart(nodes) == 0.0


def test_a_difference_within_the_tolerance_is_borne(bench, text):
    made = bench(text, "demo", peers=3, total=TOKENS, **OPTIONS["demo"])
    adopted, nodes = run_virtual(train(made, 1, 0.001))
    assert adopted == []
    assert apart(nodes) > 0
