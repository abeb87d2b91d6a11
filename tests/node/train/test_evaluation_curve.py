"""The curve of a run's evaluations: in order, bounded, and whole again after a restart."""

import msgspec
import pytest

from farflock.node.train.evaluation_curve import (
    CURVE,
    MAX_POINTS,
    EvaluatedPoint,
    EvaluationCurve,
    points_of,
)


def point(number):
    return EvaluatedPoint(number, 64 * number, 5.0 - 0.001 * number, 0.1)


def curve_of(numbers):
    curve = EvaluationCurve()
    for number in numbers:
        curve.add(point(number))
    return curve


def test_values_of_earlier_rounds_and_second_ones_are_left_out():
    assert [each.round for each in curve_of([0, 10, 10, 5, 20]).points] == [0, 10, 20]


def test_of_many_values_the_first_the_last_and_a_part_of_those_between_stay():
    rounds = [each.round for each in curve_of(range(5 * MAX_POINTS)).points]
    assert len(rounds) <= MAX_POINTS
    assert (rounds[0], rounds[-1]) == (0, 5 * MAX_POINTS - 1)
    assert rounds == sorted(rounds)


def test_after_a_restart_it_goes_on_from_its_checkpoint():
    meta = {CURVE: msgspec.json.decode(msgspec.json.encode(curve_of([0, 10, 20]).points))}
    curve = curve_of([20, 30])
    curve.resume(meta)
    assert curve.points == [point(number) for number in (0, 10, 20, 30)]


ONE = [1, 2, 1.0, 0.1]
STRANGE = ["none", [[1, 2, 3]], [[1, 2, "x", 0.1]], [[1, 2, -1.0, 0.1]], [ONE] * 9999]


@pytest.mark.parametrize("said", STRANGE, ids=range(len(STRANGE)))
def test_what_is_no_curve_counts_as_none(said):
    assert points_of({CURVE: said}) == []
    assert points_of({}) == []
