"""Hours until a loss is reached when stages fail: the arithmetic of CheckFree's Table 2.

The model has 500M parameters and trains to a validation loss of 2.85 (arXiv:2506.15461).

Each strategy's seconds per iteration and hours (`TABLE`), the failure rates, and the released
code's probabilities are the paper's. All of the table's hours are a multiple of 500 iterations
times seconds per iteration, and redundant computation, which loses nothing, needs 10,000: so the
table's iterations, and CheckFree's penalty by rate, can be read off it. Two costs are predicted
here without the table's hours: that of checkpoints every k iterations by replay alone, and that of
redundant forward passes by computation alone.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from farflock.experiments.pipelines.table import Parameters, Progress, Table, exact

RATES = (0.05, 0.10, 0.16)  # failures of a stage per hour
STAGES = 6
CODE_PROBABILITY = (0.0009, 0.002, 0.004)  # per iteration, in the released code, by rate
BACKWARD = 2.5  # times a forward pass, in the released time model
PERIODS = (10, 40, 50, 100)  # iterations between checkpoints; 40, 50 and 100 are the paper's
GRANULE = 500  # iterations between the paper's evaluations, inferred from its hours

# strategy -> by rate: (seconds per iteration, hours)
TABLE: dict[str, tuple[tuple[float, float], ...]] = {
    "checkpointing": ((91.35, 558.23), (91.35, 621.67), (92.14, 634.35)),
    "redundancy": ((151.04, 419.56), (151.04, 419.56), (151.04, 419.56)),
    "checkfree": ((91.32, 367.81), (91.32, 405.87), (92.12, 562.96)),
    "checkfree+": ((91.32, 355.13), (91.32, 367.81), (92.12, 460.60)),
}


def probability(rate_per_h: float, iteration_s: float, stages: int = STAGES) -> float:
    """Return the chance per iteration of a failure among stages that fail at `rate_per_h` each."""
    return -math.expm1(stages * iteration_s / 3600 * math.log1p(-rate_per_h))


def replayed(useful: float, period: float, chance: float) -> float:
    """Return the expected iterations until `useful` are done, if failed ones are replayed.

    Each iteration fails with probability `chance`, which sends all stages back to the last multiple
    of `period`: `period` successes in a row take (1 - qᵏ) / (p qᵏ) trials on average.
    """
    if chance == 0:
        return useful
    trials = math.expm1(-period * math.log1p(-chance)) / chance
    return useful / period * trials


def explaining_period(useful: float, iterations: float, chance: float) -> float:
    """Return the period whose replay turns `useful` iterations into `iterations`, by bisection."""
    low, high = 1.0, 100 / chance
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (
            (middle, high) if replayed(useful, middle, chance) < iterations else (low, middle)
        )
    return low


def redundant_iteration_s(plain_s: float, backward: float = BACKWARD) -> float:
    """Return an iteration's seconds if each stage also does its successor's forward passes.

    As in Bamboo; all time counts as computation.
    """
    return plain_s * (2 + backward) / (1 + backward)


def crossover(
    rates: Sequence[float], rising: Sequence[float], level: Sequence[float]
) -> float | None:
    """Return the rate where `rising` overtakes `level`, linear between rates; None if never."""
    gaps = [one - other for one, other in zip(rising, level, strict=True)]
    for (here, gap), (there, next_gap) in pairwise(zip(rates, gaps, strict=True)):
        if gap < 0 <= next_gap:
            return here + (there - here) * gap / (gap - next_gap)
    return None


def useful_iterations() -> float:
    """Return redundant computation's iterations from the table's hours, rounded to `GRANULE`."""
    iteration_s, hours = TABLE["redundancy"][0]
    return GRANULE * round(hours * 3600 / iteration_s / GRANULE)


def iterations(strategy: str, place: int) -> float:
    """Return the iterations behind a cell's hours; `place` is an index into `RATES`."""
    iteration_s, hours = TABLE[strategy][place]
    return hours * 3600 / iteration_s


def replay_h(place: int, period: int, chance: float) -> float:
    """Return the hours to the loss if checkpoints every `period` iterations cost replay alone."""
    return replayed(useful_iterations(), period, chance) * TABLE["checkpointing"][place][0] / 3600


def crossovers() -> dict[str, float | None]:
    """Return the rate above which redundancy is faster than each CheckFree; None if never."""
    hours = {name: [h for _, h in cells] for name, cells in TABLE.items()}
    return {
        name: crossover(RATES, hours[name], hours["redundancy"])
        for name in ("checkfree", "checkfree+")
    }


class Size(Parameters, frozen=True, kw_only=True):
    """No parameters: the table is the input."""


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate the paper's cells, the predictions, and the crossovers (100 % if there is none)."""
    useful, plain_s = useful_iterations(), TABLE["checkpointing"][0][0]
    chances = [probability(rate, plain_s) for rate in RATES]
    rows = []
    for name, cells in TABLE.items():
        for place, (rate, (_, hours)) in enumerate(zip(RATES, cells, strict=True)):
            rows.append(exact(f"{name}, {rate:.0%}, hours", hours))
            rows.append(
                exact(f"{name}, {rate:.0%}, times the iterations", iterations(name, place) / useful)
            )
    for what, each in (("six stages", chances), ("the code's probability", CODE_PROBABILITY)):
        for place, (rate, chance) in enumerate(zip(RATES, each, strict=True)):
            for period in PERIODS:
                hours = replay_h(place, period, chance)
                rows.append(exact(f"replay every {period}, {rate:.0%}, {what}, hours", hours))
    for (_, hours), rate, chance in zip(TABLE["checkpointing"], RATES, chances, strict=True):
        period_that = explaining_period(useful, hours * 3600 / plain_s, chance)
        rows.append(exact(f"period that explains checkpointing, {rate:.0%}", period_that))
    rows += [
        exact("redundant forward passes, seconds", redundant_iteration_s(plain_s)),
        exact("redundancy in the table, seconds", TABLE["redundancy"][0][0]),
    ]
    rows += [
        exact(f"{name} is overtaken at, %", 100 * (at or 1.0)) for name, at in crossovers().items()
    ]
    progress(1.0)
    return Table(rows, f"{useful:.0f} iterations without failures, {STAGES} stages")
