"""One line of the scoreboard: a value, the yardstick it is held against, their ratio, and how far to trust them.

These machines are noisy, so a metric is the median of alternating runs, and says how many there were and how busy the
machine was meanwhile.
"""

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec


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

    def line(self) -> str:
        """The metric as one line of JSON."""
        return msgspec.json.encode(self).decode()


@dataclass(frozen=True, slots=True)
class Options:
    """What every benchmark is told. `repeats` is the number of alternating runs; `rate_bits` limits the links."""

    repeats: int = 5
    rate_bits: float | None = None
    quick: bool = False  # a small size, to see that a benchmark runs; its numbers say little


def load() -> float:
    """The machine's load of the last minute a core: above about 1 others ran beside us, and ratios are noisy."""
    return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)


def seconds(work: Callable[[], object]) -> float:
    """How long one call takes."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def alternate(repeats: int, *works: Callable[[], object]) -> tuple[float, ...]:
    """Median seconds of each, measured in alternation, so that a slow minute of the machine hits all of them alike."""
    for work in works:
        work()  # the first run fills caches
    rounds = [[seconds(work) for work in works] for _ in range(repeats)]
    return tuple(statistics.median(column) for column in zip(*rounds, strict=True))
