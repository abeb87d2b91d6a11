"""Every method with as many shards as a model of 70 billion parameters has, between two peers.

The tensors are small, so the shards are: one granule of the codec each. All else is the product's:
the method, the codec, the layout, the peers and their messages, on the simulated network.
"""

import asyncio
import collections
import math
import time

import pytest
import torch

from farflock.compression.catalog import codec
from farflock.node.loop import Loop
from farflock.node.model.llama import Llama, ModelConfig
from farflock.node.model.replica import PlainReplica
from farflock.node.model.shapes import ShapeReplica
from farflock.node.train import shards
from farflock.node.train.driver import Driver
from farflock.node.train.exchange_client import ExchangeClient
from farflock.node.train.shards import ShardLayout
from farflock.node.train.state_sync import StateSync
from farflock.optimizers.catalog import METHODS, method, options_of
from farflock.optimizers.method import All
from farflock.swarm.compute import inline
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.record import Record, seal
from farflock.swarm.sim.network import LinkModel, SimNetwork
from farflock.swarm.sim.virtual_time import run_virtual

LLAMA_70B = ModelConfig(
    vocab_size=65_536,
    dim=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    ffn_dim=28_672,
    context=8192,
    tied=False,
)
DATA = (b"piece", b"want")  # everything else is control
LAYERS = 8
TOKENS, STEPS = 64, 3


def layouts(made, shapes):
    """The layout of each of a method's streams for a model of these shapes, without its values."""
    with torch.device("meta"):
        templates = made.streams(ShapeReplica(shapes))
    cuts = {}
    for template in templates:
        mine = {name: tuple(x.shape) for name, x in template.tensors.items()}
        comes_back = template.kind == "mean" and template.group == All()
        back = codec(template.return_codec) if comes_back else None
        cuts[template.key.stream] = ShardLayout.of(mine, codec(template.codec), 0, back)
    return cuts


def values(cut):
    return sum(part.count for shard in cut.shards for part in shard)


class Task:
    """Bring each value to the one that all peers see, each with noise of its own."""

    weight, tokens_per_step = 1.0, TOKENS

    def __init__(self, module, number):
        self.module, chance = module, torch.Generator().manual_seed(number)
        seen = torch.Generator().manual_seed(10)
        self.wanted = [torch.randn(x.shape, generator=seen) for x in module.parameters()]
        self.noise = [torch.randn(x.shape, generator=chance) / 10 for x in module.parameters()]

    def forward_backward(self, step, progress):
        loss, count = 0.0, 0
        for x, wanted, noise in zip(self.module.parameters(), self.wanted, self.noise, strict=True):
            away = x.detach() - wanted
            x.grad = away + noise
            loss, count = loss + float(away.square().sum()), count + x.numel()
        return loss / count

    def set_rate(self, tokens):
        pass


def module_of(count):
    made = torch.nn.Module()
    for layer in range(LAYERS):
        size = count // LAYERS + (layer < count % LAYERS)
        made.register_parameter(f"layers_{layer}", torch.nn.Parameter(torch.zeros(size)))
    return made


class Member:
    """A peer with its node."""

    def __init__(self, network, number, options, name, count):
        identity = Identity.from_seed(bytes([number + 1]) * 32)
        self.record = seal(identity, Record("size", identity.peer, 1, 1, curve=bytes(32)))
        links = network.links(identity.peer)
        terms = RunTerms("size", 1, 1.0)
        self.peer = Peer(
            terms,
            identity,
            links,
            None,
            incarnation=1,
            record=lambda: self.record,
            store_bytes=2**30,
        )
        module = module_of(count)
        self.losses, self.rounds = [], collections.Counter()
        replica = PlainReplica(module, torch.optim.SGD(module.parameters(), 0.1), None)
        driver = Driver(method(name, **options), replica)
        client = ExchangeClient(self.peer, 1)
        self.sync = StateSync(self.peer, driver, client, inline)
        self.loop = Loop(
            driver, client, self.sync, Task(module, number), inline, self.train, report=self.note
        )

    async def train(self, work):
        await asyncio.sleep(1.0)
        return work()

    def note(self, kind, fields):
        if kind == "step":
            self.losses.append(fields["loss"])
        if kind == "round":
            self.rounds[fields["status"]] += 1


async def trained(network, options, name, count):
    members = [Member(network, number, options, name, count) for number in range(2)]
    async with members[0].peer.running(), members[1].peer.running():
        members[0].peer.found()
        for member in members:
            member.sync.open()
        await members[1].peer.meet([members[0].record], 60.0)
        members[1].peer.ask_in()
        while len(members[0].peer.context.views.newest.members) < 2:
            await asyncio.sleep(0.1)
        await asyncio.gather(
            *(member.loop.run(2 * TOKENS * STEPS, drain_s=600.0) for member in members)
        )
    return members


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"local"}))
def test_a_method_trains_with_as_many_shards_as_70_billion_parameters_have(name, monkeypatch):
    llama = {x: tuple(p.shape) for x, p in _meta(LLAMA_70B).named_parameters()}
    wanted = {stream: len(cut.shards) for stream, cut in layouts(method(name), llama).items()}
    options = {}
    if "period" in options_of(name):
        options["period"] = 1
    if "deadline_s" in options_of(name):
        options["deadline_s"] = 300.0

    monkeypatch.setattr(
        shards, "SEGMENT_VALUES", 8
    )  # fewer would make equal shards, which travel once
    monkeypatch.setattr(shards, "SHARD_BYTES", 0)
    count = LAYERS * 4096
    for _ in range(3):
        cuts = layouts(
            method(name, **options),
            {x: tuple(p.shape) for x, p in module_of(count).named_parameters()},
        )
        few = min(len(cuts[s].shards) / wanted[s] for s in wanted if wanted[s] > 1)
        count = math.ceil(count / few)
    print(name, count, wanted, {s: len(c.shards) for s, c in cuts.items()})
    control, data = collections.Counter(), 0

    def tap(now_s, sender, receiver, frame):
        nonlocal data
        control["bytes"] += len(frame)
        return frame

    network = SimNetwork(1, LinkModel(1e12, 1e12, 0.001, 0.0))
    network.tap = tap
    began = time.time()
    members = run_virtual(trained(network, options, name, count))
    print(name, "took", time.time() - began, members[0].rounds, members[0].losses, control)


def _meta(config):
    with torch.device("meta"):
        return Llama(config)
