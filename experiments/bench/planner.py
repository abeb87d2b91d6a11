"""What is our planner worth? Its time for 64 nodes, and its layouts' cost over the best there is and over a genetic search's.

The cost is DT-FM's, in seconds of communication a step (experiments/placement/layout.py). The cases are its worldwide
one (eight cities with eight machines each, GPT-3 XL in eight stages), the same model on the twelve regions of another
cloud, and links that are all drawn by chance, which are like nothing real but leave a planner no hint."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from farflock.experiments.bench import genetic, regions
from farflock.experiments.bench.metric import Metric, Options, load, medians, seconds
from farflock.experiments.bench.threads import one_thread
from farflock.experiments.placement.layout import Costs, Layout, Links, Traffic
from farflock.experiments.placement.planner import WORK, balanced, partition_count, partitions, plan

# DT-FM's workload: three of 24 layers of 1.3e9 parameters, four bytes each; and of a million tokens in sequences of 2048, what
# one of eight pipelines takes at once, two bytes for each of 2048 channels (its code has 2024 tokens, which must be a slip)
GPT3_XL = Traffic(gradient_bytes=1.3e9 * 4 * 3 / 24, activation_bytes=125_000 / 2048 * 2048 * 2048 * 2)


@dataclass(frozen=True, slots=True)
class Size:
    """How many nodes in how many stages, how many small cases are solved exactly, and how long the baseline searches."""

    nodes: int = 64
    stages: int = 8
    small: int = 50
    trials: int = 500
    work: int = WORK


QUICK = Size(16, 4, 3, 10, 500)
SMALL_NODES, SMALL_STAGES = 8, (2, 4)
# DT-FM's own, and the same with Kernighan and Lin's gain, which is stronger in some cases and weaker in others
BASELINES: dict[str, genetic.Gain] = {"planner.over_genetic": "circular", "planner.over_kernighan_lin": "kernighan-lin"}


@dataclass(frozen=True, slots=True)
class Case:
    """Links with a name, and what is sent over them."""

    name: str
    links: Links
    traffic: Traffic

    def plan(self, size: Size, seed: int) -> Layout:
        """Ours, from the links on."""
        return plan(Costs(self.links, self.traffic), balanced(size.nodes, size.stages), seed, size.work)


def run(options: Options) -> Iterator[Metric]:
    """`planner.seconds`, `planner.over_optimum`, and one of each of `BASELINES`."""
    size = QUICK if options.quick else Size()
    with one_thread():
        if options.wants("planner.seconds"):
            yield _seconds(size, options.repeats)
        if options.wants("planner.over_optimum"):
            yield _over_optimum(size)
        for metric, gain in BASELINES.items():
            if options.wants(metric):
                yield _over_genetic(size, metric, gain)


def cases(nodes: int) -> list[Case]:
    """The three, with so many nodes."""
    tables = regions.load()
    where = [regions.WORLDWIDE[node % len(regions.WORLDWIDE)] for node in range(nodes)]
    return [
        Case("worldwide", tables["aws"].links(where), GPT3_XL),
        Case("gcp", tables["gcp"].links(tables["gcp"].turns(nodes)), GPT3_XL),
        drawn(nodes, 0),
    ]


def drawn(nodes: int, seed: int) -> Case:
    """Latencies of 1 to 200 ms, 1 to 100 MB a second, gradients ten times as large as activations."""
    chance = np.random.Generator(np.random.PCG64(seed))
    links = Links.of(chance.uniform(0.001, 0.2, (nodes, nodes)), chance.uniform(1e6, 1e8, (nodes, nodes)))
    return Case("by chance", links, Traffic(5e7, 5e6))


def _seconds(size: Size, repeats: int) -> Metric:
    """Processor seconds of a plan, each repeat with another seed."""
    every = cases(size.nodes)
    for case in every:
        case.plan(size, 0)  # the first run fills caches
    taken = {
        case.name: [
            seconds(lambda case=case, seed=seed: case.plan(size, seed), time.process_time)  # type: ignore[misc]
            for seed in range(repeats)
        ]
        for case in every
    }
    value = statistics.median([one for each in taken.values() for one in each])
    each = ", ".join(
        f"{name} {statistics.median(times):.2f} (at most {max(times):.2f})" for name, times in taken.items()
    )
    note = f"{size.nodes} nodes in {size.stages} stages, one thread: {each}"
    return Metric("planner.seconds", value, None, None, repeats * len(every), load(), "processor seconds", note)


def _over_optimum(size: Size) -> Metric:
    """The worst of many cases; what the planner would find if it did not try all is in the note."""
    ours, searched = [], []
    for stages in SMALL_STAGES:
        sizes = balanced(SMALL_NODES, stages)
        for seed in range(size.small):
            case = drawn(SMALL_NODES, seed)
            costs = Costs(case.links, case.traffic)
            best = optimum(costs, sizes)
            ours.append(plan(costs, sizes, seed).seconds / best)
            searched.append(plan(costs, sizes, seed, work=partition_count(sizes) - 1).seconds / best)
    missed = sum(ratio > 1 + 1e-9 for ratio in searched)
    note = (
        f"{SMALL_NODES} nodes in {' and '.join(map(str, SMALL_STAGES))} stages, worst case; with too little work to try all,"
        f" {missed} are missed, at worst {max(searched):.4f}"
    )
    return Metric("planner.over_optimum", max(ours), 1.0, round(max(ours), 4), len(ours), load(), "optima", note)


def optimum(costs: Costs, sizes: tuple[int, ...]) -> float:
    """The cheapest layout's seconds."""
    return min(costs.layout(stages).seconds for stages in partitions(sizes))


def _over_genetic(size: Size, metric: str, gain: genetic.Gain) -> Metric:
    """The worst ratio of the cases counts; how much longer the baseline takes is in the note."""
    pairs, notes = [], []
    for case in cases(size.nodes):
        costs, sizes = Costs(case.links, case.traffic), balanced(size.nodes, size.stages)
        begin_s = time.process_time()
        ours = case.plan(size, 0).seconds
        between_s = time.process_time()
        theirs = genetic.search(costs, sizes, 0, genetic.Setting(gain, trials=size.trials)).seconds
        times = (time.process_time() - between_s) / (between_s - begin_s)
        pairs.append((ours, theirs))
        notes.append(f"{case.name} {ours:.4g} s to {theirs:.4g} s, which takes {times:.0f} times as long")
    value, yardstick, _ = medians(pairs)
    worst = max(ours / theirs for ours, theirs in pairs)
    note = f"the worst ratio; {size.nodes} nodes, {size.trials} trials: {'; '.join(notes)}"
    return Metric(metric, value, yardstick, round(worst, 4), len(pairs), load(), "seconds a step", note)
