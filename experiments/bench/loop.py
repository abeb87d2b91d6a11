"""The speed of the node's loop next to a bare PyTorch loop: tokens per processor second, in turns.

`loop` is the ratio of both. What a training thread takes for the same steps differs by up to a
fifth from process to process, so it is the median over fresh processes, each with turns of its own.
`loop.outside` is what a step costs beyond the training thread: the processor time of all other
threads, by the thread's own clock.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from farflock.experiments.bench.workers.loop_process import QUICK, Size
from farflock.experiments.measure.metric import Metric, Options, load, medians
from farflock.experiments.measure.process import lines_of

WORKER = "farflock.experiments.bench.workers.loop_process"
ALLOWED_OUTSIDE_MS = 0.2  # the goal, a step
TIMEOUT_S = 600.0  # of one process


def run(options: Options) -> Iterator[Metric]:
    """Yield `loop` and `loop.outside`, from `options.repeats` processes."""
    size = QUICK if options.quick else Size()
    processes = [
        lines_of("a process with both loops", WORKER, size, TIMEOUT_S)
        for _ in range(options.repeats)
    ]
    yield _ratio(size, processes)
    yield _outside(size, processes)


def _ratio(size: Size, processes: Sequence[list[dict[str, Any]]]) -> Metric:
    """Return the medians over processes of each one's medians over turns."""
    tokens = size.steps * size.batch * size.seq
    each = [
        medians([(tokens / turn["ours_s"], tokens / turn["bare_s"]) for turn in turns])
        for turns in processes
    ]
    value, yardstick, ratio = (statistics.median(column) for column in zip(*each, strict=True))
    lowest, highest = min(one[2] for one in each), max(one[2] for one in each)
    note = (
        f"{size.preset} model, batch {size.batch} x {size.seq}, {size.turns} turns of {size.steps} "
        f"steps in each process, one thread; ratios from {lowest:.3f} to {highest:.3f}"
    )
    unit = "tokens a processor second"
    return Metric("loop", value, yardstick, round(ratio, 4), len(each), load(), unit, note)


def _outside(size: Size, processes: Sequence[list[dict[str, Any]]]) -> Metric:
    loop_ms, other_ms, step_ms = (
        statistics.median(
            statistics.median(turn[what] for turn in turns) / size.steps * 1000
            for turns in processes
        )
        for what in ("loop_s", "other_s", "train_s")
    )
    value = loop_ms + other_ms
    note = (
        f"the event loop {loop_ms:.3f}, other threads {other_ms:.3f}; "
        f"the training thread itself {step_ms:.2f}; the goal beside it"
    )
    ratio, unit = round(value / ALLOWED_OUTSIDE_MS, 4), "ms of CPU a step"
    return Metric(
        "loop.outside", value, ALLOWED_OUTSIDE_MS, ratio, len(processes), load(), unit, note
    )
