"""One line of the scoreboard: a value, its yardstick, their ratio, and how far to trust them.

Machines are noisy, so a metric is the median of alternating runs, with their number and the
machine's load. Work that is alone in its process is timed in processor seconds, which other
processes cannot stretch.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields


class NotMeasured(RuntimeError):
    """Raised if a benchmark cannot run here, or did not do its work: better no number than a wrong
    one."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A value and its yardstick in `unit` (None: there is no yardstick), and their `ratio`."""

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
    """The number of runs (`repeats`), the rate of links, and what is requested (None: all)."""

    repeats: int = 5
    rate_bits: float | None = None
    quick: bool = False  # small sizes, to check that a benchmark runs; its numbers mean little
    only: str | None = None
    parameters: int | None = None  # the size of what is measured, where that can be chosen
    method: str | None = None  # the only method to measure
    codec_threads: int = 1  # that encode and decode
    device: str = "auto"  # of the GPU benchmark

    def wants(self, metric: str) -> bool:
        """Return whether to measure this metric: `codec.int8.x` is a part of `codec.int8`."""
        return self.only is None or f"{metric}.".startswith(f"{self.only}.")


def load() -> float:
    """Return the load average of the last minute per core; above about 1, ratios are noisy."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the duration of one call by `clock`."""
    begin_s = clock()
    work()
    return clock() - begin_s


def turns(
    repeats: int, *works: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, ...]]:
    """Time all works in turn, `repeats` times; return the seconds of each, round by round."""
    for work in works:
        work()  # the first run fills caches
    return [tuple(seconds(work, clock) for work in works) for _ in range(repeats)]


def medians(pairs: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Return the median value, the median yardstick, and the median of the pairs' own ratios.

    The third is not quite the first over the second, but a slow minute distorts it least.
    """
    values, yardsticks = zip(*pairs, strict=True)
    ratios = [value / yardstick for value, yardstick in pairs]
    return (
        statistics.median(values),
        statistics.median(yardsticks),
        round(statistics.median(ratios), 4),
    )
