"""A swarm without a network: several peers' methods in one process, with exact means, gathers and
misfortune on demand. The laws of methods (optimizers/testing/check.py) run on it.

Peers step in lockstep unless some rest. Values are small dyadic numbers, so sums are exact in any
order and bits can be compared. A `Rig` provides what a node puts around a method (driver, replica,
codecs), so that the laws run on the very code that a node runs.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from farflock.optimizers.method import (
    Exchange,
    ExchangeKey,
    Method,
    Progress,
    RandomGroups,
    Ranges,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.blocks import LazyTensors
from farflock.optimizers.parts.inner import InnerConfig, InnerName
from farflock.optimizers.parts.state import copies

Gradient = Callable[[str, int, str, Tensor], Tensor]  # (peer, step, name, theta) -> the gradient
TakenRanges = np.ndarray[Any, np.dtype[np.float32]]
Taker = Callable[[str, int], Ranges]  # (name, values) -> the flat ranges that were taken


class LoopbackDriver(Protocol):
    """A method and its pending exchanges, as the loopback drives them."""

    method: Method

    @property
    def pending(self) -> tuple[ExchangeKey, ...]:
        """The exchanges without an applied result, oldest first."""
        ...

    def after_step(self, progress: Progress) -> list[Exchange]:
        """Return the exchanges to start after a local step."""
        ...

    def resolve(self, key: ExchangeKey, result: Result) -> None:
        """Note the swarm's answer to an exchange."""
        ...

    def apply_next(self, progress: Progress) -> tuple[Exchange, Result, list[Exchange]] | None:
        """Apply the next result, as if past all deadlines; return it and second-phase exchanges."""
        ...

    def replay(self, key: ExchangeKey, result: Result, progress: Progress) -> list[Exchange]:
        """Hand the method a round that was decided without this peer."""
        ...

    def renewed(self, method: Method, replica: Replica) -> "LoopbackDriver":
        """Return a driver of another method that takes over the pending exchanges."""
        ...


class Rig(Protocol):
    """The parts that a node puts around its method."""

    def driver(self, method: Method, replica: Replica) -> LoopbackDriver:
        """Return a driver with nothing pending."""
        ...

    def replica(self, module: nn.Module, inner: torch.optim.Optimizer) -> Replica:
        """Return a replica that trains a module, without clipping."""
        ...

    def decoded(
        self, codec: str, tensors: Tensors, round_number: int, seed: int
    ) -> dict[str, Tensor]:
        """Return the tensors as they come out of a codec."""
        ...

    def chance(self) -> bytes:
        """Return a fingerprint of the process's random generators, which any draw changes."""
        ...


SHAPES = {"weight": (3, 5), "bias": (7,)}


@functools.lru_cache(100_000)
def sixteenths(label: str, shape: tuple[int, ...]) -> Tensor:
    """Return multiples of 1/16 in [-1/4, 1/4], a function of the label. Cached: do not modify."""
    count = int(np.prod(shape))
    bytes_ = np.frombuffer(hashlib.shake_128(label.encode()).digest(count), np.uint8)
    return torch.from_numpy((bytes_ % 9).astype(np.float32) / 16 - 0.25).reshape(shape)


def dyadic(label: str, shape: Sequence[int]) -> Tensor:
    """Return a copy of `sixteenths`."""
    return sixteenths(label, tuple(shape)).clone()


class Toy(nn.Module):
    """Two parameters, equal on all peers at first."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(dyadic(f"initial {name}", shape)))


def noise(peer: str, step: int, name: str, theta: Tensor) -> Tensor:
    """Return a gradient that depends on peer and step alone."""
    return dyadic(f"{peer} {step} {name}", theta.shape)


def shared(peer: str, step: int, name: str, theta: Tensor) -> Tensor:
    """Return a gradient that is the same for all peers."""
    return dyadic(f"all {step} {name}", theta.shape)


def bowl(peer: str, step: int, name: str, theta: Tensor) -> Tensor:
    """Return the gradient of |theta - target|²/2, with one target per peer."""
    return theta - dyadic(f"target {peer} {name}", theta.shape)


def zero(peer: str, step: int, name: str, theta: Tensor) -> Tensor:
    """Return a zero gradient."""
    return torch.zeros_like(theta)


def whole(name: str, count: int) -> Ranges:
    """Return the ranges if all of a tensor was taken."""
    return [(0, count)]


def nothing(name: str, count: int) -> Ranges:
    """Return the ranges if nothing of a tensor was taken."""
    return []


def mask(ranges: Ranges, x: Tensor) -> TakenRanges:
    """Return 1 in these flat ranges, 0 elsewhere."""
    kept = np.zeros(x.numel(), np.float32)
    for start, stop in ranges:
        kept[start:stop] = 1
    return kept.reshape(x.shape)


def is_whole(ranges: Mapping[str, Ranges], tensors: Tensors) -> bool:
    """Return whether these ranges cover all of these tensors."""
    return all(list(ranges.get(what, [])) == [(0, x.numel())] for what, x in tensors.items())


def equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two tensors have one type, one shape and the same bits (0 is not -0)."""
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = [x.cpu().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*bits)


def same(a: Tensors, b: Tensors) -> bool:
    """Return whether two dictionaries of tensors have equal names and equal bits (0 is not -0)."""
    return a.keys() == b.keys() and all(equal_bits(a[name], b[name]) for name in a)


def exact_mean(
    contributions: Sequence[tuple[float, Tensors, Mapping[str, TakenRanges]]],
) -> dict[str, Tensor]:
    """Return the weighted mean by name, summed in the given order; 0 where there is no
    contribution. `contributions` are (weight, tensors, masks)."""
    mean: dict[str, Tensor] = {}
    for name in contributions[0][1]:
        total = sum(np.float32(weight) * masks[name] for weight, _, masks in contributions)
        share = np.float32(1) / np.maximum(total, np.float32(1e-30))
        terms = [
            np.float32(weight) * share * masks[name] * x[name].numpy()
            for weight, x, masks in contributions
        ]
        mean[name] = torch.from_numpy(np.asarray(sum(terms[1:], terms[0]), np.float32))
    return mean


def through_disk(state: State) -> State:
    """Return a state as a joiner or a checkpoint gets it: only contiguous plain tensors survive."""
    on_host = {name: x.cpu() for name, x in state.items()}
    return safetensors.torch.load(safetensors.torch.save(on_host))


@dataclass
class LoopbackPeer:
    """One peer: what it trains and what it still waits for."""

    name: str
    replica: Replica
    driver: LoopbackDriver
    templates: dict[str, Exchange]  # by stream, as the method gave them before the first step
    step: int = 0
    now_s: float = 0.0  # the run's time, the same for all
    # key -> (step at which it arrives, result)
    answers: dict[ExchangeKey, tuple[int, Result]] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)  # stream -> last applied round
    offered: list[tuple[int, Exchange]] = field(default_factory=list)  # (step, exchange)
    results: list[Result] = field(default_factory=list)  # of own exchanges, as applied
    replayed: list[ExchangeKey] = field(default_factory=list)  # rounds decided without it
    asleep: bool = False

    @property
    def method(self) -> Method:
        """The method that the driver drives."""
        return self.driver.method

    @property
    def progress(self) -> Progress:
        """The peer's step and clock."""
        return Progress(self.step, run_time_s=self.now_s)

    def theta(self) -> dict[str, Tensor]:
        """Return the peer's parameters."""
        return dict(self.replica.read(self.replica.names, "param"))

    def outer(self) -> State:
        """Return the peer's snapshot."""
        return self.method.snapshot(self.replica)

    def at_home(self, result: Result) -> Result:
        """Return a result whose tensors are where the peer's method computes."""
        home = self.replica.allocate((0,)).device

        def moved(tensors: Tensors | None) -> Tensors | None:
            return tensors and {name: x.to(home) for name, x in tensors.items()}

        gathered = result.gathered and {
            who: {name: x.to(home) for name, x in tensors.items()}
            for who, tensors in result.gathered.items()
        }
        return replace(result, mean=moved(result.mean), sent=moved(result.sent), gathered=gathered)


@dataclass
class LoopbackOffer:
    """A peer's contribution to a round."""

    exchange: Exchange
    agreed: State
    since: float  # the run's time


class Loopback:
    """A swarm in one process, with rounds as in the product: a stream's rounds close in order.

    Each closes when all awake peers have offered, when there are `enough` offers, or
    `timeout_ticks` ticks after the first. A peer that offers later gets the result without being in
    it. For a peer that does not offer, the round is replayed before its next step, once its stream
    is idle.

    Misfortunes strike all streams, or those in `struck`: `taken(peer, round)` returns a function
    (name, count) -> taken ranges; `late(peer, round)` the local steps until a result arrives;
    `fails(round)` whether the round fails. `rests(peer, tick)`: the peer makes no step in this tick
    (slow machines). `between(peer)` is called between any two calls to a peer's method. In an exact
    method's rounds, `agreed` must have the same bits at all offering peers.
    """

    def __init__(
        self,
        make: Callable[[], Method],
        rig: Rig,
        peers: Iterable[str] = "ab",
        *,
        gradient: Gradient = noise,
        inner: InnerName = "sgd",
        lr: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.gradient, self.seed = gradient, seed
        self.taken: Callable[[str, int], Taker] = lambda peer, number: whole
        self.late: Callable[[str, int], int] = lambda peer, number: 0
        self.fails: Callable[[int], bool] = lambda number: False
        self.struck: Iterable[str] | None = None
        self.rests: Callable[[str, int], bool] = lambda peer, tick: False
        self.between: Callable[[LoopbackPeer], None] = lambda peer: None
        self.timeout_ticks, self.tick = 10, 0
        self.drops = True  # lazy tensors are dropped once they are copied, as in a node
        self.log: dict[ExchangeKey, Result] = {}  # results as a peer outside of the round sees them
        self._board: dict[ExchangeKey, dict[str, LoopbackOffer]] = {}
        self._agreed: dict[ExchangeKey, State] = {}
        self._newest: dict[str, int] = {}
        self._make, self._rig, self._inner = make, rig, InnerConfig(inner, lr=lr, weight_decay=0.0)
        self.peers = {name: self.build(name) for name in peers}

    def build(self, name: str) -> LoopbackPeer:
        """Return a fresh peer, not yet in the swarm."""
        module = Toy()
        replica = self._rig.replica(module, self._inner.build(module))
        method = self._make()
        templates = {one.key.stream: one for one in method.streams(replica)}
        return LoopbackPeer(name, replica, self._rig.driver(method, replica), templates)

    def awake(self) -> list[LoopbackPeer]:
        """Return the peers that are not asleep."""
        return [peer for peer in self.peers.values() if not peer.asleep]

    # joining, leaving, restarting

    def join(self, name: str, teacher: str) -> LoopbackPeer:
        """Add a joiner that adopts another peer's snapshot."""
        joiner, source = self.build(name), self.peers[teacher]
        joiner.method.restore(joiner.replica, through_disk(source.outer()), "adopt")
        joiner.applied, joiner.now_s = dict(source.applied), source.now_s
        self.peers[name] = joiner
        return joiner

    def leave(self, name: str) -> LoopbackPeer:
        """Remove a peer together with its open offers."""
        for offers in self._board.values():
            offers.pop(name, None)
        return self.peers.pop(name)

    def restart(self, peer: LoopbackPeer) -> None:
        """Restart a peer from a checkpoint: replica, both method states, pending exchanges."""
        old, fresh = peer.replica, self.build(peer.name)
        for what in ("param", "grad", "exp_avg", "exp_avg_sq", "momentum_buffer", "step"):
            stored = old.read(old.names, what)
            fresh.replica.write(
                {name: x for name, x in stored.items() if what in ("param", "grad") or x.any()},
                what,
            )
        shared, own = peer.outer(), peer.method.personal(old)
        assert not shared.keys() & own.keys()
        fresh.method.resume(fresh.replica, through_disk({**shared, **own}))
        peer.replica, peer.driver = fresh.replica, peer.driver.renewed(fresh.method, fresh.replica)

    # time

    def steps(self, count: int) -> None:
        """Run ticks: local steps of all peers, then close and apply all that is ready."""
        for _ in range(count):
            for peer in self._shuffled(self.awake()):
                peer.now_s = float(self.tick)
                self.catch_up(peer)
                if not self.rests(peer.name, self.tick):
                    self._step(peer)
            self.tick += 1
            while any(
                [
                    self._close_ready(),
                    *(self._settle(peer) for peer in self._shuffled(self.awake())),
                ]
            ):
                pass

    def replay(self, name: str, key: ExchangeKey) -> list[Exchange]:
        """Give a peer a round that was decided while it slept."""
        peer = self.peers[name]
        second = peer.driver.replay(key, peer.at_home(self.log[key]), peer.progress)
        peer.applied[key.stream] = key.round
        peer.replayed.append(key)
        self._post(peer, second)
        return second

    def _shuffled(self, peers: list[LoopbackPeer]) -> list[LoopbackPeer]:
        return random.Random(f"{self.seed} {self.tick}").sample(peers, len(peers))

    def catch_up(self, peer: LoopbackPeer) -> None:
        """Replay rounds decided without a peer, lowest first, of idle streams; starts each step."""
        while (key := self._missed(peer)) is not None:
            self.replay(peer.name, key)
            self.between(peer)

    def _missed(self, peer: LoopbackPeer) -> ExchangeKey | None:
        busy = {key.stream for key in peer.driver.pending}
        keys = []
        for stream, one in peer.templates.items():
            before = one.key.round - one.stride
            last = peer.applied.setdefault(stream, self._newest.get(stream, before))
            keys.append(replace(one.key, round=last + one.stride))
        return min(
            (key for key in keys if key in self.log and key.stream not in busy),
            key=lambda k: k.round,
            default=None,
        )

    def _step(self, peer: LoopbackPeer) -> None:
        old, theta = peer.replica.read(peer.replica.names, "grad"), peer.theta()
        new = {
            name: old[name] + self.gradient(peer.name, peer.step, name, x.cpu()).to(x.device)
            for name, x in theta.items()
        }
        peer.replica.write(new, "grad")
        peer.method.local_step(peer.replica, peer.progress)
        peer.step += 1
        peer.now_s += 1.0
        self.between(peer)
        self._post(peer, peer.driver.after_step(peer.progress))
        self.between(peer)

    def _settle(self, peer: LoopbackPeer) -> bool:
        """Apply what has arrived, in the driver's order; all deadlines count as over."""
        for key, (at, result) in list(peer.answers.items()):
            if at <= peer.step:
                del peer.answers[key]
                peer.driver.resolve(key, result)
        moved = False
        while (settled := peer.driver.apply_next(peer.progress)) is not None:
            exchange, result, second = settled
            moved = True
            peer.results.append(result)
            peer.applied[exchange.key.stream] = exchange.key.round
            self._post(peer, second)
            self.between(peer)
        return moved

    # rounds

    def _post(self, peer: LoopbackPeer, exchanges: Iterable[Exchange]) -> None:
        for exchange in exchanges:
            key, one = exchange.key, peer.templates[exchange.key.stream]
            on_axis = key.round >= one.key.round and (key.round - one.key.round) % one.stride == 0
            assert on_axis, (
                f"{key} is none of the rounds {one.key.round}, {one.key.round + one.stride}, "
                "... of its stream"
            )
            exchange = self._encoded(exchange)
            peer.offered.append((peer.step, exchange))
            agreed = (
                copies(peer.method.agreed(peer.replica, key.stream))
                if peer.method.equality == "exact"
                else {}
            )
            offer = LoopbackOffer(exchange, agreed, peer.now_s)
            self._require_agreement(peer.name, key, offer)
            if key in self.log:
                self._answer(peer.name, offer, self.log[key], {})
            else:
                self._board.setdefault(key, {})[peer.name] = offer

    def _encoded(self, exchange: Exchange) -> Exchange:
        """Return an exchange with its tensors copied, as a node encodes them at once."""
        encoded = replace(exchange, tensors=dict(exchange.tensors))
        if self.drops and isinstance(exchange.tensors, LazyTensors):
            exchange.tensors.drop()
        return encoded

    def _require_agreement(self, name: str, key: ExchangeKey, offer: LoopbackOffer) -> None:
        first = self._agreed.setdefault(key, offer.agreed)
        differ = [
            what
            for what in first.keys() | offer.agreed.keys()
            if not equal_bits(first.get(what), offer.agreed.get(what))
        ]
        assert not differ, (
            f"{name} begins {key} with another state than those before it: {sorted(differ)}"
        )

    def _close_ready(self) -> bool:
        ready = [key for key, offers in self._board.items() if offers and self._ready(key, offers)]
        for key in ready:
            self._close(key, self._board.pop(key))
        return bool(ready)

    def _ready(self, key: ExchangeKey, offers: Mapping[str, LoopbackOffer]) -> bool:
        one = next(iter(offers.values())).exchange
        if key.stream in self._newest and key.round != self._newest[key.stream] + one.stride:
            return False
        missing = [peer for peer in self.awake() if peer.name not in offers]
        waited = self.tick - min(offer.since for offer in offers.values())
        return not missing or 0 < one.enough <= len(offers) or waited >= self.timeout_ticks

    def _close(self, key: ExchangeKey, offers: Mapping[str, LoopbackOffer]) -> None:
        self._newest[key.stream] = key.round
        groups: list[list[str]] = [list(offers)]
        if isinstance(next(iter(offers.values())).exchange.group, RandomGroups):
            order = sorted(offers)
            random.Random(f"{self.seed} {key.round}").shuffle(order)
            groups = [sorted(order[at : at + 2]) for at in range(0, len(order), 2)]
        for group in groups:
            self._decide(key, {name: offers[name] for name in group})

    def _decide(self, key: ExchangeKey, offers: Mapping[str, LoopbackOffer]) -> None:
        """Decide a group's result; with `enough`, only the first contributions count."""
        one = next(iter(offers.values())).exchange
        early = list(offers)[: one.enough or len(offers)]
        sent = {name: self._sent(offer) for name, offer in offers.items()}
        ranges = {
            name: self._ranges(name, one, sent[name]) if name in early else {}
            for name in sorted(offers)
        }
        inside = [name for name in sorted(offers) if any(ranges[name].values())]
        result = Result("failed", key.round + one.stride)
        if len(inside) >= max(one.min_participants, 1) and not (
            self._strikes(key) and self.fails(key.round)
        ):
            all_in = all(is_whole(ranges[name], sent[name]) for name in offers)
            paired = isinstance(one.group, RandomGroups)
            everybody = paired or {peer.name for peer in self.awake()} <= offers.keys()
            status: Literal["ok", "partial", "alone"] = (
                "partial" if not (all_in and everybody) else "alone" if len(offers) == 1 else "ok"
            )
            weights = tuple(offers[name].exchange.weight for name in inside)
            masks = {
                name: {what: mask(ranges[name].get(what, []), x) for what, x in sent[name].items()}
                for name in inside
            }
            mean = exact_mean(
                [
                    (weight, sent[name], masks[name])
                    for weight, name in zip(weights, inside, strict=True)
                ]
            )
            if one.kind == "mean" and not paired:  # other groups have all payloads
                mean = self._rig.decoded(one.return_codec, mean, key.round, self.seed)
            gathered = {name: sent[name] for name in inside} if one.kind == "gather" else None
            result = Result(
                status, result.next_round, tuple(inside), weights, mean=mean, gathered=gathered
            )
        self.log[key] = result
        for name in offers:
            self._answer(name, offers[name], result, ranges[name], sent[name])

    def _sent(self, offer: LoopbackOffer) -> dict[str, Tensor]:
        one = offer.exchange
        return self._rig.decoded(one.codec, one.tensors, one.key.round, self.seed)

    def _ranges(self, name: str, one: Exchange, sent: Tensors) -> dict[str, Ranges]:
        """Return what was taken of a contribution: of a gather or `uniform` mean, all or
        nothing."""
        if not self._strikes(one.key):
            return {what: whole(what, x.numel()) for what, x in sent.items()}
        ranges = {
            what: self.taken(name, one.key.round)(what, x.numel()) for what, x in sent.items()
        }
        divisible = one.kind == "mean" and not one.uniform
        return ranges if divisible or is_whole(ranges, sent) else {}

    def _strikes(self, key: ExchangeKey) -> bool:
        return self.struck is None or key.stream in self.struck

    def _answer(
        self,
        name: str,
        offer: LoopbackOffer,
        result: Result,
        ranges: Mapping[str, Ranges],
        sent: Tensors | None = None,
    ) -> None:
        peer, key = self.peers[name], offer.exchange.key
        if result.status != "failed":
            taken = {what: found for what, found in ranges.items() if found}
            result = replace(result, sent=sent or self._sent(offer), taken=taken)
            result = peer.at_home(result)
        late = self.late(name, key.round) if self._strikes(key) else 0
        peer.answers[key] = (peer.step + late, result)
