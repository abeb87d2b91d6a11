"""A swarm without a network: several peers' methods in one process, with exact means, gathers and misfortune on demand.

Peers step in lockstep unless some rest. Values are small dyadic numbers wherever a test compares bits, so sums are exact
in any order.
"""

import functools
import hashlib
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from farflock.compression.catalog import codec
from farflock.node.model.replica import PlainReplica
from farflock.node.train.driver import Apply, Driver
from farflock.node.train.shards import Cut, decode_all
from farflock.optimizers.inner import InnerConfig
from farflock.optimizers.method import Exchange, Progress, RandomGroups, Result

SHAPES = {"weight": (3, 5), "bias": (7,)}


@functools.lru_cache(100_000)
def sixteenths(label, shape):
    """Multiples of 1/16 in [-1/4, 1/4], a function of the label."""
    count = int(np.prod(shape))
    bytes_ = np.frombuffer(hashlib.shake_128(label.encode()).digest(count), np.uint8)
    return torch.from_numpy((bytes_ % 9).astype(np.float32) / 16 - 0.25).reshape(shape)


def dyadic(label, shape):
    """As `sixteenths`, for keeps."""
    return sixteenths(label, tuple(shape)).clone()


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


def through(name, tensors, number, seed=0):
    """The tensors as they come out of a codec, cut as the product cuts them."""
    shapes = {key: tuple(x.shape) for key, x in tensors.items()}
    cut = Cut.of(shapes, codec(name), seed)
    payloads = [cut.encode(index, number, tensors) for index in range(len(cut.shards))]
    return decode_all(cut, number, payloads, shapes)


def whole(name, count):
    return [(0, count)]


def nothing(name, count):
    return []


def mask(ranges, x):
    kept = np.zeros(x.numel(), np.float32)
    for start, stop in ranges:
        kept[start:stop] = 1
    return kept.reshape(x.shape)


def is_whole(ranges, tensors):
    """Whether these ranges hold all of these tensors."""
    return all(list(ranges.get(what, [])) == [(0, x.numel())] for what, x in tensors.items())


def equal_bits(a, b):
    """Whether two tensors have one type, one shape and the same bits (0 is not -0)."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def exact_mean(contributions):
    """Name -> sum of share·value in the order given; where nobody is in, 0. `contributions`: (weight, tensors, masks)."""
    mean = {}
    for name in contributions[0][1]:
        total = sum(np.float32(weight) * masks[name] for weight, _, masks in contributions)
        share = np.float32(1) / np.maximum(total, np.float32(1e-30))
        parts = [np.float32(weight) * share * masks[name] * x[name].numpy() for weight, x, masks in contributions]
        mean[name] = torch.from_numpy(sum(parts[1:], parts[0]).astype(np.float32))
    return mean


def through_disk(state):
    """A state as a joiner or a checkpoint has it: only plain tensors of their own pass."""
    return safetensors.torch.load(safetensors.torch.save(state))


@dataclass
class Peer:
    """One peer: what it trains and what it still waits for."""

    name: str
    replica: PlainReplica
    driver: Driver
    specimens: dict  # by stream, as the method gave them before the first step
    step: int = 0
    now_s: float = 0.0  # the run's time, alike for all
    answers: dict = field(default_factory=dict)  # key -> (step at which it arrives, result)
    applied: dict = field(default_factory=dict)  # by stream, the last round in the method's state
    offered: list = field(default_factory=list)  # (step, exchange)
    results: list = field(default_factory=list)  # of what it asked for, in the order applied
    replayed: list = field(default_factory=list)  # keys of rounds that were decided without it
    asleep: bool = False

    @property
    def method(self):
        return self.driver.method

    @property
    def progress(self):
        return Progress(self.step, run_time_s=self.now_s)

    def theta(self):
        return self.replica.read(self.replica.names, "param")

    def outer(self):
        return self.method.snapshot(self.replica)


@dataclass
class Offer:
    """What one peer brought to a round."""

    exchange: Exchange
    agreed: dict
    since: float  # the run's time


class Loopback:
    """Rounds as in the product: of one stream they close in order, each when all that are awake have offered, when there
    are `enough`, or `patience` ticks after the first offer. Who offers later gets the result without being in it; who does
    not offer has the round replayed before its next step, as soon as its stream is idle.

    Misfortune, of all streams or of those named in `struck`: `taken(peer, round)` gives a function (name, count) -> ranges
    that made it; `late(peer, round)` the local steps that a result takes to arrive; `fails(round)` what nobody agreed on.
    `rests(peer, tick)`: makes no step in this tick (slow machines). `between(peer)` is called between any two calls to a
    peer's method. In an exact method's rounds, `agreed` must have the same bits at all who offer.
    """

    def __init__(self, make, peers="ab", *, gradient=noise, inner="sgd", lr=1.0, seed=0):
        self.gradient, self.seed = gradient, seed
        self.taken = lambda peer, number: whole
        self.late = lambda peer, number: 0
        self.fails = lambda number: False
        self.struck = None
        self.rests = lambda peer, tick: False
        self.between = lambda peer: None
        self.patience, self.tick = 10, 0
        self.log = {}  # key -> result, as who was not in it sees it
        self._board, self._agreed, self._newest = {}, {}, {}
        self._make, self._inner = make, InnerConfig(inner, lr=lr, weight_decay=0.0)
        self.peers = {name: self.build(name) for name in peers}

    def build(self, name):
        """A fresh peer, not yet in the swarm."""
        module = Toy()
        replica = PlainReplica(module, self._inner.build(module), clip_norm=None)
        method = self._make()
        specimens = {one.key.stream: one for one in method.streams(replica)}
        return Peer(name, replica, Driver(method, replica), specimens)

    def awake(self):
        return [peer for peer in self.peers.values() if not peer.asleep]

    # who comes, goes and stops

    def join(self, name, teacher):
        """A joiner that adopts another's snapshot."""
        joiner, source = self.build(name), self.peers[teacher]
        joiner.method.restore(joiner.replica, through_disk(source.outer()), "adopt")
        joiner.applied, joiner.now_s = dict(source.applied), source.now_s
        self.peers[name] = joiner
        return joiner

    def leave(self, name):
        """It takes its open offers with it."""
        for offers in self._board.values():
            offers.pop(name, None)
        return self.peers.pop(name)

    def restart(self, peer):
        """Stop a peer and go on from what a checkpoint holds: the replica, the method's two states, the pending table."""
        old, fresh = peer.replica, self.build(peer.name)
        for what in ("param", "grad", "exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
            stored = old.read(old.names, what)
            fresh.replica.write({name: x for name, x in stored.items() if what in ("param", "grad") or x.any()}, what)
        shared, own = peer.outer(), peer.method.personal(old)
        assert not shared.keys() & own.keys()
        fresh.method.resume(fresh.replica, through_disk({**shared, **own}))
        fresh.driver.take_up(peer.driver.table)
        peer.replica, peer.driver = fresh.replica, fresh.driver

    # time

    def steps(self, count):
        """So many ticks: a local step of everybody, then what can be closed and applied, second phases too."""
        for _ in range(count):
            for peer in self._shuffled(self.awake()):
                peer.now_s = float(self.tick)
                self.catch_up(peer)
                if not self.rests(peer.name, self.tick):
                    self._step(peer)
            self.tick += 1
            while any([self._close_ready(), *(self._settle(peer) for peer in self._shuffled(self.awake()))]):
                pass

    def replay(self, name, key):
        """Give a peer a round that was decided while it slept."""
        peer = self.peers[name]
        second = peer.driver.replay(key, self.log[key], peer.progress)
        peer.applied[key.stream] = key.round
        peer.replayed.append(key)
        self._post(peer, second)
        return second

    def _shuffled(self, peers):
        return random.Random(f"{self.seed} {self.tick}").sample(peers, len(peers))

    def catch_up(self, peer):
        """Replay what was decided without a peer, of all idle streams the first round first; each step begins so."""
        while (key := self._missed(peer)) is not None:
            self.replay(peer.name, key)
            self.between(peer)

    def _missed(self, peer):
        busy = {key.stream for key in peer.driver.pending}
        keys = []
        for stream, one in peer.specimens.items():
            before = one.key.round - one.stride
            last = peer.applied.setdefault(stream, self._newest.get(stream, before))
            keys.append(replace(one.key, round=last + one.stride))
        return min(
            (key for key in keys if key in self.log and key.stream not in busy), key=lambda k: k.round, default=None
        )

    def _step(self, peer):
        old, theta = peer.replica.read(peer.replica.names, "grad"), peer.theta()
        new = {name: old[name] + self.gradient(peer.name, peer.step, name, x) for name, x in theta.items()}
        peer.replica.write(new, "grad")
        peer.method.local_step(peer.replica, peer.progress)
        peer.step += 1
        peer.now_s += 1.0
        self.between(peer)
        self._post(peer, peer.driver.after_step(peer.progress))
        self.between(peer)

    def _settle(self, peer):
        """Apply what has arrived, in the driver's order; deadlines are over at once, so nothing is waited for."""
        for key, (at, result) in list(peer.answers.items()):
            if at <= peer.step:
                del peer.answers[key]
                peer.driver.resolve(key, result)
        moved = False
        while isinstance(action := peer.driver.next(replace(peer.progress, run_time_s=math.inf)), Apply):
            key, moved = action.exchange.key, True
            peer.results.append(action.result)
            second = peer.driver.apply(action, peer.progress)
            peer.applied[key.stream] = key.round
            self._post(peer, second)
            self.between(peer)
        return moved

    # rounds

    def _post(self, peer, exchanges):
        for exchange in exchanges:
            key, one = exchange.key, peer.specimens[exchange.key.stream]
            on_axis = key.round >= one.key.round and (key.round - one.key.round) % one.stride == 0
            assert on_axis, (
                f"{key} is none of the rounds {one.key.round}, {one.key.round + one.stride}, ... of its stream"
            )
            peer.offered.append((peer.step, exchange))
            agreed = peer.method.agreed(peer.replica, key.stream) if peer.method.equality == "exact" else {}
            offer = Offer(exchange, agreed, peer.now_s)
            self._require_agreement(peer.name, key, offer)
            if key in self.log:
                self._answer(peer.name, offer, self.log[key], ranges={})
            else:
                self._board.setdefault(key, {})[peer.name] = offer

    def _require_agreement(self, name, key, offer):
        first = self._agreed.setdefault(key, offer.agreed)
        differ = [
            what
            for what in first.keys() | offer.agreed.keys()
            if not equal_bits(first.get(what), offer.agreed.get(what))
        ]
        assert not differ, f"{name} begins {key} with another state than those before it: {sorted(differ)}"

    def _close_ready(self):
        ready = [key for key, offers in self._board.items() if offers and self._ready(key, offers)]
        for key in ready:
            self._close(key, self._board.pop(key))
        return bool(ready)

    def _ready(self, key, offers):
        one = next(iter(offers.values())).exchange
        if key.stream in self._newest and key.round != self._newest[key.stream] + one.stride:
            return False
        missing = [peer for peer in self.awake() if peer.name not in offers]
        waited = self.tick - min(offer.since for offer in offers.values())
        return not missing or 0 < one.enough <= len(offers) or waited >= self.patience

    def _close(self, key, offers):
        self._newest[key.stream] = key.round
        groups = [list(offers)]
        if isinstance(next(iter(offers.values())).exchange.group, RandomGroups):
            order = sorted(offers)
            random.Random(f"{self.seed} {key.round}").shuffle(order)
            groups = [sorted(order[at : at + 2]) for at in range(0, len(order), 2)]
        for group in groups:
            self._decide(key, {name: offers[name] for name in group})

    def _decide(self, key, offers):
        """What a group agrees on; in a gather with `enough` the first ones are in, wholly or not at all."""
        one = next(iter(offers.values())).exchange
        early = list(offers)[: one.enough or len(offers)]
        sent = {name: self._sent(offer) for name, offer in offers.items()}
        ranges = {name: self._ranges(name, one, sent[name]) if name in early else {} for name in sorted(offers)}
        inside = [name for name in sorted(offers) if any(ranges[name].values())]
        result = Result("failed", key.round + one.stride)
        if len(inside) >= max(one.min_participants, 1) and not (self._strikes(key) and self.fails(key.round)):
            all_in = all(is_whole(ranges[name], sent[name]) for name in offers)
            paired = isinstance(one.group, RandomGroups)
            everybody = paired or {peer.name for peer in self.awake()} <= offers.keys()
            status = "partial" if not (all_in and everybody) else "alone" if len(offers) == 1 else "ok"
            weights = tuple(offers[name].exchange.weight for name in inside)
            masks = {
                name: {what: mask(ranges[name].get(what, []), x) for what, x in sent[name].items()} for name in inside
            }
            mean = exact_mean([(weight, sent[name], masks[name]) for weight, name in zip(weights, inside, strict=True)])
            if one.kind == "mean" and not paired:  # of pairs and gathers all hold all payloads, nothing is sent back
                mean = through(one.return_codec, mean, key.round, self.seed)
            gathered = {name: sent[name] for name in inside} if one.kind == "gather" else None
            result = Result(status, result.next_round, tuple(inside), weights, mean=mean, gathered=gathered)
        self.log[key] = result
        for name in offers:
            self._answer(name, offers[name], result, ranges[name], sent[name])

    def _sent(self, offer):
        return through(offer.exchange.codec, offer.exchange.tensors, offer.exchange.key.round, self.seed)

    def _ranges(self, name, one, sent):
        """What of a contribution made it; a gather takes all of it or nothing."""
        if not self._strikes(one.key):
            return {what: whole(what, x.numel()) for what, x in sent.items()}
        ranges = {what: self.taken(name, one.key.round)(what, x.numel()) for what, x in sent.items()}
        return ranges if one.kind == "mean" or is_whole(ranges, sent) else {}

    def _strikes(self, key):
        return self.struck is None or key.stream in self.struck

    def _answer(self, name, offer, result, ranges, sent=None):
        peer, key = self.peers[name], offer.exchange.key
        if result.status != "failed":
            taken = {what: found for what, found in ranges.items() if found}
            result = replace(result, sent=sent or self._sent(offer), taken=taken)
        late = self.late(name, key.round) if self._strikes(key) else 0
        peer.answers[key] = (peer.step + late, result)


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
        return a.keys() == b.keys() and all(equal_bits(a[name], b[name]) for name in a)

    return equal
