"""The guard: whether the evaluations so far say that the training has gone wrong.

It is a pure function of the accepted evaluations, so all members that have the same ones come to
the same verdict, whenever they look.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from farflock.swarm.peer.evaluations import Evaluation

RISE_ERRORS = 3.0  # standard errors by which a loss has to be above the best
NORM_FACTOR = 10.0  # times the median of the gradient norms before
MIN_NORMS = 3  # known before, so that their median says something

AlarmKind = Literal["not finite", "rising", "gradient norm"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """A sign of trouble in the evaluation of a round. `good` is the last evaluated round from
    before it went wrong; None if there is none."""

    kind: AlarmKind
    round: int
    good: int | None
    reason: str


def alarm_at(evaluations: Sequence[Evaluation], rising: int) -> Alarm | None:
    """Return what the newest of these evaluations shows, if it is bad: they are in the order of
    their rounds. A loss rises if it was higher than the one before `rising` times in a row, and
    each time well above the best one."""
    measured = [each for each in evaluations if each.outcome != "missed"]
    if not measured:
        return None
    *before, newest = measured
    finite = [each for each in before if each.outcome == "ok"]
    if newest.outcome == "not finite":
        good = finite[-1].round if finite else None
        return Alarm("not finite", newest.round, good, "the held-out loss is not finite")
    return _risen(finite, newest, rising) or _norm_off(finite, newest)


def first_alarm(evaluations: Sequence[Evaluation], rising: int) -> Alarm | None:
    """Return the earliest alarm of these evaluations."""
    for count in range(1, len(evaluations) + 1):
        if (alarm := alarm_at(evaluations[:count], rising)) is not None:
            return alarm
    return None


def _risen(before: Sequence[Evaluation], newest: Evaluation, rising: int) -> Alarm | None:
    if len(before) < rising:
        return None
    row = [*before[-rising:], newest]
    best = min(before, key=lambda each: each.loss)
    grows = all(later.loss > earlier.loss for earlier, later in itertools.pairwise(row))
    if not grows or not all(_is_above(each, best) for each in row[1:]):
        return None
    reason = (
        f"the held-out loss rose {rising} times in a row, from {best.loss:.3f} at round"
        f" {best.round} to {newest.loss:.3f}"
    )
    return Alarm("rising", newest.round, best.round, reason)


def _is_above(one: Evaluation, best: Evaluation) -> bool:
    margin = RISE_ERRORS * one.standard_error
    return one.round > best.round and one.standard_error > 0 and one.loss - best.loss > margin


def _norm_off(before: Sequence[Evaluation], newest: Evaluation) -> Alarm | None:
    norms = [each.gradient_norm for each in before if each.gradient_norm is not None]
    if newest.gradient_norm is None or len(norms) < MIN_NORMS:
        return None
    usual = statistics.median(norms)
    if newest.gradient_norm <= NORM_FACTOR * usual:
        return None
    reason = f"a gradient's norm is {newest.gradient_norm:.3g}, and {usual:.3g} is usual"
    return Alarm("gradient norm", newest.round, before[-1].round, reason)
