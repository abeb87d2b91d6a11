"""Rounds by axis: a floor is as long as it has to be, and the axes that it omits are 0."""

from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.protocol.agreement.axes import (
    NO_FLOOR,
    Touched,
    at,
    axis,
    highest,
    raised,
    reaches,
)

FLOORS = st.lists(st.integers(0, 9), max_size=5).map(tuple)
STAGES = st.none() | st.integers(0, 6)


def test_whole_models_have_the_first_place_and_stages_the_next_ones():
    assert [axis(stage) for stage in (None, 0, 1, 7)] == [0, 1, 2, 8]
    assert [at((5, 6, 7), stage) for stage in (None, 0, 1, 2)] == [5, 6, 7, 0]
    assert at(NO_FLOOR, None) == at(NO_FLOOR, 3) == 0


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


def test_a_round_binds_by_a_vote_and_not_by_taking_part():
    touched = Touched()
    assert touched.newest == -1
    touched.begin(None, 7)
    assert (touched.floor, touched.bound, touched.newest) == ((8,), (), 7)
    touched.bind(None, 5)
    touched.bind(1, 9)
    assert (touched.floor, touched.bound, touched.newest) == ((8, 0, 10), (6, 0, 10), 9)
