"""What do late gradients cost, and which correction pays it back? On a quadratic, where stability can be computed, and on a
small Llama that reads Shakespeare.

Every step takes the gradient at weights that are some steps old, from node/pipeline/contrib/stash.py, with the corrections of
optimizers/parts/corrections.py: what a stage of a pipeline that does not wait does, without the pipeline.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, nn

from farflock.experiments.measure.threads import one_thread
from farflock.experiments.pipelines import table
from farflock.experiments.pipelines.table import Parameters, Progress, Table, exact, sampled
from farflock.node.errors import Failure
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.evaluation import evaluate
from farflock.node.model.llama import PRESETS, ModelConfig, build, next_token_loss
from farflock.node.model.tokenizer import ByteTokenizer
from farflock.node.pipeline.contrib.stash import Stash, swapped
from farflock.optimizers.parts.corrections import (
    AdaptiveBraking,
    Age,
    SpikeCompensation,
    Trend,
    along_trend,
    along_velocity,
    nadam,
    nesterov,
    rescheduled,
    trend_decay,
)
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

CLIP_NORM = 1.0
LATE = 4  # steps, for what corrects long delays
ANNEALED = 0.25  # of the run: PipeMare's lower rates
DECAY = 0.1  # of weights, with AdamW, NAdam and Muon; SGD has none, so that all forms of prediction are defined

Base = Literal["sgd", "nesterov", "adamw", "nadam", "muon"]
Loss = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, slots=True)
class Arm:
    """An inner optimizer, the age of its gradients in steps, and what is done about it.

    `rate`s of SGD are effective ones, eta/(1-momentum), so that momenta can be compared. `estimate` takes gradients at
    PipeMare's guess of the old weights and keeps no stash.
    """

    name: str
    base: Base
    delay: int = 0
    momentum: float = 0.9
    spike: bool = False
    predict: Literal["no", "by velocity", "by trend"] = "no"
    braking: float = 0.0
    reschedule: bool = False
    estimate: bool = False


def corrected(delay: int) -> tuple[Arm, ...]:
    """SGD with momentum at this delay: as it is, and with each correction."""
    return (
        Arm("sgd, late", "sgd", delay),
        Arm("sgd + spike compensation", "sgd", delay, spike=True),
        Arm("sgd + prediction by velocity", "sgd", delay, predict="by velocity"),
        Arm("sgd + prediction by trend", "sgd", delay, predict="by trend"),
        Arm("sgd + spike + prediction by trend", "sgd", delay, spike=True, predict="by trend"),
        Arm("sgd + adaptive braking", "sgd", delay, braking=2.0),
        Arm("sgd + lower early rate", "sgd", delay, reschedule=True),
        Arm("sgd + lower early rate, no stash", "sgd", delay, reschedule=True, estimate=True),
        Arm("nesterov 0.9, late", "nesterov", delay),
        Arm("nesterov 0.99, late", "nesterov", delay, momentum=0.99),
    )


ARMS = (
    Arm("sgd", "sgd"),
    *corrected(LATE),
    Arm("adamw", "adamw"),
    Arm("adamw, late", "adamw", LATE),
    Arm("nadam 0.99, late", "nadam", LATE, momentum=0.99),
    Arm("adamw, one late", "adamw", 1),
    Arm("nadam 0.9", "nadam"),
    Arm("nadam 0.9, one late", "nadam", 1),
    Arm("nadam 0.99", "nadam", momentum=0.99),
    Arm("nadam 0.99, one late", "nadam", 1, momentum=0.99),
    Arm("muon", "muon"),
    Arm("muon, one late", "muon", 1),
)

# of these a recipe tells: without delay, one step late as PipeDream-2BW is, and as late as a pipeline of several stages
_DELAYS: dict[Base, tuple[int, ...]] = {"adamw": (0, 1, LATE), "nadam": (0, 1, LATE), "muon": (0, 1)}
COMPARED = tuple(
    Arm(f"{base}, {delay} late", base, delay, 0.99 if base == "nadam" else 0.9)
    for base, delays in _DELAYS.items()
    for delay in delays
)


class Late:
    """Trains a module with gradients that are `arm.delay` steps old; in the first steps with the oldest there are."""

    def __init__(self, module: nn.Module, arm: Arm, rate: float, steps: int) -> None:
        self.module, self._arm = module, arm
        self._inner = _inner(module, arm, rate)
        self._rates = [group["lr"] for group in self._inner.param_groups]
        self._age = Age()
        self._anneal_steps = max(round(ANNEALED * steps), 1)
        self._stash = Stash(module, 1 if arm.estimate else arm.delay + 1)
        if arm.spike:
            assert isinstance(self._inner, torch.optim.SGD)
            SpikeCompensation(self._inner, self._age)
        if arm.braking:
            AdaptiveBraking(self._inner, self._age, arm.braking)
        if arm.estimate or arm.predict == "by trend":
            Trend(self._inner, trend_decay(arm.delay) if arm.estimate else 0.0)

    def step(self, loss_of: Loss, share: float = 1.0, clip_norm: float | None = CLIP_NORM) -> float:
        """One step at this share of the rate; returns the loss at the weights that it was taken at."""
        parameters = list(self.module.parameters())
        epoch = max(self._stash.epoch - self._arm.delay, 0)
        with self._weights(epoch) as age:
            loss = loss_of(self.module)
            found = torch.autograd.grad(loss, parameters)
        self._age.epochs = age
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        self._set_rates(share, age)
        self._stash.leave()
        self._inner.step()
        self._serve()
        return float(loss.detach())

    @contextmanager
    def _weights(self, epoch: int) -> Iterator[int]:
        if self._arm.estimate:
            age = self._stash.epoch - epoch
            with swapped(self.module, along_trend(self.module, self._inner, -age)):
                yield age
        else:
            with self._stash.version(epoch) as age:
                yield age

    def _set_rates(self, share: float, age: int) -> None:
        for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
            now = rate * share
            late = rescheduled(now, age, self._stash.epoch, self._anneal_steps)
            group["lr"] = late if self._arm.reschedule else now

    def _serve(self) -> None:
        """Forward passes of the new epoch use the weights that are expected when their gradients come back."""
        if self._arm.predict == "by trend":
            self._stash.serve(along_trend(self.module, self._inner, self._arm.delay))
        elif self._arm.predict == "by velocity":
            assert isinstance(self._inner, torch.optim.SGD)
            self._stash.serve(along_velocity(self.module, self._inner, self._arm.delay))


def _inner(module: nn.Module, arm: Arm, rate: float) -> torch.optim.Optimizer:
    if arm.base == "sgd":
        own = rate * (1 - arm.momentum)
        return InnerConfig("sgd", own, weight_decay=0.0, momentum=arm.momentum).build(module)
    if arm.base == "nesterov":
        return nesterov([{"params": list(module.parameters())}], rate, arm.momentum)
    if arm.base == "nadam":
        decays = {2: DECAY, 1: 0.0}
        kinds = [[x for x in module.parameters() if min(x.dim(), 2) == kind] for kind in decays]
        groups = [{"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, decays.values(), strict=True)]
        return nadam(groups, rate, (arm.momentum, 0.95))
    return InnerConfig(arm.base, rate, weight_decay=DECAY).build(module)


@dataclass(frozen=True, slots=True)
class Reading:
    """A small Llama on the shipped text. Rates are tried for each arm of a base."""

    model: ModelConfig = PRESETS["tiny"]
    batch: int = 4
    seq: int = 64
    steps: int = 200
    seeds: tuple[int, ...] = (1, 2)
    sgd_rates: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0)
    other_rates: tuple[float, ...] = (2e-3, 6e-3, 2e-2)
    held_out: int = 64  # sequences

    def rates(self, base: Base) -> tuple[float, ...]:
        """Those to be tried."""
        return self.sgd_rates if base in ("sgd", "nesterov") else self.other_rates


@dataclass(frozen=True, slots=True)
class Row:
    """One run: the held-out loss at its end in nats a token, infinite if it diverged."""

    arm: str
    delay: int
    rate: float
    seed: int
    loss: float
    standard_error: float


def read(reading: Reading, arms: Sequence[Arm] = ARMS) -> Iterator[Row]:
    """All runs, one after the other on one thread; equal seeds have equal first weights and equal batches."""
    corpus = load_corpus(SHIPPED)
    tokenizer = ByteTokenizer()
    text, rest = tokenizer.encode(corpus.train), tokenizer.encode(corpus.held_out)
    held_out = evaluation(rest, reading.seq, reading.held_out)
    with one_thread():
        for arm in arms:
            for rate in reading.rates(arm.base):
                for seed in reading.seeds:
                    batches = Batches(text, seed, "delay", reading.batch, reading.seq)
                    yield _run(reading, arm, rate, batches, held_out)


def _run(reading: Reading, arm: Arm, rate: float, batches: Batches, held_out: tuple[Tensor, Tensor]) -> Row:
    seed = batches.run_seed
    trainer = Late(build(reading.model, seed), arm, rate, reading.steps)
    schedule = Schedule(1.0, reading.steps, warmup_tokens=reading.steps // 10)  # it counts steps here
    for step in range(reading.steps):
        x, y = batches.batch(step)
        loss = trainer.step(_loss_on(x, y), schedule.rate(step, step))
        if not math.isfinite(loss):
            return Row(arm.name, arm.delay, rate, seed, math.inf, math.inf)
    end = evaluate(trainer.module, *held_out)
    finite = math.isfinite(end.mean)
    return Row(arm.name, arm.delay, rate, seed, end.mean if finite else math.inf, end.standard_error)


def _loss_on(x: Tensor, y: Tensor) -> Loss:
    return lambda model: next_token_loss(model(x), y)


@dataclass(frozen=True, slots=True)
class Best:
    """An arm at the rate that is best for it: the mean loss over seeds, and at each rate."""

    arm: str
    delay: int
    rate: float
    loss: float
    by_rate: dict[float, float]


def best(rows: Sequence[Row]) -> list[Best]:
    """One of each arm, in the order in which they ran."""
    found: dict[tuple[str, int], dict[float, list[float]]] = {}
    for row in rows:
        found.setdefault((row.arm, row.delay), {}).setdefault(row.rate, []).append(row.loss)
    means = {key: {rate: sum(x) / len(x) for rate, x in rates.items()} for key, rates in found.items()}
    lowest = {key: min(rates, key=rates.__getitem__) for key, rates in means.items()}
    return [Best(*key, lowest[key], rates[lowest[key]], rates) for key, rates in means.items()]


def closed(prompt: float, late: float, with_correction: float) -> float:
    """The share of what the delay costs that a correction gives back: 1 is all of it, below 0 it makes things worse. Not a
    number where the delay costs nothing."""
    return (late - with_correction) / (late - prompt) if late > prompt else math.nan


class Size(Parameters, frozen=True, kw_only=True):
    """Of a reading, what a tier chooses; `rates` are tried for each arm, `held_out` counts sequences."""

    steps: Annotated[int, msgspec.Meta(ge=2, le=100_000)] = 200
    rates: Annotated[list[float], msgspec.Meta(min_length=1, max_length=16)]
    held_out: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]


def compute(size: Size, progress: Progress) -> Table:
    """Of `COMPARED` the held-out losses in nats a token at the rate that is best over all seeds, what lateness adds to them,
    and these rates; `Failure` if an arm diverges at all rates."""
    reading = Reading(steps=size.steps, seeds=tuple(size.seeds), other_rates=tuple(size.rates), held_out=size.held_out)
    rows, count = [], len(COMPARED) * len(size.rates) * len(size.seeds)
    for number, row in enumerate(read(reading, COMPARED), 1):
        rows.append(row)
        progress(number / count)
    found = best(rows)
    losses = {one.arm: _at(one, rows) for one in found}
    return Table(
        [sampled(name, values) for name, values in losses.items()]
        + _costs(losses)
        + [exact(f"{one.arm}, best rate", one.rate) for one in found],
        f"{size.steps} steps of {reading.batch} x {reading.seq} tokens, {len(size.rates)} rates, {len(size.seeds)} seeds",
    )


def _at(one: Best, rows: Sequence[Row]) -> list[float]:
    """Losses at the best rate, seed by seed."""
    if not math.isfinite(one.loss):
        raise Failure(f"{one.arm}: every rate diverges for some seed", "", "add lower `rates`")
    return [row.loss for row in rows if (row.arm, row.rate) == (one.arm, one.rate)]


def _costs(losses: dict[str, list[float]]) -> list[table.Row]:
    """What lateness adds to the loss of the same optimizer, seed by seed."""
    costs = []
    for arm in COMPARED:
        if arm.delay:
            pairs = zip(losses[arm.name], losses[f"{arm.base}, 0 late"], strict=True)
            costs.append(sampled(f"what {arm.delay} late costs {arm.base}", [late - prompt for late, prompt in pairs]))
    return costs


@dataclass(frozen=True, slots=True)
class Settling:
    """How an arm does on quadratics: `limit` is the largest eta·lambda (eta effective for SGD) up to which it settles,
    `half_life` the steps that halve the error on a problem of condition number `CONDITION` at the best rate."""

    arm: str
    delay: int
    momentum: float
    limit: float
    half_life: float


CONDITION = 100.0


class Quadratic(nn.Module):
    """Sum of lambda_i·w_i^2/2 with all w_i = 1 at first: as many problems at once, as no method here but braking mixes them."""

    def __init__(self, curvatures: Tensor) -> None:
        super().__init__()
        self.curvatures = curvatures
        self.w = nn.Parameter(torch.ones_like(curvatures))

    def forward(self) -> Tensor:
        """The sum."""
        return (self.curvatures * self.w**2).sum() / 2


def settle(arm: Arm, steps: int = 2000, points_a_decade: int = 230) -> Settling:
    """Runs all eta·lambda from 1e-4 to 100 at once, 1 % apart, each step at rate 1. Braking goes by one angle for all of them
    and is not for this: `ValueError`."""
    if arm.braking or arm.base not in ("sgd", "nesterov"):
        raise ValueError(
            f"{arm.name}: on quadratics only methods that treat each weight by itself; no braking, no {arm.base}"
        )
    curvatures = torch.logspace(-4, 2, 6 * points_a_decade + 1, dtype=torch.float64)
    trainer = Late(Quadratic(curvatures), arm, 1.0, steps)
    quarters = [_largest(trainer, steps // 4) for _ in range(4)]
    factors = ((quarters[3] / quarters[1]).nan_to_num(nan=0.0) ** (2 / steps)).where(quarters[3].isfinite(), math.inf)
    unsettled = (factors >= 1).nonzero()
    end = int(unsettled[0]) if len(unsettled) else len(curvatures)
    return Settling(
        arm.name,
        arm.delay,
        arm.momentum,
        float(curvatures[end - 1]),
        _half_life(factors[:end], round(math.log10(CONDITION) * points_a_decade)),
    )


def _largest(trainer: Late, steps: int) -> Tensor:
    """|w| at its largest in so many steps: what oscillates is seen at its crest."""
    assert isinstance(trainer.module, Quadratic)
    largest = torch.zeros_like(trainer.module.w)
    for _ in range(steps):
        trainer.step(_value, clip_norm=None)
        largest = largest.maximum(trainer.module.w.detach().abs().nan_to_num(nan=math.inf))
    return largest


def _value(module: nn.Module) -> Tensor:
    value: Tensor = module()
    return value


def _half_life(factors: Tensor, width: int) -> float:
    """Of the slowest in a window of curvatures of that width, for the window where it is fastest."""
    if len(factors) <= width:
        return math.inf
    factor = float(factors.unfold(0, width + 1, 1).amax(dim=1).min())
    return math.log(2) / -math.log(factor) if factor > 0 else 0.0
