"""CO2: the mean of the parameters arrives a whole round late and moves the anchor by clipped heavy ball (Sun et al.,
arXiv:2401.16265; equations as in the authors' code, weigao266/fairscale-CO2, co2.py).

    u <- m·u + (phi - mean x) / gap;   u <- clip(u, -clip, clip);   phi <- phi - lr·u;   x <- phi

x is where a round of local steps ended; its mean is used when the next round ends, against the anchor of then. So the
anchor's own movement counts as a pull back: without misfortune u <- (m - lr/gap)·u + mean D / gap, with D = start - end.
Sent is phi - x (its mean is phi - mean x, since phi is equal at all peers), which survives 16 bits better than x.

Deviations: their clip has no effect, since the result of `torch.clamp` is dropped; ours has. Their gap penalty is a
constant; ours is a guess at the paper's, max(1, |phi_t - phi_(t-1)|_1 / |phi_(t-1) - phi_(t-2)|_1), added up in integers so
that all peers get the same bits; `penalty=False` makes it 1. Work that was not taken is sent again.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.delayed import Delay, Flight, follow, require_delay, wanted_after
from farflock.optimizers.method import All, Exchange, Key, Progress, Replica, Result, State, Tensors
from farflock.optimizers.options import require_deadline, require_period, require_unbiased
from farflock.optimizers.outer import scaled
from farflock.optimizers.state import counter, named, unnamed

STREAM = "average"
FARTHEST = 16.0  # a value's movement counts up to here, in units of 2**-24: sums of 2**34 values fit an int64
UNITS = float(2**24)


def distance(x: Tensor) -> int:
    """|x|_1 in units of 2**-24, each value cut to a whole number of them: the same on every machine, in any order."""
    return int((x.abs().clamp(max=FARTHEST) * UNITS).to(torch.int64).sum())


@dataclass(slots=True)
class CO2:
    """`period` local steps a round; `clip` bounds each value of u, None leaves it; `delay` 0 waits for each result."""

    period: int = 48
    outer_lr: float = 1.0
    outer_momentum: float = 0.5
    clip: float | None = 1.0
    penalty: bool = True
    delay: Delay = 1
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    _phi: dict[str, Tensor] = field(default_factory=dict)
    _momentum: dict[str, Tensor] = field(default_factory=dict)
    _round: int = 0
    _moved: int = 0  # how far the last outer step moved phi
    _moved_before: int = 0  # and the one before it
    _flight: Flight = field(default_factory=Flight)

    def __post_init__(self) -> None:
        require_period(self.period)
        require_delay(self.delay, self.period)
        require_deadline(self.deadline_s)
        require_unbiased("codec", self.codec, "CO2 has no feedback; choose fp16, bf16 or int8")
        require_unbiased("return codec", self.return_codec, "choose bf16 or fp32")
        if not 0 < self.outer_lr <= 10:
            raise ValueError(f"an outer_lr of {self.outer_lr} makes no sense; choose one in (0, 10], usually 1")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"an outer_momentum of {self.outer_momentum} never forgets; choose one in [0, 1), usually 0.5"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"a clip of {self.clip} lets nothing or everything through; choose one above 0, or None")

    def streams(self, replica: Replica) -> list[Exchange]:
        """One: how far the local parameters are from the anchor."""
        return [self._exchange({name: torch.zeros(shape) for name, shape in replica.shapes.items()})]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the run began."""
        self._begin(replica)
        replica.inner_step()
        self._flight.since += 1

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """phi - x, after `period` local steps since the last exchange and when its result is in phi; x <- phi."""
        if self._flight.since < self.period or self._flight.pending:
            return []
        start = self._flight.start
        work = self._flight.leave(replica.read(replica.names, "param"))
        if not self.delay:
            self._flight.work = {}  # it is still in theta
            return [self._exchange(work)]
        self._flight.start = dict(self._phi)
        replica.write(self._phi, "param")
        return [self._exchange({name: (self._phi[name] - start[name]) + x for name, x in work.items()})]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. With a delay the replica follows at the next exchange, else at once."""
        self._round = result.next_round
        if result.sent is not None or exchange.tensors:
            self._flight.land(result.taken)
        if result.status != "failed":
            self._begin(replica)
            before = dict(self._phi)
            self._outer_step(result)
            if not self.delay:
                self._flight.start = dict(self._phi)
                theta = replica.read(tuple(result.taken), "param")
                moved = {name: follow(x, before[name], self._phi[name], name, result) for name, x in theta.items()}
                replica.write(moved, "param")
        return []

    def _outer_step(self, result: Result) -> None:
        assert result.mean is not None, f"round {self._round}: {result.status} without a mean"
        gap, moved = torch.tensor(self._gap(), dtype=torch.float32), 0
        for name, phi in self._phi.items():
            u = scaled(self._momentum[name], self.outer_momentum) + result.mean[name] / gap
            if self.clip is not None:
                u = u.clamp(-self.clip, self.clip)
            after = phi - scaled(u, self.outer_lr)
            moved += distance(after - phi)
            self._phi[name], self._momentum[name] = after, u
        self._moved, self._moved_before = moved, self._moved

    def _gap(self) -> float:
        """The staleness gap; integers divide alike everywhere."""
        if not self.penalty or not self._moved_before:
            return 1.0
        return max(1.0, self._moved / self._moved_before)

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, the round, and the last two movements. A joiner replays the pending round."""
        self._begin(replica)
        counters = {"round": self._round, "moved": self._moved, "moved_before": self._moved_before}
        state = {**named("phi", self._phi), **named("momentum", self._momentum)}
        return {**state, **{name: torch.tensor(value) for name, value in counters.items()}}

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over the shared state; `carry` puts all work that is in no mean yet on top of the new phi."""
        new, momentum = unnamed("phi", state, replica.shapes), unnamed("momentum", state, replica.shapes)
        number, moved, before = (counter(name, state) for name in ("round", "moved", "moved_before"))
        theta = new
        if mode == "carry" and self._phi:
            work = self._flight.carried(replica.read(replica.names, "param"))
            theta = {name: new[name] - work[name] for name in new}
        replica.write(theta, "param")
        self._phi, self._momentum = new, momentum
        self._round, self._moved, self._moved_before = number, moved, before
        self._flight.begin_anew(new)

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, and its work that no mean contains."""
        self._begin(replica)
        return self._flight.personal()

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._phi, self._momentum = (unnamed(what, state, replica.shapes) for what in ("phi", "momentum"))
        self._round, self._moved, self._moved_before = (
            counter(name, state) for name in ("round", "moved", "moved_before")
        )
        self._flight.resume(state, replica.shapes)

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._begin(replica)
        return {name: tensor.clone() for name, tensor in self._phi.items()}

    def _begin(self, replica: Replica) -> None:
        if not self._phi:
            self._phi = dict(replica.read(replica.names, "param"))
            self._momentum = {name: torch.zeros_like(tensor) for name, tensor in self._phi.items()}
            self._flight.begin_anew(self._phi)

    def _exchange(self, tensors: dict[str, Tensor]) -> Exchange:
        return Exchange(
            Key(STREAM, self._round),
            "mean",
            All(),
            tensors,
            codec=self.codec,
            return_codec=self.return_codec,
            apply_after=wanted_after(self.delay, self.period),
            deadline_s=self.deadline_s,
        )
