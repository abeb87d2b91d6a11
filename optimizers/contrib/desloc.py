"""DES-LOC: parameters and inner moments are averaged at periods of their own (Iacob et al.,
arXiv:2505.22549, algorithm 1).

    every Kx steps   x <- Outer(x, mean_j x_j)       slow moments need fewer syncs than parameters:
    every Ku steps   u <- mean_j u_j                 the half-life of an average with decay b
    every Kv steps   v <- mean_j v_j                 is ln(1/2) / ln(b) steps

u = exp_avg and v = exp_avg_sq of the inner AdamW. Syncs follow the local step t = K, 2K, ... where
the paper's precede step t + 1: the same. Deviations: x is exchanged as DiLoCo's pseudo-gradient,
which costs a copy of it but keeps small updates in small numbers under a lossy codec; under such a
codec v is sent as its root, so that no value loses its sign or its range, and its mean is (mean
sqrt v)^2, at most mean v (with the default codecs, parameters were up to 7.6 % of the largest one
away from the paper's); a mean of moments that comes late still replaces them; the last means are
kept for joiners, with their step count: a joiner's bias correction must fit its v, and a v of zeros
is a beginner's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from farflock.compression.elementwise import root
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.method import (
    All,
    Exchange,
    ExchangeKey,
    Progress,
    Replica,
    Result,
    State,
    Tensors,
)
from farflock.optimizers.parts.feedback import choose
from farflock.optimizers.parts.options import require_unbiased
from farflock.optimizers.parts.outer import Outer, OuterSGD
from farflock.optimizers.parts.state import WrongState, named, zeros
from farflock.optimizers.parts.state_fields import SOME_TENSORS, Whose, nested, own, shared
from farflock.optimizers.parts.stateful import Mode, StatefulMethod, mean_of
from farflock.optimizers.trial_options import Disaster, TrialOptions

PARAM, FIRST, SECOND = "param", "exp_avg", "exp_avg_sq"


@dataclass(slots=True)
class AveragedMoment:
    """An inner moment averaged every `stride` rounds of x, next in `round`.

    `mean` is its last mean, or {} before the first."""

    what: str
    stride: int
    round: int = shared(0, "round.{0.what}")
    mean: dict[str, Tensor] = shared(dict, "{0.what}", SOME_TENSORS)
    pending: bool = own(False, "pending.{0.what}")


@dataclass(slots=True)
class DesLoc(StatefulMethod):
    """DES-LOC, with parameters and moments averaged at their own periods.

    `period` is Kx in local steps; the moments' periods are multiples of it: None for the paper's
    3 and 6, 0 for never. `clip` bounds gradient values (the paper's rho, for its drift bound);
    `outer` steps x."""

    period: int = 32
    exp_avg_period: int | None = None
    exp_avg_sq_period: int | None = None
    outer: Outer = field(default_factory=OuterSGD)
    clip: float | None = None
    codec: str = "fp16"
    return_codec: str = "bf16"
    moment_codec: str = "bf16"  # both ways
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        law={
            "period": 2,
            "exp_avg_period": 4,
            "exp_avg_sq_period": 6,
            "moment_codec": "fp32",
            "return_codec": "bf16",
        },
        quick={"exp_avg_period": 2, "exp_avg_sq_period": 2},
        rest=12,
        disasters=(Disaster({"period": 2, "exp_avg_period": 4, "exp_avg_sq_period": 6}, 5),),
    )
    _x: DiLoCo = nested()
    _moments: list[AveragedMoment] = nested()  # those that are averaged
    _steps: int = shared(0)  # step count of the mean of exp_avg_sq; 0 before the first

    def __post_init__(self) -> None:
        self._x = DiLoCo(self.period, self.outer, self.codec, self.return_codec, self.deadline_s)
        require_unbiased(
            "moment codec", self.moment_codec, "moments have no feedback; choose bf16 or fp32"
        )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(
                f"clip={self.clip} is out of range; choose a finite bound above 0, or None"
            )
        periods = {FIRST: (self.exp_avg_period, 3), SECOND: (self.exp_avg_sq_period, 6)}
        strides = {
            what: _stride(what, given, self.period, usual)
            for what, (given, usual) in periods.items()
        }
        self._moments = [
            AveragedMoment(what, stride, stride - 1) for what, stride in strides.items() if stride
        ]

    def averaged_moments(self) -> Mapping[str, str]:
        """Return the averaged inner moments, each with the option that turns it off."""
        return {
            what: f"{what}_period"
            for what in (FIRST, SECOND)
            if getattr(self, f"{what}_period") != 0
        }

    def streams(self, replica: Replica) -> list[Exchange]:
        """Return templates of x and of the moments that are ever averaged."""
        (x,) = self._x.streams(replica)
        moments = [
            self._exchange(one, one.stride - 1, zeros(replica.shapes)) for one in self._moments
        ]
        return [replace(x, key=ExchangeKey(PARAM, 0)), *moments]

    def local_step(self, replica: Replica, progress: Progress) -> None:
        """Make the inner update, with `clip` on gradients clipped value by value."""
        if self.clip is not None:
            gradients = replica.read(replica.names, "grad")
            replica.write(
                {name: x.clamp(-self.clip, self.clip) for name, x in gradients.items()}, "grad"
            )
        self._x.local_step(replica, progress)

    def due(self, replica: Replica, progress: Progress) -> list[Exchange]:
        """Request x every `period` steps, and moments whose round has come: they never overtake
        x."""
        asked = [
            replace(x, key=replace(x.key, stream=PARAM)) for x in self._x.due(replica, progress)
        ]
        for one in self._moments if asked else ():
            if not one.pending and one.round <= asked[0].key.round:
                tensors = replica.read(replica.names, one.what)
                if self._as_root(one.what):
                    tensors = {name: root(v) for name, v in tensors.items()}
                asked.append(self._exchange(one, one.round, tensors))
                one.pending = True
        return asked

    def apply(self, replica: Replica, exchange: Exchange, result: Result) -> list[Exchange]:
        """Apply x as DiLoCo does; set a moment to the mean where it contains this peer's. The next
        sync repairs a missed one."""
        what = exchange.key.stream
        if what == PARAM:
            return self._x.apply(replica, exchange, result)
        moment = self._moment(what)
        moment.pending = moment.pending and not exchange.tensors
        moment.round = result.next_round
        if result.status == "failed":
            return []
        found = mean_of(exchange, result)
        mean = moment.mean = {name: self._received(what, found[name]) for name in replica.names}
        if what == SECOND:
            self._steps = (exchange.key.round + 1) * self.period
        if result.taken:
            own = replica.read(replica.names, what)
            taken = result.taken
            replica.write(
                {name: choose(taken.get(name, ()), mean[name], own[name]) for name in mean}, what
            )
            if what == SECOND:
                self._set_steps(replica, self._steps + result.steps_since)
        return []

    def _as_root(self, what: str) -> bool:
        return what == SECOND and self.moment_codec.partition("+")[0] != "fp32"

    def _received(self, what: str, mean: Tensor) -> Tensor:
        """Return the moment of a decoded mean; exp_avg_sq is never negative, whatever was sent."""
        if what == FIRST:
            return mean
        return mean * mean if self._as_root(what) else mean.clamp(min=0)

    def _moment(self, what: str) -> AveragedMoment:
        return next((one for one in self._moments if one.what == what), AveragedMoment(what, 0))

    def _set_steps(self, replica: Replica, steps: int) -> None:
        """Give all peers one step count for the bias correction. Parameters whose exp_avg_sq is
        zero keep theirs: with the group's count, its first value would seem tiny and the next
        update would be huge."""
        trained = [name for name, v in self._moment(SECOND).mean.items() if bool(v.any())]
        counts = replica.read(trained, "step")
        replica.write(
            {name: torch.full_like(count, float(steps)) for name, count in counts.items()}, "step"
        )

    def begin(self, replica: Replica) -> None:
        """Set x at the first call."""
        self._x.begin(replica)

    def load(self, replica: Replica, state: State, *whose: Whose) -> Self:
        """Load x, the outer momentum, and the moments' last means with their step count."""
        new = StatefulMethod.load(self, replica, state, *whose)
        if any(bool((v < 0).any()) for v in new._moment(SECOND).mean.values()):
            raise WrongState(f"{SECOND} holds negative means of squares; ask another member")
        return new

    def move(self, replica: Replica, state: State, new: Self, mode: Mode) -> bool:
        """Take over the outer state, and for `adopt` the moments, once exp_avg_sq has a mean:
        without it they would not fit a joiner's zeros. `carry` keeps the replica's moments."""
        if mode == "adopt" and new._moment(SECOND).mean:
            for one in new._moments:
                replica.write(one.mean, one.what)
            new._set_steps(replica, new._steps)
        return self._x.move(replica, state, new._x, mode)

    def agreed(self, replica: Replica, stream: str) -> State:
        """Return x's outer state or a moment's last mean; replicas' values differ between syncs."""
        return (
            self._x.agreed(replica, stream)
            if stream == PARAM
            else named(stream, self._moment(stream).mean)
        )

    def evaluated(self, replica: Replica) -> Tensors:
        """Return x after its last sync."""
        return self._x.evaluated(replica)

    def _exchange(self, one: AveragedMoment, number: int, tensors: Tensors) -> Exchange:
        key, both, wait = ExchangeKey(one.what, number), self.moment_codec, self.deadline_s
        return Exchange(
            key, "mean", All(), tensors, 1.0, both, both, stride=one.stride, deadline_s=wait
        )


def _stride(what: str, own: int | None, period: int, usual: int) -> int:
    """Return a moment's period in rounds of x; raise `ValueError` unless it is a whole number."""
    if own is None:
        return usual
    if own < 0 or own % period:
        nearest = max(round(own / period), 1) * period
        raise ValueError(
            f"{what}_period={own} is not a multiple of the period {period}; "
            f"choose {nearest}, or 0 to never average it"
        )
    return own // period
