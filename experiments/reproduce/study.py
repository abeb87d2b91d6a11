"""The run of a recipe: a learning-rate search for each arm, then all seeds at the best rate.

Both baselines are searched like the arms, on the first seed and the tier's grid (an arm may have
its own): compared with an untuned baseline, any arm looks good.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from farflock.experiments.pipelines.text import texts
from farflock.experiments.reproduce.job import (
    EXACT_BYTES,
    AnyJob,
    Line,
    Noise,
    Outcome,
    Point,
    Swarm,
    key,
)
from farflock.experiments.reproduce.recipe import LINES, Arm, Recipe, Sizes, missing, options_of
from farflock.experiments.reproduce.shelf import Shelf
from farflock.experiments.reproduce.verdict import (
    UNKNOWN,
    YES,
    Finding,
    estimate,
    judge,
    rises,
    together,
)
from farflock.experiments.reproduce.workers import outcomes
from farflock.node.errors import Failure, Usage

Setting = tuple[float, float]  # learning rate; warm-up, as a share of the steps
# DDP must beat no communication by this many standard errors before any arm can be judged.
GAIN_ERRORS = 3.0
LABELS = {"ddp": "DDP, exact", "none": "no communication"}


@dataclass(frozen=True, slots=True)
class Result:
    """One arm's result: the outcomes of its seeds, in order, at the best setting of its grid."""

    name: str
    label: str
    setting: Setting
    grid: Mapping[Setting, float | None]  # each one's loss on the first seed; None: diverged
    outcomes: tuple[Outcome, ...]

    def values(self, metric: str) -> list[float]:
        """Return a metric's value for each seed, or an empty list if any seed lacks it."""
        found = [outcome.metrics[metric] for outcome in self.outcomes if metric in outcome.metrics]
        return found if len(found) == len(self.outcomes) else []

    @property
    def at_edge(self) -> bool:
        """True if the best rate is at an end of its grid; a better one may lie outside."""
        rates = sorted({rate for rate, _ in self.grid})
        return len(rates) > 1 and self.setting[0] in (rates[0], rates[-1])


class Study:
    """One recipe at the sizes of one tier, on a device of this name (None: the tier's)."""

    def __init__(self, recipe: Recipe, tier: str, device: str | None = None) -> None:
        self.recipe, self.tier = recipe, tier
        self.sizes = recipe.sizes(tier)
        self.device = device or self.sizes.device
        if lacking := missing(recipe):
            raise Usage(
                f"{recipe.name} cannot run",
                f"this version has no method {', '.join(lacking)}",
                "update farflock",
            )
        lines = LINES if recipe.experiment == "training" else ()
        self.arms: dict[str, Arm | None] = {**dict.fromkeys(lines), **recipe.expanded()}

    def described(self) -> dict[str, Any]:
        """Return the resolved configuration, for `--dry-run`."""
        return {
            "recipe": self.recipe.name,
            "tier": self.tier,
            "sizes": msgspec.to_builtins(self.sizes),
            "arms": {
                name: [msgspec.to_builtins(job) for job in self.searched(name)]
                for name in self.arms
            },
            "verdict": msgspec.to_builtins(self.recipe.verdict),
        }

    def run(self, shelf: Shelf, workers: int, progress: Callable[[float], None]) -> list[Result]:
        """Run the jobs that the shelf lacks and return each arm's result.

        An interruption loses only the jobs that were running.
        """
        seeds = self.sizes.seeds
        search = {name: self.searched(name) for name in self.arms if len(self._grid(name)) > 1}
        steps = _Steps(sum(map(len, search.values())), len(self.arms) * len(seeds), progress)
        found = outcomes(
            itertools.chain.from_iterable(search.values()), shelf, workers, steps.keep, steps.told
        )
        best = {name: self._best(name, search.get(name, []), found) for name in self.arms}
        finals = {
            name: [self.job(name, seed, best[name][0]) for seed in seeds] for name in self.arms
        }
        found |= outcomes(
            itertools.chain.from_iterable(finals.values()), shelf, workers, steps.keep, steps.told
        )
        results = []
        for name, arm in self.arms.items():
            scaled = tuple(self._scaled(name, found[key(job)]) for job in finals[name])
            results.append(Result(name, arm.label if arm else LABELS[name], *best[name], scaled))
        self._require_tokens(results)
        return results

    def judged(self, results: Sequence[Result]) -> list[Finding]:
        """Judge each of the recipe's rules."""
        by_name = {result.name: result for result in results}
        sweeps = {
            name: {value: f"{name}@{value:g}" for value in arm.sweep.values}
            for name, arm in self.recipe.arms.items()
            if arm.sweep is not None
        }
        idle = self._idle(by_name)
        findings = []
        for rule in self.recipe.verdict:
            finding = judge(
                rule, {name: result.values(rule.metric) for name, result in by_name.items()}, sweeps
            )
            if idle and rule.metric in ("loss", "perplexity"):
                finding = Finding(UNKNOWN, finding.ours, f"{idle}; {finding.reason}")
            findings.append(finding)
        return findings

    def job(self, name: str, seed: int, setting: Setting) -> AnyJob:
        """Return the job that runs an arm once, with this seed and setting."""
        arm, sizes = self.arms[name], self.sizes
        if self.recipe.experiment == "noise":
            assert arm is not None
            options = options_of(arm, sizes)
            return Noise(
                seed=seed,
                peers=sizes.peers,
                rounds=sizes.steps,
                alpha=options["alpha"],
                gamma=options["gamma"],
            )
        return job_of(sizes, name, arm, seed, setting, self.device)

    def _grid(self, name: str) -> list[Setting]:
        arm = self.arms[name]
        if self.recipe.experiment == "noise":
            return [(0.0, 0.0)]
        rates = arm.lr if arm is not None and arm.lr is not None else self.sizes.lr
        return list(itertools.product(rates, self.sizes.warmup))

    def searched(self, name: str) -> list[AnyJob]:
        """Return the jobs of an arm's search: each setting of its grid, on the first seed."""
        return [self.job(name, self.sizes.seeds[0], setting) for setting in self._grid(name)]

    def _best(
        self, name: str, search: Sequence[AnyJob], found: Mapping[str, Outcome]
    ) -> tuple[Setting, dict[Setting, float | None]]:
        """Return the setting with the lowest loss on the first seed, and the whole grid."""
        grid = self._grid(name)
        if not search:
            return grid[0], {}
        losses = {
            setting: found[key(job)].metrics.get("loss")
            for setting, job in zip(grid, search, strict=True)
        }
        return min(
            grid, key=lambda setting: math.inf if (loss := losses[setting]) is None else loss
        ), losses

    def _scaled(self, name: str, outcome: Outcome) -> Outcome:
        """Scale a baseline, run in one process, to the swarm's tokens and time.

        DDP also gets the bytes of a ring all-reduce; no communication sends none.
        """
        if name not in LINES or outcome.diverged:
            return outcome
        peers, sizes = self.sizes.peers, self.sizes
        # Every step of DDP waits for its slowest peer.
        slowest = max(
            (max(arm.speeds, default=1.0) for arm in self.recipe.arms.values()), default=1.0
        )
        total = sizes.steps * sizes.batch * sizes.seq
        ring = (
            2 * (peers - 1) / peers * outcome.parameters * EXACT_BYTES * sizes.steps
            if name == "ddp"
            else 0.0
        )
        last = outcome.curve[-1].tokens

        def scaled(point: Point) -> Point:
            share = point.tokens / last
            elapsed_s = share * sizes.steps * sizes.step_s * (slowest if name == "ddp" else 1.0)
            return msgspec.structs.replace(
                point, tokens=round(share * total), sent_bytes=share * ring, compute_s=elapsed_s
            )

        metrics = outcome.metrics | {"tokens": float(total), "bytes": ring}
        return msgspec.structs.replace(
            outcome, metrics=metrics, curve=[scaled(point) for point in outcome.curve]
        )

    def _idle(self, results: Mapping[str, Result]) -> str:
        """Return why losses cannot be judged (DDP gains too little to tell), or "" if they can."""
        if self.recipe.experiment == "noise" or self.sizes.peers == 1:
            return ""
        both = results["none"].values("loss"), results["ddp"].values("loss")
        if not all(both):
            return "a baseline diverged"
        gain = estimate([none - ddp for none, ddp in zip(*both, strict=True)])
        return (
            ""
            if rises(gain, GAIN_ERRORS) == YES
            else f"DDP gains {gain.text} over no communication, too little to judge by"
        )

    def _require_tokens(self, results: Iterable[Result]) -> None:
        """Raise `Failure` unless arms whose peers are equally fast trained the planned tokens."""
        planned = self.sizes.steps * self.sizes.batch * self.sizes.seq
        for result in results:
            arm = self.arms[result.name]
            if self.recipe.experiment == "noise" or (arm is not None and arm.speeds):
                continue
            for tokens in result.values("tokens"):
                if tokens != planned:
                    raise Failure(
                        f"{self.recipe.name}: {result.name} trained {tokens:.0f} tokens",
                        f"{planned} were planned",
                        "report this as a bug",
                    )


def job_of(
    sizes: Sizes,
    name: str,
    arm: Arm | None,
    seed: int,
    setting: Setting,
    device: str = "cpu",
) -> Line | Swarm:
    """Return the job for one run of an arm, or of the baseline `name` if `arm` is None."""
    common = {field: getattr(sizes, field) for field in _COMMON} | {
        "seed": seed,
        "lr": setting[0],
        "warmup": setting[1],
        "model": sizes.shape,
        "corpus": texts()[2],
        "optimizer": arm.optimizer if arm else "adamw",
        "device": device,
    }
    if arm is None:
        return Line(
            **{**common, "batch": sizes.batch if name == "ddp" else sizes.batch // sizes.peers}
        )
    if arm.clip is not None:
        common["clip"] = arm.clip
    return Swarm(
        **common,
        method=arm.method,
        options=options_of(arm, sizes),
        peers=arm.peers or sizes.peers,
        late=arm.late,
        speeds=tuple(arm.speeds),
        step_s=sizes.step_s,
    )


def verdict(tier: str, findings: Sequence[Finding]) -> str | None:
    """Return the recipe's verdict; None in tier ci, whose runs are too small."""
    return None if tier == "ci" else together(findings)


class _Steps:
    """The finished share of a study, over two phases that may share jobs."""

    def __init__(self, search: int, final: int, progress: Callable[[float], None]) -> None:
        self._total, self._done, self._progress = search + final, 0, progress
        self._running: dict[int, float] = {}

    def keep(self, jobs: Sequence[AnyJob]) -> None:
        """Count jobs found on the shelf."""
        self._done += len(jobs)
        self._tell()

    def told(self, job: AnyJob, share: float) -> None:
        """Record a job's progress."""
        self._running[id(job)] = share
        self._tell()

    def _tell(self) -> None:
        self._progress(min((self._done + sum(self._running.values())) / self._total, 1.0))


_COMMON = (
    "batch",
    "seq",
    "steps",
    "floor",
    "weight_decay",
    "betas",
    "clip",
    "points",
    "held_out",
)
