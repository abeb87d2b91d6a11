"""The planner's time for 64 nodes, and its cost over the optimum and over a genetic search's.

The cost is DT-FM's, in seconds of communication per step (experiments/placement/layout.py). The
cases are its worldwide one (eight cities with eight machines each, GPT-3 XL in eight stages), the
same model on the twelve regions of another cloud, and links drawn at random, which resemble no real
network but give a planner no hint.
"""

import statistics
import time
from collections.abc import Iterator

from farflock.experiments.measure.metric import Metric, Options, load, medians, seconds
from farflock.experiments.measure.threads import one_thread
from farflock.experiments.placement import genetic
from farflock.experiments.placement.cases import Scale, cases, drawn
from farflock.experiments.placement.layout import Costs
from farflock.experiments.placement.planner import balanced, partition_count, partitions, plan

QUICK = Scale(16, 4, 3, 10, 500)
SMALL_NODES, SMALL_STAGES = 8, (2, 4)
# DT-FM's own search, and one with Kernighan and Lin's gain: better in some cases, worse in others.
BASELINES: dict[str, genetic.Gain] = {
    "planner.over_genetic": "circular",
    "planner.over_kernighan_lin": "kernighan-lin",
}


def run(options: Options) -> Iterator[Metric]:
    """Yield `planner.seconds`, `planner.over_optimum`, and one metric for each of `BASELINES`."""
    size = QUICK if options.quick else Scale()
    with one_thread():
        if options.wants("planner.seconds"):
            yield planner_seconds(size, options.repeats)
        if options.wants("planner.over_optimum"):
            yield over_optimum(size)
        for metric, gain in BASELINES.items():
            if options.wants(metric):
                yield over_genetic(size, metric, gain)


def planner_seconds(size: Scale, repeats: int) -> Metric:
    """Measure the processor seconds of a plan, each repeat with another seed."""
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
        f"{name} {statistics.median(times):.2f} (at most {max(times):.2f})"
        for name, times in taken.items()
    )
    note = f"{size.nodes} nodes in {size.stages} stages, one thread: {each}"
    return Metric(
        "planner.seconds",
        value,
        None,
        None,
        repeats * len(every),
        load(),
        "processor seconds",
        note,
    )


def over_optimum(size: Scale) -> Metric:
    """Measure the worst ratio over many cases; the note has that of a search that cannot try all
    layouts."""
    ours, searched = [], []
    for stages in SMALL_STAGES:
        sizes = balanced(SMALL_NODES, stages)
        for seed in range(size.small):
            case = drawn(SMALL_NODES, seed)
            costs = Costs(case.links, case.traffic)
            best = optimum(costs, sizes)
            ours.append(plan(costs, sizes, seed).seconds / best)
            searched.append(
                plan(costs, sizes, seed, work=partition_count(sizes) - 1).seconds / best
            )
    missed = sum(ratio > 1 + 1e-9 for ratio in searched)
    note = (
        f"{SMALL_NODES} nodes in {' and '.join(map(str, SMALL_STAGES))} stages, worst case; "
        f"with too little work to try all layouts, the search misses {missed} optima, "
        f"at worst {max(searched):.4f}"
    )
    return Metric(
        "planner.over_optimum",
        max(ours),
        1.0,
        round(max(ours), 4),
        len(ours),
        load(),
        "optima",
        note,
    )


def optimum(costs: Costs, sizes: tuple[int, ...]) -> float:
    """Return the seconds of the cheapest layout."""
    return min(costs.layout(stages).seconds for stages in partitions(sizes))


def over_genetic(size: Scale, metric: str, gain: genetic.Gain) -> Metric:
    """Measure the worst ratio over the cases; the note has the baseline's time."""
    pairs, notes = [], []
    for case in cases(size.nodes):
        costs, sizes = Costs(case.links, case.traffic), balanced(size.nodes, size.stages)
        begin_s = time.process_time()
        ours = case.plan(size, 0).seconds
        between_s = time.process_time()
        theirs = genetic.search(costs, sizes, 0, genetic.Setting(gain, trials=size.trials)).seconds
        times = (time.process_time() - between_s) / (between_s - begin_s)
        pairs.append((ours, theirs))
        notes.append(
            f"{case.name} {ours:.4g} s against {theirs:.4g} s, found in {times:.0f} times our time"
        )
    value, yardstick, _ = medians(pairs)
    worst = max(ours / theirs for ours, theirs in pairs)
    note = f"the worst ratio; {size.nodes} nodes, {size.trials} trials: {'; '.join(notes)}"
    return Metric(
        metric, value, yardstick, round(worst, 4), len(pairs), load(), "seconds a step", note
    )
