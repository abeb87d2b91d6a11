"""A swarm without a network: several peers' methods in one process, with exact means and misfortune on demand.

Peers step in lockstep. Values are small dyadic numbers wherever a test compares bits, so sums are exact in any order.
"""

import hashlib
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

from farflock.compression.catalog import codec
from farflock.compression.codec import Context
from farflock.node.driver import Apply, Driver
from farflock.node.replica import PlainReplica
from farflock.optimizers.inner import InnerConfig
from farflock.optimizers.method import Progress, RandomGroups, Result

SHAPES = {"weight": (3, 5), "bias": (7,)}


def dyadic(label, shape):
    """Multiples of 1/16 in [-1/4, 1/4], a function of the label."""
    count = int(np.prod(shape))
    bytes_ = np.frombuffer(hashlib.shake_128(label.encode()).digest(count), np.uint8)
    return torch.from_numpy((bytes_ % 9).astype(np.float32) / 16 - 0.25).reshape(shape)


class Toy(nn.Module):
    """Two parameters, equal on all peers at first."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(dyadic(f"initial {name}", shape)))


def noise(peer, step, name, theta):
    """A gradient that depends on peer and step alone."""
    return dyadic(f"{peer} {step} {name}", theta.shape)


def shared(peer, step, name, theta):
    """A gradient that all peers have alike."""
    return dyadic(f"all {step} {name}", theta.shape)


def bowl(peer, step, name, theta):
    """The gradient of |theta - target|²/2, one target for each peer."""
    return theta - dyadic(f"target {peer} {name}", theta.shape)


def zero(peer, step, name, theta):
    return torch.zeros_like(theta)


def through(name, tensors):
    """The tensors as they come out of a codec."""
    out = {}
    for key, x in tensors.items():
        payload, values = bytearray(), torch.empty(x.numel())
        codec(name).encode(x.reshape(-1), Context(), payload)
        codec(name).decode(payload, Context(), values)
        out[key] = values.reshape(x.shape)
    return out


def whole(name, count):
    return [(0, count)]


def nothing(name, count):
    return []


def mask(ranges, x):
    kept = np.zeros(x.numel(), np.float32)
    for start, stop in ranges:
        kept[start:stop] = 1
    return kept.reshape(x.shape)


def exact_mean(contributions):
    """Name -> sum of share·value in the order given; where nobody is in, 0. `contributions`: (weight, tensors, masks)."""
    mean = {}
    for name in contributions[0][1]:
        total = sum(np.float32(weight) * masks[name] for weight, _, masks in contributions)
        share = np.float32(1) / np.maximum(total, np.float32(1e-30))
        parts = [np.float32(weight) * share * masks[name] * x[name].numpy() for weight, x, masks in contributions]
        mean[name] = torch.from_numpy(sum(parts[1:], parts[0]).astype(np.float32))
    return mean


@dataclass
class Peer:
    """One peer: what it trains and what it still waits for."""

    name: str
    replica: PlainReplica
    driver: Driver
    step: int = 0
    answers: dict = field(default_factory=dict)  # key -> (step at which it arrives, result)
    offered: list = field(default_factory=list)  # (step, exchange)
    results: list = field(default_factory=list)
    asleep: bool = False

    @property
    def method(self):
        return self.driver.method

    @property
    def progress(self):
        return Progress(self.step, run_time_s=float(self.step))

    def theta(self):
        return self.replica.read(self.replica.names, "param")

    def outer(self):
        return self.method.snapshot(self.replica)


class Loopback:
    """`taken(peer, round)` gives a function (name, count) -> ranges that made it; `late(peer, round)` the local steps that
    a result takes to arrive; `fails(round)` what nobody agreed on."""

    def __init__(self, make, peers="ab", *, gradient=noise, inner="sgd", lr=1.0, seed=0):
        self.gradient, self.seed = gradient, seed
        self.taken = lambda peer, number: whole
        self.late = lambda peer, number: 0
        self.fails = lambda number: False
        self.log, self._board = {}, defaultdict(dict)
        self._make, self._inner = make, InnerConfig(inner, lr=lr, weight_decay=0.0)
        self.peers = {name: self.build(name) for name in peers}

    def build(self, name):
        module = Toy()
        replica = PlainReplica(module, self._inner.build(module), clip_norm=None)
        return Peer(name, replica, Driver(self._make(), replica))

    def steps(self, count):
        for _ in range(count):
            for peer in self.awake():
                self._step(peer)
            for key, offers in list(self._board.items()):
                if len(offers) == len(self.awake()):
                    self._close(key, self._board.pop(key))
            for peer in self.awake():
                self._settle(peer)

    def awake(self):
        return [peer for peer in self.peers.values() if not peer.asleep]

    def replay(self, name, key):
        """Give a peer a round that was decided while it slept."""
        peer = self.peers[name]
        return peer.driver.replay(key, replace(self.log[key], sent=None, taken={}), peer.progress)

    def _step(self, peer):
        old, theta = peer.replica.read(peer.replica.names, "grad"), peer.theta()
        new = {name: old[name] + self.gradient(peer.name, peer.step, name, x) for name, x in theta.items()}
        peer.replica.write(new, "grad")
        peer.method.local_step(peer.replica, peer.progress)
        peer.step += 1
        for exchange in peer.driver.after_step(peer.progress):
            peer.offered.append((peer.step, exchange))
            self._board[exchange.key][peer.name] = exchange

    def _close(self, key, offers):
        order, (first, *_) = sorted(offers), offers.values()
        groups = [order]
        if isinstance(first.group, RandomGroups):
            random.Random(f"{self.seed} {key.round}").shuffle(order)
            groups = [sorted(order[at : at + 2]) for at in range(0, len(order), 2)]
        for group in groups:
            self._answer(key, {name: offers[name] for name in group})

    def _answer(self, key, offers):
        sent = {name: through(exchange.codec, exchange.tensors) for name, exchange in offers.items()}
        ranges = {
            name: {what: self.taken(name, key.round)(what, x.numel()) for what, x in tensors.items()}
            for name, tensors in sent.items()
        }
        mine = [
            (offers[name].weight, sent[name], {what: mask(ranges[name][what], x) for what, x in sent[name].items()})
            for name in sorted(offers)
        ]
        inside = tuple(name for name in sorted(offers) if any(ranges[name].values()))
        result = Result("failed", key.round + 1)
        if inside and not self.fails(key.round):
            all_in = all(list(r) == [(0, sent[n][w].numel())] for n in offers for w, r in ranges[n].items())
            status = "partial" if not all_in else "alone" if len(offers) == 1 else "ok"
            example = next(iter(offers.values()))
            paired = isinstance(example.group, RandomGroups)  # both hold both payloads, nothing is sent back
            back = exact_mean(mine) if paired else through(example.return_codec, exact_mean(mine))
            weights = tuple(offers[name].weight for name in inside)
            result = Result(status, key.round + 1, inside, weights, mean=back)
        self.log[key] = result
        for name in offers:
            own = result
            if result.status != "failed":
                taken = {what: r for what, r in ranges[name].items() if r}
                own = replace(result, sent=sent[name], taken=taken)
            self.peers[name].answers[key] = (self.peers[name].step + self.late(name, key.round), own)

    def _settle(self, peer):
        for key, (at, result) in list(peer.answers.items()):
            if at <= peer.step:
                del peer.answers[key]
                peer.driver.resolve(key, result)
        while isinstance(action := peer.driver.next(peer.progress), Apply):
            peer.results.append(action.result)
            peer.driver.apply(action, peer.progress)


@pytest.fixture(scope="session")
def loopback():
    """The class: loopback(make_method, peers, gradient=..., inner=..., lr=...)."""
    return Loopback


@pytest.fixture(scope="session")
def gradients():
    """Gradient functions by name."""
    return {"noise": noise, "shared": shared, "bowl": bowl, "zero": zero}


@pytest.fixture(scope="session")
def values():
    """(label, shape) -> small dyadic values."""
    return dyadic


@pytest.fixture(scope="session")
def same():
    """Whether two dictionaries of tensors have equal names and equal bits (0 is not -0)."""

    def equal(a, b):
        return a.keys() == b.keys() and all(
            a[name].dtype == b[name].dtype
            and a[name].shape == b[name].shape
            and bool(
                (
                    a[name].contiguous().reshape(-1).view(torch.uint8)
                    == b[name].contiguous().reshape(-1).view(torch.uint8)
                ).all()
            )
            for name in a
        )

    return equal
