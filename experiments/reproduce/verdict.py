"""Verdicts from numbers over seeds.

A rule holds or fails only beyond its tolerance in standard errors; anything between cannot be told
at this scale. Differences are taken between runs of the same seed, which share data and initial
weights, so most noise cancels. A number without randomness is computed once and has no error.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from farflock.experiments.reproduce.claim import Rule

Word = Literal["reproduced", "not reproduced", "cannot tell at this scale"]
YES: Word = "reproduced"
NO: Word = "not reproduced"
UNKNOWN: Word = "cannot tell at this scale"
Values = Mapping[str, Sequence[float]]  # by arm; one per seed, in the same order


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its standard error: infinite for one seed, 0 for an exact number."""

    mean: float
    error: float

    @property
    def text(self) -> str:
        """The mean ± its standard error; the mean alone for an exact number."""
        if not self.error:
            return f"{self.mean:.4g}"
        return (
            f"{self.mean:.4g} ± {self.error:.2g}"
            if math.isfinite(self.error)
            else f"{self.mean:.4g} (one seed)"
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """The verdict on one rule, with our numbers and the reason."""

    word: Word
    ours: str
    reason: str


def estimate(values: Sequence[float], exact: bool = False) -> Estimate:
    """Return the mean and standard error over seeds; if `exact`, the only value, with error 0."""
    if exact:
        (value,) = values
        return Estimate(value, 0.0)
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Estimate(statistics.fmean(values), error)


def between(found: Estimate, low: float | None, high: float | None, tolerance: float) -> Word:
    """Judge whether the true value lies within `low` and `high`; None is no limit."""
    least = -math.inf if low is None else low
    most = math.inf if high is None else high
    if not math.isfinite(found.error):
        return UNKNOWN
    below, above = found.mean - tolerance * found.error, found.mean + tolerance * found.error
    if least <= below and above <= most:
        return YES
    return NO if above < least or below > most else UNKNOWN


def rises(found: Estimate, tolerance: float) -> Word:
    """Judge whether the true value is above 0; an exact 0 neither rises nor falls."""
    if not math.isfinite(found.error):
        return UNKNOWN
    margin = tolerance * found.error
    return YES if found.mean - margin > 0 else NO if found.mean + margin < 0 else UNKNOWN


def judge(
    rule: Rule, values: Values, sweeps: Mapping[str, Mapping[float, str]], exact: bool = False
) -> Finding:
    """Judge a rule by its metric's `values`; `sweeps` maps a swept arm's option values to arms."""
    if rule.kind == "optimum":
        return _optimum(rule, values, sweeps)
    lacking = [name for name in rule.arms if not values.get(name)]
    if lacking:
        return Finding(UNKNOWN, "-", f"{', '.join(lacking)} diverged or has no {rule.metric}")
    if rule.kind == "ordering":
        return _ordering(rule, values, exact)
    if rule.kind == "bound":
        return _limited(rule, estimate(values[rule.arms[0]], exact), rule.metric)
    first, second = (values[name] for name in rule.arms)
    if rule.kind == "within":
        differences = [one - other for one, other in zip(first, second, strict=True)]
        return _limited(rule, estimate(differences, exact), f"difference of {rule.metric}")
    if not all(second):
        return Finding(UNKNOWN, "-", f"{rule.arms[1]} has a {rule.metric} of 0")
    ratios = [one / other for one, other in zip(first, second, strict=True)]
    return _limited(rule, estimate(ratios, exact), f"ratio of {rule.metric}")


def together(findings: Sequence[Finding]) -> Word:
    """Return a recipe's verdict: one failed rule decides against it, and all rules must hold."""
    words = {finding.word for finding in findings}
    return NO if NO in words else UNKNOWN if UNKNOWN in words else YES


def _limited(rule: Rule, found: Estimate, what: str) -> Finding:
    word = between(found, rule.low, rule.high, rule.tolerance)
    return Finding(
        word, found.text, f"the {what} is {found.text}, wanted {_limits(rule)}{_by(rule, [found])}"
    )


def _by(rule: Rule, found: Sequence[Estimate]) -> str:
    return f" by {rule.tolerance:g} standard errors" if any(one.error for one in found) else ""


def _limits(rule: Rule) -> str:
    if rule.low is None:
        return f"at most {rule.high:g}"
    return f"at least {rule.low:g}" if rule.high is None else f"{rule.low:g} to {rule.high:g}"


def _ordering(rule: Rule, values: Values, exact: bool) -> Finding:
    """Judge whether the metric rises from each arm to the next."""
    steps, rose = [], []
    for before, after in zip(rule.arms, rule.arms[1:], strict=False):
        each = estimate(
            [late - early for early, late in zip(values[before], values[after], strict=True)], exact
        )
        steps.append(f"{before} to {after} {each.text}")
        rose.append(each)
    words = [rises(each, rule.tolerance) for each in rose]
    ours = ", ".join(f"{name} {estimate(values[name], exact).text}" for name in rule.arms)
    word = NO if NO in words else UNKNOWN if UNKNOWN in words else YES
    return Finding(
        word, ours, f"{rule.metric} rises from {'; '.join(steps)}; wanted above 0{_by(rule, rose)}"
    )


def _optimum(rule: Rule, values: Values, sweeps: Mapping[str, Mapping[float, str]]) -> Finding:
    """Judge whether the option value with the lowest metric rises from arm to arm.

    The rise is that from the first arm to the last, seed by seed; the means of the arms between
    must be in order too.
    """
    best: dict[str, list[float]] = {}
    for name in rule.arms:
        grid = {value: values[arm] for value, arm in sweeps[name].items() if values.get(arm)}
        if len(grid) < 2:
            return Finding(
                UNKNOWN, "-", f"{name} diverged at all or all but one of the values of its grid"
            )
        seeds = range(len(next(iter(grid.values()))))
        best[name] = [min(grid, key=lambda value: grid[value][seed]) for seed in seeds]
    ours = ", ".join(f"{name} {estimate(chosen).text}" for name, chosen in best.items())
    whole = estimate(
        [last - first for first, last in zip(best[rule.arms[0]], best[rule.arms[-1]], strict=True)]
    )
    word = rises(whole, rule.tolerance)
    means = [estimate(best[name]).mean for name in rule.arms]
    if word == YES and means != sorted(means):
        word = UNKNOWN
    edges = [name for name in rule.arms if {min(sweeps[name]), max(sweeps[name])} & set(best[name])]
    edge = f"; the best of {', '.join(edges)} lies at the edge of its grid" if edges else ""
    return Finding(
        word,
        ours,
        f"the best value rises by {whole.text} from {rule.arms[0]} to {rule.arms[-1]}{edge}",
    )
