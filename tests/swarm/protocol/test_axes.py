"""Rounds by axis: a floor is as long as it has to be, and the axes that it omits are 0."""

from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.protocol.axes import (
    NO_FLOOR,
    at,
    axis,
    highest,
    lowest,
    raised,
    reaches,
    stage_on,
)

FLOORS = st.lists(st.integers(0, 9), max_size=5).map(tuple)
STAGES = st.none() | st.integers(0, 6)


def test_whole_models_have_the_first_place_and_stages_the_next_ones():
    assert [axis(stage) for stage in (None, 0, 1, 7)] == [0, 1, 2, 8]
    assert [at((5, 6, 7), stage) for stage in (None, 0, 1, 2)] == [5, 6, 7, 0]
    assert at(NO_FLOOR, None) == at(NO_FLOOR, 3) == 0
    assert [stage_on(place) for place in (0, 1, 2, 8)] == [None, 0, 1, 7]


@given(FLOORS, FLOORS)
def test_the_highest_of_two_floors_is_the_least_that_reaches_both(one, other):
    top = highest(one, other)
    assert top == highest(other, one)
    assert reaches(top, one)
    assert reaches(top, other)
    assert all(
        at(top, stage) == max(at(one, stage), at(other, stage)) for stage in (None, *range(6))
    )


@given(FLOORS, FLOORS)
def test_both_of_two_floors_reach_the_lowest_of_them(one, other):
    bottom = lowest(one, other)
    assert bottom == lowest(other, one)
    assert all(
        at(bottom, stage) == min(at(one, stage), at(other, stage)) for stage in (None, *range(6))
    )


@given(FLOORS, FLOORS)
def test_a_floor_reaches_another_if_it_is_below_it_on_no_axis(one, other):
    assert reaches(one, other) == all(
        at(one, stage) >= at(other, stage) for stage in (None, *range(6))
    )


@given(FLOORS, STAGES, st.integers(0, 12))
def test_raising_one_axis_leaves_the_others_alone(floor, stage, number):
    after = raised(floor, stage, number)
    assert at(after, stage) == max(at(floor, stage), number)
    for other in {None, *range(8)} - {stage}:
        assert at(after, other) == at(floor, other)
