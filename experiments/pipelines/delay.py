"""The cost of late gradients to a small Llama on Shakespeare, for each inner optimizer.

Every step takes the gradient at weights that are some steps old (node/pipeline/contrib/stash.py),
like a stage of a pipeline that does not wait, but without the pipeline.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, nn

from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact, sampled
from farflock.experiments.pipelines.text import texts
from farflock.experiments.pipelines.tuning import tuned
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.evaluation import evaluate
from farflock.node.model.llama import PRESETS, build, next_token_loss
from farflock.node.pipeline.contrib.stash import Stash
from farflock.optimizers.parts.corrections import nadam
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

MODEL = PRESETS["tiny"]
BATCH, SEQ = 4, 64
CLIP_NORM = 1.0
DECAY = 0.1  # weight decay

Base = Literal["adamw", "nadam", "muon"]


@dataclass(frozen=True, slots=True)
class Arm:
    """An inner optimizer, and the age of its gradients in steps."""

    base: Base
    delay: int

    @property
    def name(self) -> str:
        """The name in the table's rows."""
        return f"{self.base}, {self.delay} late"

    def inner(self, module: nn.Module, rate: float) -> torch.optim.Optimizer:
        """Build the optimizer of a module; NAdam has the momentum of its source."""
        if self.base != "nadam":
            return InnerConfig(self.base, rate, weight_decay=DECAY).build(module)
        decays = {2: DECAY, 1: 0.0}
        kinds = [[x for x in module.parameters() if min(x.dim(), 2) == kind] for kind in decays]
        groups = [
            {"params": kind, "weight_decay": decay}
            for kind, decay in zip(kinds, decays.values(), strict=True)
        ]
        return nadam(groups, rate, (0.99, 0.95))


# No delay, one step as in PipeDream-2BW, and as many as in a pipeline of several stages.
_DELAYS: dict[Base, tuple[int, ...]] = {"adamw": (0, 1, 4), "nadam": (0, 1, 4), "muon": (0, 1)}
ARMS = tuple(Arm(base, delay) for base, delays in _DELAYS.items() for delay in delays)


class Late:
    """Training with gradients that are `delay` steps old, or at first the oldest that exist."""

    def __init__(self, module: nn.Module, inner: torch.optim.Optimizer, delay: int) -> None:
        self.module, self._inner, self._delay = module, inner, delay
        self._rates = [group["lr"] for group in inner.param_groups]
        self._stash = Stash(module, delay + 1)

    def step(
        self,
        loss_of: Callable[[nn.Module], Tensor],
        share: float = 1.0,
        clip_norm: float | None = CLIP_NORM,
    ) -> float:
        """Take one step at a share of the learning rate; return the loss at the old weights."""
        parameters = list(self.module.parameters())
        with self._stash.version(max(self._stash.epoch - self._delay, 0)):
            loss = loss_of(self.module)
            found = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._stash.leave()
        self._inner.step()
        return float(loss.detach())


class Size(Parameters, frozen=True, kw_only=True):
    """Parameters: every arm tries all `rates`; `held_out` is a number of sequences."""

    steps: Annotated[int, msgspec.Meta(ge=2, le=100_000)] = 200
    rates: Annotated[list[float], msgspec.Meta(min_length=1, max_length=16)]
    held_out: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]


def _loss(x: Tensor, y: Tensor, module: nn.Module) -> Tensor:
    return next_token_loss(module(x), y)


def read(size: Size, arm: Arm, rate: float, seed: int) -> float:
    """Train once and return the held-out loss, inf if it diverged; `seed` sets weights and
    batches."""
    text, rest, _ = texts()
    model, batches = build(MODEL, seed), Batches(text, SampleStream(seed, "delay"), BATCH, SEQ)
    trainer = Late(model, arm.inner(model, rate), arm.delay)
    schedule = Schedule(1.0, size.steps, warmup_tokens=size.steps // 10)  # in steps, not tokens
    for step in range(size.steps):
        x, y = batches.batch(step)
        loss = trainer.step(partial(_loss, x, y), schedule.rate(step, step))
        if not math.isfinite(loss):
            return math.inf
    end = evaluate(model, *evaluation(rest, SEQ, size.held_out)).mean
    return end if math.isfinite(end) else math.inf


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate the arms' held-out losses at their best rates, the cost of lateness, and the rates.

    Losses are in nats per token; a rate is best over all seeds. Raise `Failure` if an arm diverges
    at all rates.
    """
    runs = {arm.name: partial(read, size, arm) for arm in ARMS}
    rates, losses = tuned(runs, size.rates, size.seeds, progress)
    return Table(
        [sampled(name, values) for name, values in losses.items()]
        + _costs(losses)
        + [exact(f"{name}, best rate", rate) for name, rate in rates.items()],
        f"{size.steps} steps of {BATCH} x {SEQ} tokens, {len(size.rates)} rates, "
        f"{len(size.seeds)} seeds",
    )


def _costs(losses: Mapping[str, Sequence[float]]) -> list[Row]:
    """Return how much each delay increases the loss of its optimizer, seed by seed."""
    costs = []
    for arm in ARMS:
        if arm.delay:
            pairs = zip(losses[arm.name], losses[f"{arm.base}, 0 late"], strict=True)
            costs.append(
                sampled(
                    f"what {arm.delay} late costs {arm.base}",
                    [late - prompt for late, prompt in pairs],
                )
            )
    return costs
