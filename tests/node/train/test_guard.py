"""The guard's verdicts, a pure function of the evaluations."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.train.guard import (
    MIN_NORMS,
    NORM_FACTOR,
    RISE_ERRORS,
    alarm_at,
    first_alarm,
)
from farflock.swarm.peer.evaluations import Evaluation, Outcome

ERROR = 0.1
STEP = RISE_ERRORS * ERROR


def made(*losses, norms=(), outcomes=None):
    """Evaluations of rounds 0, 10, 20, ... with these losses; None stands for one that was missed,
    and infinity for one that is not finite."""
    found = []
    for index, loss in enumerate(losses):
        outcome: Outcome = "missed" if loss is None else "ok" if loss < 1e9 else "not finite"
        norm = norms[index] if index < len(norms) else None
        value = loss if outcome == "ok" else 0.0
        found.append(Evaluation("s", 10 * index, bytes(32), 0, outcome, value, ERROR, 16, 0, norm))
    return found


def test_a_falling_loss_raises_no_alarm():
    assert first_alarm(made(5.0, 4.0, 3.5, 3.4, 3.41, 3.39), 3) is None
    assert first_alarm([], 3) is None


def test_a_loss_that_is_not_finite_raises_an_alarm_and_the_last_finite_round_was_good():
    alarm = alarm_at(made(5.0, 4.0, None, float("inf")), 3)
    assert (alarm.kind, alarm.round, alarm.good) == ("not finite", 30, 10)
    assert alarm_at(made(float("inf")), 3).good is None


@pytest.mark.parametrize("rising", [2, 3, 5])
def test_a_loss_that_rises_often_enough_raises_an_alarm(rising):
    losses = [5.0, 4.0, *(4.0 + STEP * (1.01 + index) for index in range(rising))]
    assert first_alarm(made(*losses[:-1]), rising) is None
    alarm = alarm_at(made(*losses), rising)
    assert (alarm.kind, alarm.good) == ("rising", 10)
    assert alarm.round == 10 * (len(losses) - 1)
    assert "4.000 at round 10" in alarm.reason


def test_a_loss_has_to_be_well_above_the_best():
    assert first_alarm(made(4.0, 4.0 + 0.99 * STEP, 4.0 + 2 * STEP, 4.0 + 3 * STEP), 3) is None


def test_one_better_loss_between_ends_the_rise():
    losses = (4.0, 4.0 + 2 * STEP, 4.0 + 3 * STEP, 4.0 + 2.5 * STEP, 4.0 + 4 * STEP)
    assert first_alarm(made(*losses), 3) is None


def test_a_missed_evaluation_does_not_end_the_rise():
    losses = (4.0, 4.0 + 2 * STEP, None, 4.0 + 3 * STEP, 4.0 + 4 * STEP)
    assert first_alarm(made(*losses), 3).round == 40


def test_an_unknown_standard_error_never_makes_a_rise():
    import msgspec

    evaluations = [
        msgspec.structs.replace(each, standard_error=0.0) for each in made(1.0, 2.0, 3.0, 4.0, 5.0)
    ]
    assert first_alarm(evaluations, 3) is None


def test_a_gradient_norm_far_above_the_median_raises_an_alarm():
    norms = (1.0, 2.0, 3.0, 2 * NORM_FACTOR)
    losses = (5.0, 4.0, 3.9, 3.8)
    assert first_alarm(made(*losses, norms=norms), 3) is None
    alarm = first_alarm(made(*losses, norms=(*norms[:3], 2.1 * NORM_FACTOR)), 3)
    assert (alarm.kind, alarm.round, alarm.good) == ("gradient norm", 30, 20)


def test_few_norms_say_nothing():
    norms = (*[1.0] * (MIN_NORMS - 1), 1e9)
    assert first_alarm(made(*[4.0] * MIN_NORMS, norms=norms), 3) is None


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 10), st.just(float("inf"))), max_size=12),
    st.integers(2, 4),
)
def test_the_first_alarm_is_that_of_the_shortest_beginning_with_one(losses, rising):
    evaluations = made(*losses)
    alarms = [alarm_at(evaluations[:count], rising) for count in range(len(losses) + 1)]
    assert first_alarm(evaluations, rising) == next(filter(None, alarms), None)
