"""The cost of a lost stage, by the method of recovery, at equal numbers of steps.

The product's stages, trained in one process on the shipped plays, are lost as a seeded trace says.
Recovery is the product's: `recovery.policy.source` chooses, and `recovery.rebuild` makes the
tensors; swapped microbatches go where `SwappedPaths` sends them. As in the paper, failures come
between steps, never to the first and last stage (which embed and predict), and never to two
neighbours at once; a replacement is available at once. Restoring a checkpoint resets all stages and
the data, so steps are spent again.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

import msgspec
from torch import Tensor

from farflock.experiments.pipelines.table import Parameters, Progress, Table, sampled
from farflock.experiments.pipelines.text import texts
from farflock.node.data.samples import Text as Samples
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Batches, evaluation
from farflock.node.model.llama import ModelConfig, build
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.passes.stage import GradientAccumulator, MicrobatchGradient, Stage
from farflock.node.pipeline.recovery.policy import Situation, source
from farflock.node.pipeline.recovery.rebuild import (
    GradientScale,
    Neighbour,
    bumped_rate,
    neighbour_mean,
    partner_copy,
)
from farflock.node.run.split import split
from farflock.node.tokens.tokenizer import TokenIds
from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.paths.checkfree import SwappedPaths
from farflock.swarm.paths.policy import Microbatch, PathPolicy, fixed

ARMS = ("no failure", "swap, no failure", "checkfree", "checkfree+", "re-initialised", "checkpoint")
SWAPPED = ("swap, no failure", "checkfree+")
UNBROKEN = ("no failure", "swap, no failure")
WHEN = ("after 1/6", "after 2/6", "after 3/6", "after 4/6", "after 5/6", "at the end")
SAVED = ("param", "exp_avg", "exp_avg_sq", "step")
SMALL = ModelConfig(dim=64, layers=6, heads=4, kv_heads=4, ffn_dim=176, context=64, tied=False)


@dataclass(frozen=True, slots=True)
class Trial:
    """An experiment's sizes; `checkpoint_every` and `points` are in steps of `microbatches`.

    `probability` is that of a failure of each inner stage in each step.
    """

    config: ModelConfig = SMALL
    sizes: tuple[int, ...] = (1,) * 6
    steps: int = 600
    microbatches: int = 2
    batch: int = 4
    seq: int = 64
    rate: float = 3e-3
    warmup_steps: int = 40
    probability: float = 0.004
    checkpoint_every: int = 50
    points: tuple[int, ...] = (100, 200, 300, 400, 500, 600)
    held_out_sequences: int = 64
    seed: int = 0

    @property
    def tokens_a_step(self) -> int:
        """Tokens in all microbatches of a step."""
        return self.microbatches * self.batch * self.seq


@dataclass(frozen=True, slots=True)
class Failure:
    """The loss of a stage after `step` steps."""

    step: int
    stage: int


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm's held-out losses, its recoveries with their costs, and the steps in its weights."""

    losses: tuple[float, ...]
    recoveries: tuple[tuple[Failure, float], ...]
    progress: int

    @property
    def bump(self) -> float:
        """The mean increase of the loss by a recovery; 0 if there was none."""
        return fmean([added for _, added in self.recoveries] or [0.0])


def trace(trial: Trial) -> tuple[Failure, ...]:
    """Return seeded failures of inner stages after steps, never of two neighbours at once."""
    chance = random.Random(f"checkfree {trial.seed}")
    failures: list[Failure] = []
    for step in range(1, trial.steps):
        drawn = [
            stage for stage in range(1, len(trial.sizes) - 1) if chance.random() < trial.probability
        ]
        for stage in drawn:
            if Failure(step, stage - 1) not in failures:
                failures.append(Failure(step, stage))
    return tuple(failures)


def experiment(trial: Trial) -> tuple[tuple[Failure, ...], dict[str, Arm]]:
    """Return the trace and all arms under it, with the same initial weights and batches."""
    train, held_out, _ = texts()
    failures, text = trace(trial), Text.of(trial, train, held_out)
    return failures, {name: run(trial, name, failures, text) for name in ARMS}


@dataclass(frozen=True, slots=True)
class Text:
    """The training and held-out data of an arm."""

    batches: Batches
    held_out: tuple[Tensor, Tensor]

    @staticmethod
    def of(trial: Trial, train: Samples, held_out: TokenIds) -> "Text":
        """Return the data in the trial's sizes."""
        batches = Batches(train, SampleStream(trial.seed, "checkfree"), trial.batch, trial.seq)
        return Text(batches, evaluation(held_out, trial.seq, trial.held_out_sequences))


class Size(Parameters, frozen=True, kw_only=True):
    """A trial's parameters; the warm-up is a fifteenth of the steps, and each sixth is measured."""

    steps: Annotated[int, msgspec.Meta(ge=6, le=100_000)] = 600
    batch: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    held_out: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    probability: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.004
    checkpoint_every: Annotated[int, msgspec.Meta(ge=1)] = 50
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)] = msgspec.field(
        default_factory=lambda: [0]
    )


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate each arm's held-out losses, mean increase per recovery, and steps in its weights."""
    points = tuple(size.steps * sixth // 6 for sixth in range(1, 7))
    outcomes = []
    for number, seed in enumerate(size.seeds, 1):
        trial = Trial(
            steps=size.steps,
            warmup_steps=size.steps // 15,
            batch=size.batch,
            held_out_sequences=size.held_out,
            probability=size.probability,
            checkpoint_every=size.checkpoint_every,
            points=points,
            seed=seed,
        )
        outcomes.append(experiment(trial))
        progress(number / len(size.seeds))
    rows = []
    for name in ARMS:
        arms = [found[name] for _, found in outcomes]
        for of, when in enumerate(WHEN):
            rows.append(sampled(f"{name}, {when}", [arm.losses[of] for arm in arms]))
        rows.append(sampled(f"{name}, added by a recovery", [arm.bump for arm in arms]))
        rows.append(sampled(f"{name}, steps in the weights", [arm.progress for arm in arms]))
    lost = sum(len(failures) for failures, _ in outcomes)
    return Table(rows, f"{len(outcomes)} seeds of {size.steps} steps, {lost} stages lost")


def run(trial: Trial, name: str, failures: Sequence[Failure], text: Text) -> Arm:
    """Run one arm, with failures between its steps."""
    pipeline = Pipeline(trial, text, name in SWAPPED)
    recover = Recovery(pipeline, name)
    met = [] if name in UNBROKEN else failures
    losses: list[float] = []
    recoveries: list[tuple[Failure, float]] = []
    for spent in range(1, trial.steps + 1):
        pipeline.train()
        if name == "checkpoint" and pipeline.step % trial.checkpoint_every == 0:
            pipeline.save()
        for failure in met:
            if failure.step == spent:
                before = pipeline.loss()
                recover(failure.stage)
                recoveries.append((failure, pipeline.loss() - before))
        if spent in trial.points:
            losses.append(pipeline.loss())
    return Arm(tuple(losses), tuple(recoveries), pipeline.step)


class Served:
    """A stage and its optimizer; `since` counts steps since neighbours rebuilt it (None: never)."""

    def __init__(
        self, trial: Trial, span: range, tensors: Tensors | None = None, seed: int | None = None
    ) -> None:
        model = build(trial.config, trial.seed if seed is None else seed, span)
        if tensors is not None:
            model.load_state_dict(dict(tensors))
        share = sum(x.numel() for x in model.parameters()) / trial.config.parameters()
        self.span, self.stage = span, Stage(model)
        self.replica = PlainReplica(
            model, InnerConfig(lr=trial.rate).build(model), clip_norm=share**0.5
        )
        self.scale = GradientScale()
        self.since: int | None = None

    def update(self, asked: MicrobatchGradient, rate: float) -> None:
        """Take a step with the mean gradient of the microbatches."""
        gradients = {name: total / asked.tokens for name, total in asked.gradients.items()}
        self.scale = self.scale.after(gradients)
        self.replica.write(gradients, "grad")
        self.replica.inner_step(rate if self.since is None else bumped_rate(rate, self.since))
        self.since = None if self.since is None else self.since + 1

    def neighbour(self) -> Neighbour:
        """Return what the recovery of a neighbouring stage needs of this one."""
        return Neighbour(
            self.span, self.replica.read(self.replica.names, "param"), self.scale.omega()
        )


class Pipeline:
    """All stages in one process; `step` is the batch pointer."""

    def __init__(self, trial: Trial, text: Text, swapping: bool) -> None:
        self.trial, self.text, self.swapping = trial, text, swapping
        self.spans = split(trial.config, trial.sizes)
        self.stages = [Served(trial, span) for span in self.spans]
        usual = fixed(len(trial.sizes))
        self.policy: PathPolicy = SwappedPaths(usual, trial.sizes) if swapping else usual
        self.step = 0
        total = trial.steps * trial.tokens_a_step
        self._schedule = Schedule(trial.rate, total, trial.warmup_steps * trial.tokens_a_step)
        self._saved: tuple[int, list[dict[str, Tensors]]]
        self.save()

    def train(self) -> None:
        """Take one step of every stage, with all its microbatches."""
        sums = [GradientAccumulator() for _ in self.stages]
        for index in range(self.trial.microbatches):
            order = self.policy.stage_order(Microbatch(self.step, index, 0))
            inputs, targets = self.text.batches.batch(self.step * self.trial.microbatches + index)
            self._walk(order, inputs, targets, sums)
        rate = self._schedule.rate(self.step * self.trial.tokens_a_step, self.step)
        for served, accumulator in zip(self.stages, sums, strict=True):
            served.update(accumulator.take(), rate)
        self.step += 1

    def _walk(
        self, order: Sequence[int], x: Tensor, targets: Tensor, sums: Sequence[GradientAccumulator]
    ) -> None:
        inputs = []
        for stage in order:
            inputs.append(x)
            x = x if stage == order[-1] else self.stages[stage].stage.forward(x)
        gradient: Tensor | None = targets
        for stage, inside in zip(reversed(order), reversed(inputs), strict=True):
            assert gradient is not None, "a stage after the first returned no gradient of its input"
            done = self.stages[stage].stage.backward(inside, gradient)
            sums[stage].add(done.staged)
            gradient = done.input_gradient

    def loss(self) -> float:
        """Return the held-out loss in nats per token, with stages in order."""
        x, targets = self.text.held_out
        for served in self.stages[:-1]:
            x = served.stage.forward(x)
        return self.stages[-1].stage.loss_sum(x, targets) / targets.numel()

    def save(self) -> None:
        """Keep a checkpoint of all stages at this step."""
        state: list[dict[str, Tensors]] = [
            {what: one.replica.read(one.replica.names, what) for what in SAVED}
            for one in self.stages
        ]
        self._saved = self.step, state

    def go_back(self) -> None:
        """Reset all stages and the batch pointer to the last checkpoint."""
        self.step, state = self._saved
        for served, tensors in zip(self.stages, state, strict=True):
            for what in SAVED:
                served.replica.write(tensors[what], what)

    def replace(self, stage: int, tensors: Tensors | None, seed: int | None = None) -> Served:
        """Put a new replica in a stage's place, with zero moments, and return it."""
        self.stages[stage] = Served(self.trial, self.spans[stage], tensors, seed)
        return self.stages[stage]


class Recovery:
    """An arm's recovery of a lost stage; a call returns a description of the source."""

    def __init__(self, pipeline: Pipeline, arm: str) -> None:
        ways: dict[str, Callable[[int], str]] = {
            "re-initialised": self._by_chance,
            "checkpoint": self._from_checkpoint,
        }
        self._pipeline, self._way = pipeline, ways.get(arm, self._from_neighbours)

    def __call__(self, stage: int) -> str:
        return self._way(stage)

    def _from_neighbours(self, stage: int) -> str:
        pipeline = self._pipeline
        count = len(pipeline.stages)
        living = tuple(int(here != stage) for here in range(count))
        now = Situation(
            pipeline.step, pipeline.trial.sizes, living, (None,) * count, swapping=pipeline.swapping
        )
        chosen = source(now, stage)
        beside = [pipeline.stages[other].neighbour() for other in chosen.stages]
        config, span = pipeline.trial.config, pipeline.spans[stage]
        made = (
            neighbour_mean(config, span, *beside)
            if len(beside) == 2
            else partner_copy(config, span, beside[0])
        )
        pipeline.replace(stage, made).since = 0
        return f"{chosen.kind} of {' and '.join(map(str, chosen.stages))}"

    def _by_chance(self, stage: int) -> str:
        self._pipeline.replace(
            stage, None, seed=self._pipeline.trial.seed + 1_000_003 * (self._pipeline.step + 1)
        )
        return "initial weights"

    def _from_checkpoint(self, stage: int) -> str:
        self._pipeline.go_back()
        return f"all stages from step {self._pipeline.step}"
