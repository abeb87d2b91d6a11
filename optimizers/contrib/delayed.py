"""Outer steps one round late, so that a whole round hides the exchange: naive, with own pending
work, or eager (eager updates, Kale et al., arXiv:2502.12996).

    round r:        D_r = start - theta  is sent
    end of r+1:     phi, u <- Outer(phi, u, mean D_r)
    start of r+1:   naive         phi          own work of round r is missing until its mean comes
                    keep_pending  phi - D_r    phi and all of the own work
                    eager         phi + lead   phi and the outer optimizer's share of the own work

The eager replica of the paper steps with D~_r = D_r/M + (mean D_(r-1) - D_(r-1)/M), or with a·D_r +
(1-a)·mean D_(r-1). The outer step is linear, so the result of the own terms is kept apart, as
`lead`: phi itself stays equal at all peers. Deviations: M is that of the last round, 1 before any,
and exactly what was added of D is taken back, so that a new M needs no repair; every `refresh`
rounds the lead starts from zero (ours: the second form drifts). Work that was not taken is sent
again with the next message.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from farflock.optimizers.contrib.late import Delay, LateMethod
from farflock.optimizers.method import Result, Tensors
from farflock.optimizers.parts.outer import Outer, OuterNesterov, scaled
from farflock.optimizers.parts.outer_state import OuterState
from farflock.optimizers.parts.state_fields import nested, own, shared
from farflock.optimizers.trial_options import Disaster, TrialOptions

Lead = Literal["naive", "keep_pending", "eager"]


@dataclass(slots=True)
class Delayed(LateMethod):
    """Rounds of `period` local steps, whose results are applied one round late.

    `mode` sets where a round begins while the last message is pending. In an eager round, an
    `eager_mix` of None replaces this peer's share of the last mean, and a number a mixes a·D_r into
    it. With a `delay` of 0 each round waits for its result, which is DiLoCo in any mode."""

    period: int = 30
    mode: Lead = "eager"
    eager_mix: float | None = None
    refresh: int = 20
    delay: Delay = 1
    outer: Outer = field(default_factory=lambda: OuterNesterov(lr=0.4))
    codec: str = "fp16"
    return_codec: str = "bf16"
    deadline_s: float = 30.0

    equality: ClassVar[Literal["exact"]] = "exact"
    trial: ClassVar[TrialOptions] = TrialOptions(
        disasters=(Disaster({"period": 3, "codec": "fp32", "return_codec": "fp32"}, 12),)
    )
    stream: ClassVar[str] = "delta"
    _state: OuterState = nested(OuterState)
    _start: dict[str, Tensor] = own(dict)
    _work: dict[str, Tensor] = own(dict)
    _members: int = shared(1)  # participants of the last round
    _lead: dict[str, Tensor] = own(dict)  # eager: the outer steps' result of the own terms
    _lead_momentum: dict[str, Tensor] = own(dict)
    _owed: dict[str, Tensor] = own(dict)  # eager: taken back by the next own term

    def __post_init__(self) -> None:
        self.require_options("delayed steps have")
        if self.mode not in ("naive", "keep_pending", "eager"):
            raise ValueError(
                f"mode {self.mode!r} is not known; choose naive, keep_pending or eager"
            )
        if self.eager_mix is not None and self.mode != "eager":
            raise ValueError(
                f"eager_mix={self.eager_mix} has no effect in mode {self.mode}; "
                "choose mode eager, or None"
            )
        if self.eager_mix is not None and not 0 <= self.eager_mix <= 1:
            raise ValueError(
                f"an eager_mix of {self.eager_mix} is out of range; "
                "choose one in [0, 1], or None to replace"
            )
        if not 1 <= self.refresh < math.inf:
            raise ValueError(
                f"a refresh every {self.refresh} rounds is out of range; "
                "choose 1 or more, usually 20"
            )

    def _next_start(self, work: dict[str, Tensor]) -> dict[str, Tensor]:
        phi = self._state.phi
        if self.mode == "naive":
            return phi
        if self.mode == "keep_pending":
            return {name: phi[name] - x for name, x in work.items()}
        self._step_lead(work)
        return {name: x + self._lead[name] for name, x in phi.items()}

    def _step_lead(self, work: dict[str, Tensor]) -> None:
        """Step the lead by own terms: this round's, minus older ones that a mean brought back."""
        none = {name: torch.zeros_like(x) for name, x in work.items()}
        if not self._lead or (self._members > 1 and self._book.number % self.refresh == 0):
            self._lead, self._lead_momentum = dict(none), dict(none)
            self._owed = self._owed if self._owed and self.eager_mix is not None else dict(none)
        share = 1 / self._members if self.eager_mix is None else self.eager_mix
        for name, x in work.items():
            fresh = scaled(x, share)
            self._lead[name], self._lead_momentum[name] = self.outer.step(
                self._lead[name], fresh - self._owed[name], self._lead_momentum[name]
            )
            self._owed[name] = fresh if self.eager_mix is None else none[name]

    def _outer_step(self, mean: Tensors, result: Result) -> None:
        self._members = len(result.participants)
        for name in self._state.phi:
            self._state.step(name, self.outer, mean[name])
            if self.eager_mix is not None and self._owed:
                self._owed[name] = self._owed[name] + scaled(mean[name], self.eager_mix)
