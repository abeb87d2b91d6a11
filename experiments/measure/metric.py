"""One line of the scoreboard: a value, its yardstick, their ratio, and how far to trust them.

These machines are noisy, so a metric is the median of alternating runs, with their number and the
machine's load. Work that is alone in its process is timed by the processor's clock, which other
processes cannot stretch.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


class NotMeasured(RuntimeError):
    """A benchmark could not run here, or did not do its work: no number instead of a wrong one."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A value and its yardstick in `unit` (None: nothing to run), and the scoreboard's `ratio`."""

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
    """Alternating runs (`repeats`), a limit for links, and the one requested metric (None: all)."""

    repeats: int = 5
    rate_bits: float | None = None
    quick: bool = False  # a small size, to see that a benchmark runs; its numbers say little
    only: str | None = None

    def wants(self, metric: str) -> bool:
        """Return whether this metric is to be measured."""
        return self.only in (None, metric)


def load() -> float:
    """Return the load of the last minute per core; above about 1, ratios are noisy."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the duration of one call."""
    begin_s = clock()
    work()
    return clock() - begin_s


def turns(
    repeats: int, *works: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, ...]]:
    """Return the seconds of each work in each of `repeats` alternating rounds, by `clock`."""
    for work in works:
        work()  # the first run fills caches
    return [tuple(seconds(work, clock) for work in works) for _ in range(repeats)]


def medians(pairs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the median value, the median yardstick, and the median of the pairs' own ratios.

    A slow minute moves the ratios least, so the third is not quite the first over the second.
    """
    values, yardsticks = zip(*pairs, strict=True)
    ratios = [value / yardstick for value, yardstick in pairs]
    return (
        statistics.median(values),
        statistics.median(yardsticks),
        round(statistics.median(ratios), 4),
    )
