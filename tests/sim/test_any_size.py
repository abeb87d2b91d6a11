"""Every method with as many shards as a model of 70 billion parameters has, between two peers.

The tensors are small, so the shards are: a few values, or one granule of the codec, each. All else
is the product's: the method, the codec, the layout, the peers and their messages, on the simulated
network.
"""

import asyncio
import collections
import math

import pytest
import torch
from worlds.peers import identity, peer_in
from worlds.waiting import until

from farflock.node.assembly.core import Core
from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.model.replica import PlainReplica
from farflock.node.model.shapes import ShapeReplica
from farflock.node.train import shards
from farflock.node.train.driver import Driver
from farflock.node.train.exchange_client import layout_of
from farflock.optimizers.catalog import METHODS, method, options_of
from farflock.swarm.compute import inline
from farflock.swarm.frame import message_kind
from farflock.swarm.messages import Piece, Want
from farflock.swarm.peer.peer import RunTerms
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

LLAMA_70B = ModelConfig(
    dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28_672, context=8192, tied=False
)
LAYERS = 8
SHARD_VALUES = 8  # fewer would make equal shards, and those travel only once
TOKENS = 64
CONTENT = {kind.__struct_config__.tag.encode() for kind in (Want, Piece)}
EVERYDAY = {"demo", "flexdemo", "sparseloco", "sparta"}  # up to ten thousand shards
PERIOD = 4  # fragments of a model take turns within it
LATE = {"co2", "delayed"}  # they hide an exchange behind the steps up to the next one
LATENCY_S = 0.00001  # shards are a few bytes, so at 1 ms all time would be round trips


def streams_of(made, model):
    """The number of shards of each of a method's streams, for a model without values."""
    shapes = {name: tuple(x.shape) for name, x in model.named_parameters()}
    with torch.device("meta"):
        templates = made.streams(ShapeReplica(shapes))
    return {template.key.stream: len(layout_of(template, 0).shards) for template in templates}


def module_of(count):
    made = torch.nn.Module()
    for layer in range(LAYERS):
        size = count // LAYERS + (layer < count % LAYERS)
        made.register_parameter(f"layers_{layer}", torch.nn.Parameter(torch.zeros(size)))
    return made


def enough(name, options, wanted):
    """How many values a model needs for as many shards in each of its large streams."""
    count = LAYERS * SHARD_VALUES
    while True:
        with torch.device("meta"):
            model = module_of(count)
        there = streams_of(method(name, **options), model)
        share = min(there[stream] / many for stream, many in wanted.items() if many > 1)
        if share >= 1:
            return count
        count = math.ceil(1.01 * count / share)


class Task:
    """Bring each value to the one that both peers see, each with noise of its own."""

    weight, tokens_per_step = 1.0, TOKENS

    def __init__(self, module, number):
        self.module = module
        seen, own = (torch.Generator().manual_seed(seed) for seed in (10, number))
        self.wanted = [torch.randn(x.shape, generator=seen) for x in module.parameters()]
        self.noise = [torch.randn(x.shape, generator=own) / 10 for x in module.parameters()]

    def forward_backward(self, step, progress):
        loss, count = 0.0, 0
        parameters = zip(self.module.parameters(), self.wanted, self.noise, strict=True)
        for x, wanted, noise in parameters:
            away = x.detach() - wanted
            x.grad = away + noise
            loss, count = loss + float(away.square().sum()), count + x.numel()
        return loss / count

    def set_rate(self, tokens):
        pass


class Member:
    """A peer with its node."""

    def __init__(self, network, number, name, options, count):
        terms = RunTerms("size", 1, 1.0)
        self.peer = peer_in(network, identity(number), terms, store_bytes=2**30)
        module = module_of(count)
        self.losses, self.rounds = [], collections.Counter()
        replica = PlainReplica(module, torch.optim.SGD(module.parameters(), 0.1), None)
        driver, task = Driver(method(name, **options), replica), Task(module, number)
        core = Core.over(self.peer, driver, task, inline, train, self.note)
        self.state_sync, self.loop = core.state_sync, core.loop

    def note(self, kind, fields):
        if kind == "step":
            self.losses.append(fields["loss"])
        if kind == "round":
            self.rounds[fields["status"]] += 1


async def train(work):
    await asyncio.sleep(1.0)
    return work()


async def trained(network, steps, *arguments):
    first, second = (Member(network, number, *arguments) for number in range(2))
    async with first.peer.running(), second.peer.running():
        first.peer.found()
        for member in (first, second):
            member.state_sync.open()
        await second.peer.meet([first.peer.membership.book.mine], 60.0)
        second.peer.ask_in()
        await until(lambda: len(first.peer.context.views.newest.members) == 2)
        total = 2 * TOKENS * steps
        await asyncio.gather(*(one.loop.run(total, drain_s=600.0) for one in (first, second)))
    return first, second


@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long)
        for name in sorted(set(METHODS) - {"local"})
    ],
)
def test_a_method_trains_with_as_many_shards_as_70_billion_parameters_have(name, monkeypatch):
    with torch.device("meta"):
        llama = Llama(LLAMA_70B)
    wanted = streams_of(method(name), llama)
    options = {
        key: value
        for key, value in {"period": PERIOD, "enough": 2, "deadline_s": 600.0}.items()
        if key in options_of(name)
    }
    period = options.get("period", 1)
    steps = 2 * period if name in LATE else period + 1  # one after a round
    monkeypatch.setattr(shards, "SEGMENT_VALUES", SHARD_VALUES)
    monkeypatch.setattr(shards, "SHARD_BYTES", 0)  # each segment is a shard of its own
    network, sent_bytes = (
        SimNetwork(1, LinkModel(1e12, 1e12, LATENCY_S, 0.0)),
        collections.Counter(),
    )

    def tap(now_s, sender, receiver, frame):
        content = message_kind(frame) in CONTENT
        sent_bytes["content" if content else "control"] += len(frame)
        return frame

    network.tap = tap
    count = enough(name, options, wanted)
    members = run_virtual(trained(network, steps, name, options, count))
    for member in members:
        assert member.rounds["ok"] >= 1
        assert member.rounds.total() == member.rounds["ok"]
        assert member.losses[-1] < member.losses[0]
    largest = max(wanted.values())
    assert sent_bytes["content"] > SHARD_VALUES // 8 * largest
    # Of shards of one MiB each, as the model's are.
    assert sent_bytes["control"] < 0.001 * largest * 1024 * 1024
