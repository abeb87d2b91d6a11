"""Searches for cheap layouts of machines into pipelines, on DT-FM's worldwide case.

DT-FM's ordering (Yuan et al., arXiv:2206.01288, section 4) is judged by its own cost of
communication per step. The searches are those of the benchmark (experiments/placement/genetic.py)
and begin with the same random partitions; our planner is added for comparison.
"""

import random
import statistics
from typing import Annotated

import msgspec

from farflock.experiments.pipelines.table import Parameters, Progress, Table, sampled
from farflock.experiments.placement import genetic
from farflock.experiments.placement.cases import Scale, cases
from farflock.experiments.placement.layout import Costs
from farflock.experiments.placement.planner import balanced

SEARCHES: dict[str, genetic.Gain] = {"DT-FM": "circular", "Kernighan-Lin": "kernighan-lin"}


class Size(Parameters, frozen=True, kw_only=True):
    """Machines in eight cities, stages, children per search (`trials`), and random partitions."""

    machines: Annotated[int, msgspec.Meta(ge=8, le=256)] = 64
    stages: Annotated[int, msgspec.Meta(ge=2, le=16)] = 8
    trials: Annotated[int, msgspec.Meta(ge=0, le=100_000)]
    partitions: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 24
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=100)]


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate seconds of communication per step."""
    case = next(case for case in cases(size.machines) if case.name == "worldwide")
    costs, sizes = Costs(case.links, case.traffic), balanced(size.machines, size.stages)
    found: dict[str, list[float]] = {}
    for number, seed in enumerate(size.seeds):
        found.setdefault("random", []).append(_random(costs, sizes, size.partitions, seed))
        for at, (name, gain) in enumerate(SEARCHES.items(), 1):
            setting = genetic.Setting(gain, population=size.partitions, trials=size.trials)
            found.setdefault(name, []).append(genetic.search(costs, sizes, seed, setting).seconds)
            progress((number + at / len(SEARCHES)) / len(size.seeds))
        ours = case.plan(Scale(size.machines, size.stages), seed).seconds
        found.setdefault("our planner", []).append(ours)
    over = [random_s / ours for random_s, ours in zip(found["random"], found["DT-FM"], strict=True)]
    rows = [sampled(name, values) for name, values in found.items()]
    return Table(
        [*rows, sampled("random over DT-FM", over)],
        f"{size.machines} machines in {size.stages} stages, {size.trials} children a search, "
        f"{len(size.seeds)} seeds",
    )


def _random(costs: Costs, sizes: tuple[int, ...], partitions: int, seed: int) -> float:
    """Return the mean cost of random partitions of these sizes, in their cheapest order."""
    chance, seconds = random.Random(f"{seed}/partitions"), []
    genome = [stage for stage, count in enumerate(sizes) for _ in range(count)]
    for _ in range(partitions):
        chance.shuffle(genome)
        seconds.append(costs.layout(genetic.stages_of(genome)).seconds)
    return statistics.fmean(seconds)
