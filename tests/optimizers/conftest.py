"""A loopback swarm for methods: M virtual peers in one process, every payload through its codec, the mean in exact
canonical order, and hooks for all that can befall an exchange."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn

from farflock.compression.catalog import codec
from farflock.compression.codec import Context
from farflock.node.replica import PlainReplica
from farflock.optimizers.catalog import method as build
from farflock.optimizers.inner import InnerConfig
from farflock.optimizers.method import All, Exchange, Key, Progress, Result


class Toy(nn.Module):
    """A quadratic bowl with a matrix, a bias and a scalar; its centre moves from batch to batch and from peer to peer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 8 - 0.5)
        self.bias = nn.Parameter(torch.arange(5.0) / 4)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def loss(self, seed):
        generator = torch.Generator().manual_seed(seed)
        centres = [2 + torch.randn(p.shape, generator=generator) / 4 for p in self.parameters()]
        return sum(((p - c) ** 2).sum() / 2 for p, c in zip(self.parameters(), centres, strict=True))


class Vectors:
    """The smallest replica: parameters and gradients in dictionaries, theta <- theta - lr·gradient."""

    lr = 0.25

    def __init__(self, **values):
        self.tensors = {"param": {name: torch.as_tensor(value).clone() for name, value in values.items()}}
        self.tensors["grad"] = {name: torch.zeros_like(value) for name, value in self.tensors["param"].items()}

    @property
    def names(self):
        return tuple(self.tensors["param"])

    @property
    def shapes(self):
        return {name: tuple(value.shape) for name, value in self.tensors["param"].items()}

    def read(self, names, what):
        kept = self.tensors.get(what, {})
        return {name: kept[name].clone() if name in kept else torch.zeros(self.shapes[name]) for name in names}

    def write(self, tensors, what, mix=1.0):
        for name, new in tensors.items():
            assert new.shape == self.shapes[name]
            self.tensors.setdefault(what, {})[name] = new.clone()

    def inner_step(self, lr=None):
        for name, gradient in self.tensors["grad"].items():
            self.tensors["param"][name] = self.tensors["param"][name] - self.lr * gradient
            self.tensors["grad"][name] = torch.zeros_like(gradient)


def through(spec, number, tensors):
    """What arrives of these tensors after this codec."""
    arrived = {}
    for name, tensor in tensors.items():
        payload, out = bytearray(), torch.empty(tensor.numel())
        context = Context(7, number, name, 0)
        codec(spec).encode(tensor.reshape(-1).contiguous(), context, payload)
        codec(spec).decode(bytes(payload), context, out)
        arrived[name] = out.reshape(tensor.shape)
    return arrived


def whole(tensors):
    return {name: [(0, tensor.numel())] for name, tensor in tensors.items()}


def mean_of(contributions):
    """(weight, tensors, taken) in order: each element's weighted mean over those whose range holds it."""
    mean = {}
    for name, like in contributions[0][1].items():
        masks = []
        for weight, _, taken in contributions:
            mask = torch.zeros(like.numel())
            for start, stop in taken.get(name, ()):
                mask[start:stop] = weight
            masks.append(mask.reshape(like.shape))
        total = torch.zeros_like(like)
        for mask in masks:
            total = total + mask
        total = torch.where(total == 0, torch.ones_like(total), total)
        added = torch.zeros_like(like)
        for (_, tensors, _), mask in zip(contributions, masks, strict=True):
            added = added + tensors[name] * (mask / total)
        mean[name] = added
    return mean


@dataclass
class Virtual:
    """One virtual peer: a method, its replica, and what waits for an answer."""

    name: str
    method: object
    module: nn.Module | None
    replica: object
    step: int = 0
    applied: int = -1
    pending: list = field(default_factory=list)  # (exchange, result, step of the snapshot, steps that the answer takes)
    asked: list = field(default_factory=list)
    results: list = field(default_factory=list)

    @property
    def theta(self):
        return self.replica.read(self.replica.names, "param")

    @property
    def state(self):
        return self.method.snapshot(self.replica)

    def train(self, seeds):
        for seed in seeds:
            if self.module is not None:
                (self.module.loss(seed) / len(seeds)).backward()
        self.method.local_step(self.replica, Progress(self.step))
        self.step += 1

    def take(self, exchange, result):
        self.results.append((exchange.key, result))
        assert self.method.apply(self.replica, exchange, result) == []


@dataclass
class Loopback:
    """M peers in step. `fate(peer, round)`: "in"; "lost", the payload does not count; "late", so does the answer, and the
    round comes from the log. `steps(peer, round)`: how many local steps the answer takes. `ranges(peer, round)`: which flat
    ranges of the payload count (None: all). `fails(round)`: nothing is agreed."""

    make: Callable
    count: int
    fate: Callable = lambda peer, number: "in"
    steps: Callable = lambda peer, number: 0
    ranges: Callable = lambda peer, number: None
    fails: Callable = lambda number: False
    seeds: Callable = lambda peer, step: [1000 * step + int(peer[1:])]
    inner: InnerConfig = field(default_factory=lambda: InnerConfig("adamw", lr=0.05))
    names: list | None = None
    clip: float | None = None
    log: dict = field(default_factory=dict)
    peers: list = field(default_factory=list)

    def __post_init__(self):
        for index in range(self.count):
            self.add(self.names[index] if self.names else f"p{index}")

    def add(self, name, teacher=None):
        """A peer with the first weights; with a teacher it adopts its state, as a joiner does."""
        module = Toy()
        peer = Virtual(name, self.make(), module, PlainReplica(module, self.inner.build(module), self.clip))
        if teacher is not None:
            peer.method.restore(peer.replica, teacher.state, "adopt")
            peer.applied, peer.step = teacher.applied, teacher.step
        self.peers = sorted([*self.peers, peer], key=lambda peer: peer.name)
        return peer

    def run(self, ticks):
        for _ in range(ticks):
            self.tick()
        return self

    def tick(self):
        """A local step of everybody, the exchanges that it makes due, the answers that have come."""
        asking = {}
        for peer in self.peers:
            peer.train(self.seeds(peer.name, peer.step))
            for exchange in peer.method.due(peer.replica, Progress(peer.step)):
                peer.asked.append(exchange.key)
                asking.setdefault(exchange.key, []).append((peer, exchange))
        for key, offers in sorted(asking.items(), key=lambda item: (item[0].stream, item[0].round)):
            for group in self._groups(offers, key.round):
                self._exchange(key, group)
        for peer in self.peers:
            self._deliver(peer)

    def _groups(self, offers, number):
        if isinstance(offers[0][1].group, All):
            return [offers]
        shuffled = random.Random(number).sample(offers, len(offers))
        return [
            sorted(shuffled[at : at + 2], key=lambda offer: offer[0].name) for at in range(0, len(shuffled), 2)
        ]

    def _exchange(self, key, group):
        pairs = not isinstance(group[0][1].group, All)
        sent = {peer.name: through(exchange.codec, key.round, exchange.tensors) for peer, exchange in group}
        entries, taken, weights = [], {}, {}
        for peer, exchange in group:
            if self.fails(key.round) or self.fate(peer.name, key.round) != "in":
                continue
            part = self.ranges(peer.name, key.round)
            taken[peer.name] = whole(exchange.tensors) if part is None else part
            weights[peer.name] = exchange.weight
            entries.append((exchange.weight, sent[peer.name], taken[peer.name]))
        if pairs and len(entries) < len(group):  # a pair that failed: each has only itself
            self._failed(key, group)
            return
        if not entries:
            self._failed(key, group)
            return
        mean = mean_of(entries)
        mean = mean if pairs else through(group[0][1].return_codec, key.round, mean)
        members = tuple(sorted(taken))
        status = "alone" if len(self.peers) == 1 or (pairs and len(group) == 1) else "ok" if len(entries) == len(group) else "partial"
        agreed = Result(status, key.round + 1, members, tuple(weights[name] for name in members), mean=mean)
        if not pairs:
            self.log[key.round] = agreed
        for peer, exchange in group:
            result = replace(agreed, sent=sent[peer.name], taken=taken.get(peer.name, {}))
            if self.fate(peer.name, key.round) == "late":
                result = Result("failed", key.round + 1)
            peer.pending.append((exchange, result, peer.step, self.steps(peer.name, key.round)))

    def _failed(self, key, group):
        for peer, exchange in group:
            peer.pending.append((exchange, Result("failed", key.round + 1), peer.step, self.steps(peer.name, key.round)))

    def _deliver(self, peer):
        for waiting in list(peer.pending):
            exchange, result, since, wanted = waiting
            if peer.step - since >= wanted:
                peer.pending.remove(waiting)
                peer.take(exchange, replace(result, steps_since=peer.step - since))
                if result.status != "failed":
                    peer.applied = exchange.key.round
        behind = max(self.log, default=-1)
        while not peer.pending and peer.applied < behind:
            peer.applied += 1
            if peer.applied in self.log:
                stream = peer.method.streams(peer.replica)[0].key.stream
                specimen = Exchange(Key(stream, peer.applied), "mean", All(), {})
                peer.take(specimen, replace(self.log[peer.applied], sent=None, taken={}))


QUICK = {
    "local": {},
    "ddp": {"codec": "fp32", "return_codec": "fp32"},
    "diloco": {"period": 3, "codec": "fp32", "return_codec": "fp32"},
    "noloco": {"period": 3, "codec": "fp32"},
}


@pytest.fixture(scope="session")
def loopback():
    """The class `Loopback`."""
    return Loopback


@pytest.fixture(scope="session")
def vectors():
    """The class `Vectors`."""
    return Vectors


@pytest.fixture(scope="session")
def toy():
    """The class `Toy`."""
    return Toy


@pytest.fixture(scope="session")
def arrive():
    """`through(codec, round, tensors)`: what arrives of tensors."""
    return through


@pytest.fixture(scope="session")
def maker():
    """(name, options) -> a function that makes such methods, lossless and with short rounds unless told otherwise."""

    def options_for(name, **options):
        return lambda: build(name, **{**QUICK[name], **options})

    return options_for


@pytest.fixture(scope="session")
def everything():
    """Flat ranges that hold all of some tensors."""
    return whole
