"""How many hours until a loss is reached when stages fail: the arithmetic behind Table 2 of CheckFree (arXiv:2506.15461, 500M
parameters to a validation loss of 2.85), with what is the paper's kept apart from what follows.

Taken from the paper: each strategy's seconds an iteration and hours (`TABLE`), the failure rates, and the released code's
probabilities. All of the table's hours are a multiple of 500 iterations times seconds an iteration, and redundant
computation, which loses nothing, needs 10,000: so the table's iterations, and CheckFree's penalty by rate, can be read off it.
Predicted here without the table's hours: what checkpoints every k iterations cost by replay alone, and what redundant forward
passes cost in computation alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from farflock.experiments.pipelines.table import Parameters, Progress, Table, exact

RATES = (0.05, 0.10, 0.16)  # failures of a stage an hour
STAGES = 6
CODE_PROBABILITY = (0.0009, 0.002, 0.004)  # an iteration, in the released code, by rate
BACKWARD = 2.5  # times a forward pass, in the released time model
PERIODS = (10, 40, 50, 100)  # iterations between checkpoints; 40, 50 and 100 are the paper's
GRANULE = 500  # iterations between the paper's evaluations, as its hours betray

# strategy -> by rate: (seconds an iteration, hours)
TABLE: dict[str, tuple[tuple[float, float], ...]] = {
    "checkpointing": ((91.35, 558.23), (91.35, 621.67), (92.14, 634.35)),
    "redundancy": ((151.04, 419.56), (151.04, 419.56), (151.04, 419.56)),
    "checkfree": ((91.32, 367.81), (91.32, 405.87), (92.12, 562.96)),
    "checkfree+": ((91.32, 355.13), (91.32, 367.81), (92.12, 460.60)),
}


@dataclass(frozen=True, slots=True)
class Read:
    """What one cell of the table says: iterations, their ratio to those of a strategy that loses nothing, and, if each failure
    cost equally much, how many iterations one cost."""

    strategy: str
    rate: float
    published_h: float
    iterations: float
    penalty: float
    iterations_a_failure: float


@dataclass(frozen=True, slots=True)
class Replay:
    """What checkpoints every `period` iterations must cost by replay alone: hours, beside the table's."""

    rate: float
    probability: float
    period: int
    iterations: float
    hours: float
    published_h: float


@dataclass(frozen=True, slots=True)
class Hours:
    """The whole: the table as read; the replay as predicted with the rate of six stages, and with the code's probability; the
    period that replay alone would need to explain the table's checkpointing; redundancy's predicted and published time for an
    iteration; the cheapest strategy by rate; and where redundancy overtakes each CheckFree."""

    read: tuple[Read, ...]
    replays: tuple[Replay, ...]
    code_replays: tuple[Replay, ...]
    explaining_periods: tuple[float, ...]
    redundant_iteration_s: tuple[float, float]
    cheapest: tuple[str, ...]
    crossovers: dict[str, float | None]


def probability(rate_per_h: float, iteration_s: float, stages: int = STAGES) -> float:
    """That at least one of `stages` stages, each of which fails with `rate_per_h` in an hour, fails in an iteration."""
    return -math.expm1(stages * iteration_s / 3600 * math.log1p(-rate_per_h))


def replayed(useful: float, period: float, chance: float) -> float:
    """Expected iterations until `useful` are done if each fails with `chance` and sends everybody back to the last multiple of
    `period`: `period` successes in a row take (1 - qᵏ) / (p qᵏ) trials on average."""
    if chance == 0:
        return useful
    trials = math.expm1(-period * math.log1p(-chance)) / chance
    return useful / period * trials


def explaining_period(useful: float, iterations: float, chance: float) -> float:
    """The period whose replay makes `iterations` of `useful` ones (bisection: replay grows with the period)."""
    low, high = 1.0, 100 / chance
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if replayed(useful, middle, chance) < iterations else (low, middle)
    return low


def redundant_iteration_s(plain_s: float, backward: float = BACKWARD) -> float:
    """An iteration in which each stage does its successor's forward passes too (as Bamboo), all time being computation."""
    return plain_s * (2 + backward) / (1 + backward)


def crossover(rates: Sequence[float], rising: Sequence[float], level: Sequence[float]) -> float | None:
    """The rate at which `rising` overtakes `level`, both straight between the given rates; None if it never does."""
    gaps = [one - other for one, other in zip(rising, level, strict=True)]
    for (here, gap), (there, next_gap) in pairwise(zip(rates, gaps, strict=True)):
        if gap < 0 <= next_gap:
            return here + (there - here) * gap / (gap - next_gap)
    return None


def useful_iterations() -> float:
    """Those of a strategy that loses nothing: redundant computation's, by the table's hours, to the paper's granule."""
    iteration_s, hours = TABLE["redundancy"][0]
    return GRANULE * round(hours * 3600 / iteration_s / GRANULE)


def model() -> Hours:
    """Everything; no randomness."""
    useful = useful_iterations()
    plain_s = TABLE["checkpointing"][0][0]
    hours = {name: [h for _, h in cells] for name, cells in TABLE.items()}
    chances = [probability(rate, plain_s) for rate in RATES]
    return Hours(
        read=tuple(_read(name, place, useful, chances[place]) for name in TABLE for place in range(len(RATES))),
        replays=_replays(useful, chances),
        code_replays=_replays(useful, CODE_PROBABILITY),
        explaining_periods=tuple(
            explaining_period(useful, hours["checkpointing"][place] * 3600 / plain_s, chance)
            for place, chance in enumerate(chances)
        ),
        redundant_iteration_s=(redundant_iteration_s(plain_s), TABLE["redundancy"][0][0]),
        cheapest=tuple(min(zip(column, TABLE, strict=True))[1] for column in zip(*hours.values(), strict=True)),
        crossovers={name: crossover(RATES, hours[name], hours["redundancy"]) for name in ("checkfree", "checkfree+")},
    )


def _read(strategy: str, place: int, useful: float, chance: float) -> Read:
    iteration_s, hours = TABLE[strategy][place]
    iterations = hours * 3600 / iteration_s
    return Read(
        strategy=strategy,
        rate=RATES[place],
        published_h=hours,
        iterations=iterations,
        penalty=iterations / useful,
        iterations_a_failure=(1 - useful / iterations) / chance,
    )


def _replays(useful: float, chances: Sequence[float]) -> tuple[Replay, ...]:
    made = []
    for rate, chance, (iteration_s, published) in zip(RATES, chances, TABLE["checkpointing"], strict=True):
        for period in PERIODS:
            iterations = replayed(useful, period, chance)
            made.append(Replay(rate, chance, period, iterations, iterations * iteration_s / 3600, published))
    return tuple(made)


class Size(Parameters, frozen=True, kw_only=True):
    """Nothing: the table is the input."""


def compute(size: Size, progress: Progress) -> Table:
    """`model` as rows: what the table's cells say, what is predicted, and where the lines cross (100 % if they do not)."""
    found = model()
    rows = [
        row
        for one in found.read
        for row in (
            exact(f"{one.strategy}, {one.rate:.0%}, hours", one.published_h),
            exact(f"{one.strategy}, {one.rate:.0%}, times the iterations", one.penalty),
        )
    ]
    for what, replays in (("six stages", found.replays), ("the code's probability", found.code_replays)):
        rows += [exact(f"replay every {one.period}, {one.rate:.0%}, {what}, hours", one.hours) for one in replays]
    rows += [
        exact(f"period that explains checkpointing, {rate:.0%}", period)
        for rate, period in zip(RATES, found.explaining_periods, strict=True)
    ]
    rows += [
        exact("redundant forward passes, seconds", found.redundant_iteration_s[0]),
        exact("redundancy in the table, seconds", found.redundant_iteration_s[1]),
    ]
    rows += [exact(f"{name} is overtaken at, %", 100 * (at or 1.0)) for name, at in found.crossovers.items()]
    progress(1.0)
    return Table(rows, f"{useful_iterations():.0f} iterations without failures, {STAGES} stages")
