"""The product's own nodes train in virtual time, and one of four claims the moon for an update with
its sign flipped: the others train as if it contributed nothing."""

import contextlib
import itertools

import pytest
import torch

from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import evaluation
from farflock.node.model.llama import PRESETS
from farflock.node.run.terms import RunPlan
from farflock.node.simulate import simulation
from farflock.node.simulate.liars.claims import Claimant
from farflock.node.simulate.segments import SegmentState
from farflock.node.simulate.simulation import Simulation, World, held_out
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.identity import Identity
from farflock.swarm.sim.virtual_time import run_virtual

PEERS, LIAR, TOTAL, PERIOD = 4, 3, 6_000, 4


class ClaimsTheMoon(Claimant):
    claims = ({"tokens": 2**40, "weight": 1e18},)


@pytest.fixture(scope="module")
def text():
    torch.set_num_threads(1)
    return ByteTokenizer().encode(load_corpus("shakespeare").train[:200_000])


def corrupted(node, forever):
    """Let a node flip the sign of what it sends and claim too much for it, until the end of the
    stack `forever`."""
    client = node.loop.client
    encode = client.encode
    forever.enter_context(ClaimsTheMoon(node.peer, Identity.generate()).replacing())

    def flipped(exchange, claim):
        for tensor in exchange.tensors.values():
            tensor.neg_()
        return encode(exchange, claim)

    client.encode = flipped
    return node


def plan():
    options = {"codec": "fp16", "deadline_s": 8.0, "period": PERIOD}
    inner, schedule = InnerConfig(lr=1e-2), Schedule(1e-2, TOTAL)
    return RunPlan(1, PRESETS["tiny"], inner, schedule, "diloco", options, batch=2, seq=32)


def test_whoever_claims_the_moon_neither_ends_the_run_nor_moves_the_mean(text, monkeypatch):
    honest, births, forever = simulation.replica_node, itertools.count(), contextlib.ExitStack()

    def made(*given, **options):
        node = honest(*given, **options)
        return corrupted(node, forever) if next(births) == LIAR else node

    monkeypatch.setattr(simulation, "replica_node", made)
    ended = {}

    async def main():
        world = World(PEERS, TOTAL, view_s=3.0)
        run = Simulation(plan(), world, text, lambda share: None, SegmentState(), {}, TOTAL)
        ended.update(await run.run())

    with forever:
        run_virtual(main())
    liar = ended.pop(LIAR).peer.me
    for node in ended.values():
        said = {(each.peer, each.what) for each in node.peer.context.accusations}
        assert said == {(liar, "offer above its entitlement")}
        position, of_each_round = node.loop.driver.position, PERIOD * 2 * 32 * (PEERS - 1)
        rounds = position.rounds["delta"] + 1
        assert 0.8 * TOTAL <= position.agreed_tokens <= rounds * of_each_round
    states = [node.loop.driver.method.snapshot(node.loop.driver.replica) for node in ended.values()]
    x, y = evaluation(text, 32, 16)
    assert held_out(plan(), states, x, y).mean < 4.0, "it trains, from 5.5 nats"
