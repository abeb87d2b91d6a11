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

from farflock.optimizers.contrib.delayed import Delay, Flight, require_delay, wanted_after
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Replica, Result, State, Tensors
from farflock.optimizers.parts.options import require_deadline, require_period, require_unbiased
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.state import counters, numbers, zeros
from farflock.optimizers.trial_options import Disaster, TrialOptions

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
    trial: ClassVar[TrialOptions] = TrialOptions(
        disasters=(Disaster({"period": 3, "codec": "fp32", "return_codec": "fp32"}, 11),)
    )
    _flight: Flight = field(default_factory=Flight)
    _moved: int = 0  # how far the last outer step moved phi
    _moved_before: int = 0  # and the one before it

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
        return [self._exchange(zeros(replica.shapes))]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """The inner update; the first one remembers where the run began."""
        self._flight.local_step(replica)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """phi - x, after `period` local steps since the last exchange and when its result is in phi; x <- phi."""
        if not self._flight.book.is_due(self.period):
            return []
        start, phi = self._flight.start, self._flight.state.phi
        work = self._flight.leave(replica, self.delay)
        if not self.delay:
            return [self._exchange(work)]
        self._flight.depart(replica, phi)
        return [self._exchange({name: (phi[name] - start[name]) + x for name, x in work.items()})]

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """The outer step. With a delay the replica follows at the next exchange, else at once."""
        self._flight.land(exchange, result)
        if result.status != "failed":
            self._flight.begin(replica)
            before = dict(self._flight.state.phi)
            self._outer_step(result)
            if not self.delay:
                self._flight.catch_up(replica, before, result)
        return []

    def _outer_step(self, result: Result) -> None:
        assert result.mean is not None, f"round {self._flight.book.number}: {result.status} without a mean"
        state, gap, moved = self._flight.state, torch.tensor(self._gap(), dtype=torch.float32), 0
        for name, phi in state.phi.items():
            u = scaled(state.momentum[name], self.outer_momentum) + result.mean[name] / gap
            if self.clip is not None:
                u = u.clamp(-self.clip, self.clip)
            after = phi - scaled(u, self.outer_lr)
            moved += distance(after - phi)
            state.phi[name], state.momentum[name] = after, u
        self._moved, self._moved_before = moved, self._moved

    def _gap(self) -> float:
        """The staleness gap; integers divide alike everywhere."""
        if not self.penalty or not self._moved_before:
            return 1.0
        return max(1.0, self._moved / self._moved_before)

    def snapshot(self, replica: Replica) -> State:
        """phi, the outer momentum, the round, and the last two movements. A joiner replays the pending round."""
        return self._flight.snapshot(replica) | numbers({"moved": self._moved, "moved_before": self._moved_before})

    def restore(self, replica: Replica, state: State, mode: Literal["adopt", "carry"]) -> None:
        """Take over the shared state; `carry` puts all work that is in no mean yet on top of the new phi."""
        new, number = self._flight.state.read(state, replica.shapes), self._flight.book.read(state)
        self._moved, self._moved_before = counters(state, "moved", "moved_before")
        self._flight.restore(replica, new, number, mode)

    def personal(self, replica: Replica) -> State:
        """Where in the round this peer is, and its work that no mean contains."""
        return self._flight.personal(replica)

    def resume(self, replica: Replica, state: State) -> None:
        """Go on where this peer stopped."""
        self._flight.resume(replica, state)
        self._moved, self._moved_before = counters(state, "moved", "moved_before")

    def agreed(self, replica: Replica, stream: str) -> State:
        """The whole state."""
        return self.snapshot(replica)

    def eval_params(self, replica: Replica) -> Tensors:
        """phi."""
        self._flight.begin(replica)
        return self._flight.state.parameters(replica)

    def _exchange(self, tensors: Tensors) -> Exchange:
        key, back, after = (
            ExchangeKey(STREAM, self._flight.book.number),
            self.return_codec,
            wanted_after(self.delay, self.period),
        )
        return Exchange(
            key, "mean", All(), tensors, 1.0, self.codec, back, apply_after=after, deadline_s=self.deadline_s
        )
