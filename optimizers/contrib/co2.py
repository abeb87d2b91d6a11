"""CO2: the mean of the parameters arrives a whole round late and moves the anchor by clipped heavy
ball (Sun et al., arXiv:2401.16265; equations as in the authors' code, weigao266/fairscale-CO2,
co2.py).

    u <- m·u + (phi - mean x) / gap;   u <- clip(u, -clip, clip);   phi <- phi - lr·u;   x <- phi

x is where a round of local steps ended; its mean is used when the next round ends, against the
anchor of that time. So the anchor's own movement acts as a pull back: without failures u <- (m -
lr/gap)·u + mean D / gap, with D = start - end. Peers send phi - x (its mean is phi - mean x, since
phi is equal at all peers), which survives 16 bits better than x.

Deviations: their clip has no effect, since the result of `torch.clamp` is dropped; ours has. Their
gap penalty is a constant; ours is a guess at the paper's, max(1, |phi_t - phi_(t-1)|_1 / |phi_(t-1)
- phi_(t-2)|_1), added up in integers so that all peers get the same bits; `penalty=False` makes it
1. Work that was not taken is sent again.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.compression.payload import divided
from farflock.optimizers.contrib.late import Delay, LateMethod
from farflock.optimizers.method import Result, Tensors
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.state_fields import nested, own, shared
from farflock.optimizers.trial_options import Disaster, TrialOptions

# The largest movement counted of a value, in units of 2**-24: sums of 2**34 values fit an int64.
FARTHEST = 16.0
UNITS = float(2**24)


def distance(x: Tensor) -> int:
    """Return |x|_1 in truncated units of 2**-24: the same on every machine, in any order."""
    return int((x.abs().clamp(max=FARTHEST) * UNITS).to(torch.int64).sum())


@dataclass(slots=True)
class CO2(LateMethod):
    """Rounds of `period` local steps; `clip` (or None) bounds each value of u; `delay` 0 waits."""

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
    stream: ClassVar[str] = "average"
    _state: OuterState = nested(OuterState)
    _start: dict[str, Tensor] = own(dict)
    _work: dict[str, Tensor] = own(dict)
    _moved: int = shared(0)  # how far the last outer step moved phi
    _moved_before: int = shared(0)  # and the one before it

    def __post_init__(self) -> None:
        self.require_options("CO2 has")
        if not 0 < self.outer_lr <= 10:
            raise ValueError(
                f"an outer_lr of {self.outer_lr} is out of range; choose one in (0, 10], usually 1"
            )
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"an outer_momentum of {self.outer_momentum} is out of range; "
                "choose one in [0, 1), usually 0.5"
            )
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"a clip of {self.clip} is out of range; choose one above 0, or None")

    def _message_of(self, work: dict[str, Tensor]) -> Tensors:
        """Return phi - x, where x is where the round ended."""
        if not self.delay:
            return work
        return {name: (self._state.phi[name] - self._start[name]) + x for name, x in work.items()}

    def _next_start(self, work: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._state.phi

    def _outer_step(self, mean: Tensors, result: Result) -> None:
        gap, moved = self._gap(), 0
        for name, phi in self._state.phi.items():
            u = scaled(self._state.momentum[name], self.outer_momentum) + divided(mean[name], gap)
            if self.clip is not None:
                u = u.clamp(-self.clip, self.clip)
            after = phi - scaled(u, self.outer_lr)
            moved += distance(after - phi)
            self._state.phi[name], self._state.momentum[name] = after, u
        self._moved, self._moved_before = moved, self._moved

    def _gap(self) -> float:
        """Return the staleness gap, a quotient of integers and so portable."""
        if not self.penalty or not self._moved_before:
            return 1.0
        return max(1.0, self._moved / self._moved_before)
