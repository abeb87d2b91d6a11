"""The share of communication's gain that a method keeps at 1/100 or 1/500 of DDP's bytes.

The screen runs each method's trials and both baselines' grids briefly, on one seed. The final runs
the best methods and the baselines for longer, on all seeds. The share of the gain is (none -
method) / (none - DDP), from the held-out losses of one seed; the result is its mean and standard
error over seeds.

Runs are those of `farflock reproduce`: the product's own nodes, codecs and links on the simulator,
with bytes counted at the transport, control messages included; each baseline is one process. Runs
are stored, so that none is repeated.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from farflock.experiments.measure.metric import NotMeasured
from farflock.experiments.quality.arms import Arms
from farflock.experiments.quality.pace import Pace, effort
from farflock.experiments.quality.score import Contender, Final, Run, Scores, best, ranked
from farflock.experiments.reproduce.job import EXACT_BYTES, Line, Swarm, key
from farflock.experiments.reproduce.recipe import LINES, Arm, Sizes
from farflock.experiments.reproduce.shelf import Kept
from farflock.experiments.reproduce.study import job_of
from farflock.experiments.reproduce.workers import outcomes
from farflock.node.model.llama import PRESETS, ModelConfig, build

RUNG = 0.6  # factor between the learning rates of a finalist's ladder
LADDER = 3  # rates on a ladder
STEP_S = 0.5  # of virtual time; no result depends on it


@dataclass(frozen=True, slots=True)
class Size:
    """Settings of all runs.

    A step takes `batch` sequences of `seq` tokens, shared evenly by the peers; DDP takes them all,
    no communication takes one peer's part. When a run ends, its loss is measured on `held_out`
    sequences.
    """

    model: ModelConfig = PRESETS["demo"]
    peers: int = 4
    batch: int = 16
    seq: int = 64
    screen_steps: int = 400
    steps: int = 2000
    seeds: tuple[int, ...] = (1, 2, 3)
    finalists: int = 5
    trials: int = 4  # per method; if 1, the baselines' grids shrink to their ends
    held_out: int = 512
    floor: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    clip: float = 1.0
    device: str = "cpu"


GPU = Size(
    PRESETS["10m"], batch=64, seq=256, screen_steps=300, steps=1500, held_out=256, device="gpu"
)
QUICK = Size(
    batch=8, seq=32, screen_steps=32, steps=48, seeds=(1, 2), finalists=1, trials=1, held_out=64
)


@functools.cache
def parameters_of(model: ModelConfig) -> int:
    """Return the number of values in a gradient of this model."""
    return sum(parameter.numel() for parameter in build(model, 0).parameters())


def ring_bytes(size: Size, steps: int) -> float:
    """Return a peer's bytes in exact ring all-reduces: 2(M-1)/M fp32 gradients per step."""
    return 2 * (size.peers - 1) / size.peers * EXACT_BYTES * parameters_of(size.model) * steps


class Bench:
    """All runs, stage by stage.

    `only` restricts them to methods named as in `diloco.100`, all of which are finalists.
    """

    def __init__(
        self, size: Size, arms: Arms, budgets: Sequence[int], only: Sequence[str] = ()
    ) -> None:
        self.size, self.budgets, self.only, self._arms = size, tuple(budgets), tuple(only), arms

    def run(self, shelf: Kept, workers: int, pace: Pace) -> Scores:
        """Run the jobs that the shelf lacks and return all scores.

        An interruption loses only the jobs that were running.
        """
        size = self.size
        runs = functools.partial(self._runs, shelf, workers, pace)
        screen = _by_name(runs(self.screened(), size.seeds[:1], size.screen_steps))
        if lacking := [line for line in LINES if best(screen[line]) is None]:
            raise NotMeasured(
                f"{' and '.join(lacking)} diverged at every learning rate of the grid; "
                "add lower rates in arms.toml"
            )
        entrants = [
            one.contender
            for name in self._finalists(screen)
            if (one := best(screen[name])) is not None
        ]
        first = runs(
            [one.at(one.trial.lr * rung) for one in entrants for rung in (1.0, RUNG)],
            size.seeds[:1],
            size.steps,
        )
        ladders = _by_name(first)
        for run in runs(
            [further(ladder) for ladder in ladders.values()], size.seeds[:1], size.steps
        ):
            ladders[run.contender.name] += (run,)
        chosen = [(best(ladder) or ladder[0]).contender for ladder in ladders.values()]
        seeds = _by_name(runs(chosen, size.seeds, size.steps))
        return Scores(screen, {name: Final(ladders[name], seeds[name]) for name in seeds})

    def screened(self) -> list[Contender]:
        """Return the baselines' grids and the methods' trials, grouped by name."""
        found = []
        for line in LINES:
            grid = self._arms.lines[line].trials()
            found += [
                Contender(line, None, trial)
                for trial in (grid if self.size.trials > 1 else [grid[0], grid[-1]])
            ]
        for budget, (name, arm) in itertools.product(self.budgets, self._arms.arms.items()):
            if not self.only or f"{name}.{budget}" in self.only:
                found += [
                    Contender(name, budget, trial) for trial in arm.at(budget)[: self.size.trials]
                ]
        return found

    def job(self, contender: Contender, seed: int, steps: int) -> Line | Swarm:
        """Return the job that runs a contender once."""
        size, name, trial, arm = self.size, contender.arm, contender.trial, None
        sizes = Sizes(
            **{field: getattr(size, field) for field in _COMMON},
            model=msgspec.to_builtins(size.model),
            steps=steps,
            betas=(size.beta1, trial.beta2),
            seeds=[seed],
            points=1,
            step_s=STEP_S,
        )
        if contender.budget is not None:
            own = self._arms.arms[name]
            arm = Arm(
                label=name,
                method=name,
                options=trial.options,
                optimizer=own.optimizer,
                clip=own.clip,
            )
        return job_of(sizes, name, arm, seed, (trial.lr, trial.warmup), size.device)

    def efforts(self) -> tuple[list[Line | Swarm], float]:
        """Return the screen's jobs, and the effort of the whole comparison.

        The finalists are not known yet, so methods of median effort stand for them.
        """
        size, screened = self.size, self.screened()
        jobs = [self.job(one, size.seeds[0], size.screen_steps) for one in screened]
        longer, runs = size.steps / size.screen_steps, LADDER - 1 + len(size.seeds)
        by_name = {one.name: effort(job) for one, job in zip(screened, jobs, strict=True)}
        lines = sum(by_name.pop(line) for line in LINES)
        entrants = len(self.only) or size.finalists * len(self.budgets)
        usual = sorted(by_name.values())[len(by_name) // 2] if by_name else 0.0
        return jobs, sum(map(effort, jobs)) + longer * runs * (lines + entrants * usual)

    def foreseen(self, shelf: Kept, unit_s: float, workers: int) -> float:
        """Estimate the seconds that the jobs missing from the shelf take; all finals count as
        missing."""
        jobs, total = self.efforts()
        kept = sum(effort(job) for job in jobs if shelf.find(job) is not None)
        return (total - kept) * unit_s / workers

    def probe(self) -> Line:
        """Return a job that measures this machine's speed: one peer without communication."""
        job = self.job(
            next(one for one in self.screened() if one.arm == "none"), self.size.seeds[0], 1
        )
        assert isinstance(job, Line)
        return job

    def measured_at(self, shelf: Kept, scores: Scores) -> float:
        """Return the time at which the last final run ended, in seconds since 1970."""
        runs = [run for final in scores.finals.values() for run in final.runs]
        return max(
            shelf.kept_at(self.job(run.contender, run.seed, self.size.steps)) for run in runs
        )

    def _finalists(self, screen: Mapping[str, Sequence[Run]]) -> list[str]:
        """Return the baselines and the best methods at each budget."""
        if self.only:
            return [*LINES, *self.only]
        budgets = (
            [name for name in screen if name.endswith(f".{budget}")] for budget in self.budgets
        )
        return [
            *LINES,
            *(name for names in budgets for name in ranked(screen, names)[: self.size.finalists]),
        ]

    def _runs(
        self,
        shelf: Kept,
        workers: int,
        pace: Pace,
        contenders: Iterable[Contender],
        seeds: Sequence[int],
        steps: int,
    ) -> list[Run]:
        """Return the contenders' runs in order, seed by seed."""
        wanted = [(one, seed, self.job(one, seed, steps)) for one in contenders for seed in seeds]
        # Long jobs start first, so that all workers end at about the same time.
        longest_first = sorted((job for _, _, job in wanted), key=effort, reverse=True)
        found = outcomes(longest_first, shelf, workers, pace.keep, pace.told)
        ring = ring_bytes(self.size, steps)
        return [Run(one, seed, found[key(job)], ring) for one, seed, job in wanted]


def further(ladder: Sequence[Run]) -> Contender:
    """Return the contender at a third rate, beyond the better of two, so that the best may lie
    between two others."""
    above, below = ladder
    down = below.counts and below.loss < above.loss
    rate = below.contender.trial.lr * RUNG if down else above.contender.trial.lr / RUNG
    return above.contender.at(rate)


def _by_name(runs: Iterable[Run]) -> dict[str, tuple[Run, ...]]:
    found: dict[str, tuple[Run, ...]] = {}
    for run in runs:
        found[run.contender.name] = (*found.get(run.contender.name, ()), run)
    return found


_COMMON = ("peers", "batch", "seq", "floor", "weight_decay", "clip", "held_out")
