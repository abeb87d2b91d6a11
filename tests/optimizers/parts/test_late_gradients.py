"""Corrections of late gradients at work: on quadratics, where stability can be computed,
and on a small Llama that reads Shakespeare. Every step takes the gradient at weights that are some
steps old, from node/pipeline/contrib/stash.py.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from farflock.experiments.pipelines.text import texts
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.evaluation import evaluate
from farflock.node.model.llama import PRESETS, build, next_token_loss
from farflock.node.pipeline.contrib.stash import Stash, swapped
from farflock.optimizers.parts.corrections import (
    AdaptiveBraking,
    Age,
    SpikeCompensation,
    Trend,
    along_trend,
    along_velocity,
    nesterov,
    rescheduled,
    stability_limit,
    trend_decay,
)
from farflock.optimizers.parts.inner import InnerConfig

LATE = 4  # steps, for corrections of long delays
ANNEALED = 0.25  # of the run: PipeMare's lower rates
CONDITION = 100.0
POINTS_A_DECADE = 230


@dataclass(frozen=True)
class Arm:
    """SGD, the age of its gradients in steps, and the correction for it.

    Rates are effective ones, eta/(1-momentum), so that momenta can be compared.
    `estimate` takes gradients at PipeMare's guess of the old weights and keeps no stash.
    """

    name: str
    delay: int = 0
    momentum: float = 0.9
    looks_ahead: bool = False
    spike: bool = False
    predict: str = ""
    braking: float = 0.0
    reschedule: bool = False
    estimate: bool = False

    def inner(self, module, rate):
        if self.looks_ahead:
            return nesterov([{"params": list(module.parameters())}], rate, self.momentum)
        own = rate * (1 - self.momentum)
        return InnerConfig("sgd", own, weight_decay=0.0, momentum=self.momentum).build(module)


def corrected(delay):
    """SGD with momentum at this delay: uncorrected, and with each correction."""
    return (
        Arm("late", delay),
        Arm("spike compensation", delay, spike=True),
        Arm("prediction by velocity", delay, predict="velocity"),
        Arm("prediction by trend", delay, predict="trend"),
        Arm("spike + prediction by trend", delay, spike=True, predict="trend"),
        Arm("adaptive braking", delay, braking=2.0),
        Arm("lower early rate", delay, reschedule=True),
        Arm("lower early rate, no stash", delay, reschedule=True, estimate=True),
        Arm("nesterov 0.9", delay, looks_ahead=True),
        Arm("nesterov 0.99", delay, momentum=0.99, looks_ahead=True),
    )


class Corrected:
    """Training of a module with gradients that are `arm.delay` steps old, or in the first steps the
    oldest there are."""

    def __init__(self, module, arm, rate, steps):
        self.module, self._arm, self._inner = module, arm, arm.inner(module, rate)
        self._rates = [group["lr"] for group in self._inner.param_groups]
        self._age = Age()
        self._anneal_steps = max(round(ANNEALED * steps), 1)
        self._stash = Stash(module, 1 if arm.estimate else arm.delay + 1)
        if arm.spike:
            SpikeCompensation(self._inner, self._age)
        if arm.braking:
            AdaptiveBraking(self._inner, self._age, arm.braking)
        if arm.estimate or arm.predict == "trend":
            Trend(self._inner, trend_decay(arm.delay) if arm.estimate else 0.0)

    def step(self, loss_of, share=1.0, clip_norm=None):
        """Take one step at this share of the rate; return the loss at the weights whose gradient it
        used."""
        parameters = list(self.module.parameters())
        with self._weights(max(self._stash.epoch - self._arm.delay, 0)) as age:
            loss = loss_of(self.module)
            found = torch.autograd.grad(loss, parameters)
        self._age.epochs = age
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
            late = rescheduled(rate * share, age, self._stash.epoch, self._anneal_steps)
            group["lr"] = late if self._arm.reschedule else rate * share
        self._stash.leave()
        self._inner.step()
        if self._arm.predict:
            # The new epoch's passes use the weights expected when their gradients come back.
            along = along_trend if self._arm.predict == "trend" else along_velocity
            self._stash.serve(along(self.module, self._inner, self._arm.delay))
        return float(loss.detach())

    @contextmanager
    def _weights(self, epoch):
        if self._arm.estimate:
            age = self._stash.epoch - epoch
            with swapped(self.module, along_trend(self.module, self._inner, -age)):
                yield age
        else:
            with self._stash.version(epoch) as age:
                yield age


class Quadratic(nn.Module):
    """The sum of lambda_i·w_i^2/2 with all w_i = 1 at first. These are independent problems, since
    no method here except braking mixes them."""

    def __init__(self, curvatures):
        super().__init__()
        self.curvatures = curvatures
        self.w = nn.Parameter(torch.ones_like(curvatures))

    def forward(self):
        return (self.curvatures * self.w**2).sum() / 2


def settle(arm, steps=400):
    """Return the largest eta·lambda (eta effective) up to which an arm settles, and the steps that
    halve the error on a problem of condition number `CONDITION` at the best rate.

    All eta·lambda from 1e-4 to 100 run at once, 1 % apart, each step at rate 1.
    """
    curvatures = torch.logspace(-4, 2, 6 * POINTS_A_DECADE + 1, dtype=torch.float64)
    trainer = Corrected(Quadratic(curvatures), arm, 1.0, steps)
    quarters = [largest(trainer, steps // 4) for _ in range(4)]
    factors = ((quarters[3] / quarters[1]).nan_to_num(nan=0.0) ** (2 / steps)).where(
        quarters[3].isfinite(), math.inf
    )
    unsettled = (factors >= 1).nonzero()
    end = int(unsettled[0]) if len(unsettled) else len(curvatures)
    return float(curvatures[end - 1]), half_life(
        factors[:end], round(math.log10(CONDITION) * POINTS_A_DECADE)
    )


def largest(trainer, steps):
    """Return the largest |w| over `steps` steps, so that an oscillation is measured at its peak."""
    found = torch.zeros_like(trainer.module.w)
    for _ in range(steps):
        trainer.step(lambda module: module())
        found = found.maximum(trainer.module.w.detach().abs().nan_to_num(nan=math.inf))
    return found


def half_life(factors, width):
    """Return the half-life of the slowest problem in a window of curvatures of that width, for the
    window where it is shortest."""
    if len(factors) <= width:
        return math.inf
    factor = float(factors.unfold(0, width + 1, 1).amax(dim=1).min())
    return math.log(2) / -math.log(factor) if factor > 0 else 0.0


def read(arm, rate=1.0, steps=16):
    """Return the held-out loss of a small Llama after `steps` steps; infinite if a loss is not
    finite."""
    text, rest, _ = texts()
    model, batches = build(PRESETS["tiny"], 1), Batches(text, SampleStream(1, "delay"), 1, 16)
    trainer = Corrected(model, arm, rate, steps)
    for step in range(steps):
        x, y = batches.batch(step)
        if not math.isfinite(
            trainer.step(lambda module, x=x, y=y: next_token_loss(module(x), y), clip_norm=1.0)
        ):
            return math.inf
    return evaluate(model, *evaluation(rest, 16, 2)).mean


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_sgd_settles_up_to_the_limit_that_theory_gives(delay):
    limit, _ = settle(Arm("plain", delay, momentum=0.0))
    assert limit == pytest.approx(stability_limit(delay), rel=0.011)


def test_momentum_settles_up_to_twice_1_plus_m_and_forgets_by_the_root_of_m():
    limit, halves = settle(Arm("momentum"))
    assert limit * (1 - 0.9) == pytest.approx(2 * (1 + 0.9), rel=0.011)
    assert halves == pytest.approx(math.log(2) / -math.log(math.sqrt(0.9)), rel=0.06)


def test_on_quadratics_compensation_and_prediction_bear_longer_steps_than_nothing():
    limits, halves = zip(*map(settle, corrected(1)[:5]), strict=True)
    late, spike, velocity, trend, both = limits
    assert late < min(spike, velocity) < both
    assert velocity == trend
    late, spike, _, trend, both = halves
    assert both < min(spike, trend) < late


def test_without_a_delay_every_arm_is_the_same_run_to_the_last_bit():
    assert len({read(arm) for arm in corrected(0) if not arm.looks_ahead}) == 1


def test_every_arm_runs_and_equal_arms_give_equal_numbers():
    losses = {arm.name: read(arm) for arm in (Arm("sgd"), *corrected(LATE))}
    assert all(map(math.isfinite, losses.values()))
    assert (
        read(Arm("nesterov 0.99", LATE, momentum=0.99, looks_ahead=True)) == losses["nesterov 0.99"]
    )
    by_trend, by_velocity = losses.pop("prediction by trend"), losses.pop("prediction by velocity")
    assert by_trend == pytest.approx(by_velocity, abs=1e-4)
    assert len({by_trend, *losses.values()}) == len(losses) + 1, "two arms are the same"


def test_what_diverges_has_an_infinite_loss():
    assert read(Arm("wild", LATE), rate=1e30) == math.inf
