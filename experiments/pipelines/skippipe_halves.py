"""The perplexity of half of a model's layers at inference, by how the model was trained.

The product's stages of one layer each are trained in one process (experiments/pipelines/
checkfree.py), once with every microbatch through all stages, once with the paths of policy
`skip:K`, which leave stages out in turn. Both arms have the same weights at first and the same
batches. Then the held-out loss is measured on all stages, and on paths through half of them: the
first, which embeds, the last, which predicts, and any choice of those between.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean
from typing import Annotated

import msgspec

from farflock.experiments.measure.threads import one_thread
from farflock.experiments.pipelines.checkfree import SMALL, Pipeline, Text, Trial
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, sampled
from farflock.experiments.pipelines.text import texts
from farflock.node.errors import Failure
from farflock.node.run.policies import policy_of
from farflock.swarm.paths.policy import Microbatch, PathPolicy, ReorderedPaths

STAGES = SMALL.layers
HALF = STAGES // 2
VISITED = 4  # by a path of six: a third is skipped, as in SkipPipe's released plan
# Of a step. So many paths are a cycle, in which each inner stage is visited equally often.
MICROBATCHES = STAGES - 2
POLICIES = {"trained whole": "fixed", "trained with skips": f"skip:{VISITED}"}


class Size(Parameters, frozen=True, kw_only=True):
    """Parameters: a step has `MICROBATCHES` of `batch` sequences."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    batch: Annotated[int, msgspec.Meta(ge=1, le=256)] = 4
    rate: Annotated[float, msgspec.Meta(gt=0)] = 3e-3
    held_out: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 128  # sequences
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=16)]


class NumberedThrough(ReorderedPaths):
    """A policy whose microbatches are numbered through, as trainers number them; a step has
    `count` of them."""

    def __init__(self, policy: PathPolicy, count: int) -> None:
        super().__init__(policy)
        self._count = count

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        number = microbatch.step * self._count + microbatch.index
        return self._policy.stage_order(Microbatch(number, 0, microbatch.lane))

    def share(self, stage: int) -> Fraction:
        return self._policy.share(stage)


@dataclass(frozen=True, slots=True)
class Losses:
    """Held-out losses: of all stages, and of each path through half of them."""

    whole: float
    halves: tuple[float, ...]


def halves() -> list[tuple[int, ...]]:
    """Return all paths through half of the stages, which keep the first and the last."""
    between = itertools.combinations(range(1, STAGES - 1), HALF - 2)
    return [(0, *kept, STAGES - 1) for kept in between]


def loss_of(pipeline: Pipeline, order: Sequence[int]) -> float:
    """Return the held-out loss in nats per token on a path through some of the stages."""
    x, targets = pipeline.text.held_out
    for stage in order[:-1]:
        x = pipeline.stages[stage].stage.forward(x)
    return pipeline.stages[order[-1]].stage.loss_sum(x, targets) / targets.numel()


def trained(size: Size, policy: str, seed: int) -> Losses:
    """Train with a policy's paths and measure."""
    trial = Trial(
        steps=size.steps,
        microbatches=MICROBATCHES,
        batch=size.batch,
        rate=size.rate,
        warmup_steps=size.steps // 15,
        held_out_sequences=size.held_out,
        seed=seed,
    )
    train, held_out, _ = texts()
    pipeline = Pipeline(trial, Text.of(trial, train, held_out), swapping=False)
    chosen = policy_of(policy, trial.sizes, seed, "trainer")
    pipeline.policy = NumberedThrough(chosen, MICROBATCHES)
    for _ in range(size.steps):
        pipeline.train()
    found = Losses(
        loss_of(pipeline, range(STAGES)), tuple(loss_of(pipeline, each) for each in halves())
    )
    if not all(map(math.isfinite, (found.whole, *found.halves))):
        raise Failure(f"policy {policy}, seed {seed}", "it diverged", "choose a lower `rate`")
    return found


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate perplexities of the whole and the halved model, and what halving adds."""
    found: dict[str, list[Losses]] = {name: [] for name in POLICIES}
    with one_thread():
        for place, seed in enumerate(size.seeds):
            for number, (name, policy) in enumerate(POLICIES.items(), 1):
                found[name].append(trained(size, policy, seed))
                progress((place * len(POLICIES) + number) / (len(POLICIES) * len(size.seeds)))
    rows = [row for name, losses in found.items() for row in _rows(name, losses)]
    return Table(
        rows,
        f"{SMALL.parameters():,} parameters in {STAGES} stages, of which paths with skips visit "
        f"{VISITED} and a half has {HALF}, {size.steps} steps of {MICROBATCHES} x {size.batch} x "
        f"{SMALL.context} tokens, rate {size.rate:g}, {len(size.seeds)} seeds",
    )


def _rows(name: str, losses: Sequence[Losses]) -> list[Row]:
    half = [fmean(one.halves) for one in losses]
    growth = [math.exp(loss - one.whole) for loss, one in zip(half, losses, strict=True)]
    best = [math.exp(min(one.halves) - one.whole) for one in losses]
    return [
        sampled(f"{name}, whole, perplexity", [math.exp(one.whole) for one in losses]),
        sampled(f"{name}, half, perplexity", [math.exp(loss) for loss in half]),
        sampled(f"{name}, half over whole", growth),
        sampled(f"{name}, best half over whole", best),
    ]
