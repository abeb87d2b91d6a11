"""One line of the scoreboard: a value, the yardstick it is held against, their ratio, and how far to trust them.

These machines are noisy, so a metric is the median of alternating runs, and says how many there were and how busy the
machine was meanwhile. What works alone in its process is timed by the processor's clock, which others cannot stretch.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


class NotMeasured(RuntimeError):
    """A benchmark could not be run here, or what it runs did not do its work: no number at all instead of a wrong one."""


@dataclass(frozen=True, slots=True)
class Metric:
    """`value` and `yardstick` are in `unit` (None: there is no yardstick to run); `ratio` is what the scoreboard names."""

    metric: str
    value: float
    yardstick: float | None
    ratio: float | None
    n: int
    load: float
    unit: str = "s"
    note: str = ""


COLUMNS = tuple(field.name for field in fields(Metric))  # of a line, in order


@dataclass(frozen=True, slots=True)
class Options:
    """What every benchmark is told. `repeats` is the number of alternating runs; `rate_bits` limits the links; `only` is
    the one metric that was asked for, None for all of the benchmark's."""

    repeats: int = 5
    rate_bits: float | None = None
    quick: bool = False  # a small size, to see that a benchmark runs; its numbers say little
    only: str | None = None

    def wants(self, metric: str) -> bool:
        """Whether this metric is to be measured: benchmarks with many skip the others."""
        return self.only in (None, metric)


def load() -> float:
    """The machine's load of the last minute a core: above about 1 others ran beside us, and ratios are noisy."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long one call takes."""
    begin_s = clock()
    work()
    return clock() - begin_s


def turns(
    repeats: int, *works: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, ...]]:
    """Seconds of each work in each of `repeats` rounds of alternation; with `time.process_time`, of the processor."""
    for work in works:
        work()  # the first run fills caches
    return [tuple(seconds(work, clock) for work in works) for _ in range(repeats)]


def medians(pairs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Of (value, yardstick) pairs: the median value, the median yardstick, and the median of the pairs' own ratios, which
    a slow minute of the machine moves least. The third is therefore not quite the first over the second."""
    values, yardsticks = zip(*pairs, strict=True)
    ratios = [value / yardstick for value, yardstick in pairs]
    return statistics.median(values), statistics.median(yardsticks), round(statistics.median(ratios), 4)
