"""Evaluations that are under way: they keep others from beginning while they make progress."""

from farflock.swarm.messages import Measuring
from farflock.swarm.protocol.evaluation_progress import (
    ENDED,
    STALLED_S,
    WORD_EVERY_S,
    EvaluationProgress,
)


def test_an_evaluation_of_an_earlier_round_is_waited_for_until_its_end():
    known = EvaluationProgress()
    assert not known.is_before(10, 0.0)
    known.hear("a", Measuring(0, 0), 0.0)
    assert known.is_before(10, 1.0)
    assert known.is_before(1000, 1.0), "however many rounds have passed"
    assert not known.is_before(0, 1.0), "of the same round, nobody waits for another"
    known.hear("a", Measuring(0, ENDED), 1.0)
    assert not known.is_before(10, 1.0)


def test_it_is_waited_for_as_long_as_each_hundredth_comes_in_time():
    known, step_s = EvaluationProgress(), 0.99 * STALLED_S
    for percent in range(100):
        known.hear("a", Measuring(0, percent), percent * step_s)
        assert known.is_before(10, percent * step_s)
    assert known.is_before(10, 100 * step_s)
    assert not known.is_before(10, 99 * step_s + STALLED_S)


def test_a_member_that_says_the_same_or_less_again_makes_no_progress():
    known = EvaluationProgress()
    known.hear("a", Measuring(2, 50), 0.0)
    for number, percent in ((2, 50), (2, 49), (0, 99)):
        known.hear("a", Measuring(number, percent), 0.9 * STALLED_S)
    assert not known.is_before(10, STALLED_S)


def test_members_that_do_not_stay_are_not_waited_for():
    known = EvaluationProgress()
    known.hear("a", Measuring(0, 0), 0.0)
    known.hear("b", Measuring(0, 0), 0.0)
    known.forget(lambda peer: peer == "b")
    assert known.is_before(10, 1.0)
    known.forget(lambda peer: False)
    assert not known.is_before(10, 1.0)


def test_the_begin_and_the_end_are_said_and_now_and_then_what_is_between():
    known = EvaluationProgress()
    said = [percent for percent in range(ENDED + 1) if known.is_said(percent, percent / 2)]
    assert WORD_EVERY_S == 5.0
    assert said == list(range(0, ENDED + 1, 10))
