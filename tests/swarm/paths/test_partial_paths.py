"""Partial paths: as many stages as asked for, always with both ends, and the others equally often
over any stretch."""

import itertools
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.paths.checkfree import SwappedPaths
from farflock.swarm.paths.partial_paths import BadSkip, PartialPaths
from farflock.swarm.paths.policy import Microbatch, SwarmPaths, fixed


def partial(stages, visited, seed="s"):
    return PartialPaths(SwarmPaths(stages, random.Random(1)), stages, visited, seed)


@st.composite
def shapes(draw):
    stages = draw(st.integers(1, 12))
    return stages, draw(st.integers(min(stages, 3), stages))


@given(shape=shapes(), start=st.integers(0, 2**40), lane=st.integers(0, 3))
def test_paths_have_their_length_and_their_ends_and_leave_each_other_stage_out_equally_often(
    shape, start, lane
):
    stages, visited = shape
    policy = partial(stages, visited)
    cycle = max(stages - 2, 1)
    first = start // cycle * cycle
    orders = [policy.stage_order(Microbatch(first + turn, 0, lane)) for turn in range(3 * cycle)]
    for order in orders:
        assert len(order) == visited
        assert list(order) == sorted(order)
        assert (order[0], order[-1]) == (0, stages - 1)
    for stage in range(stages):
        visits = [stage in order for order in orders]
        assert sum(visits) == policy.share(stage) * len(orders)
        for upto in range(len(orders)):
            assert abs(sum(visits[:upto]) - policy.share(stage) * upto) < 2


def test_the_stages_left_out_together_vary_and_depend_on_the_trainer():
    orders = [
        [partial(8, 5, seed).stage_order(Microbatch(step, 0, 0)) for step in range(60)]
        for seed in "ab"
    ]
    assert len(set(orders[0])) >= 10
    assert orders[0] != orders[1]
    assert orders[0] == [
        partial(8, 5, "a").stage_order(Microbatch(step, 0, 0)) for step in range(60)
    ]


def test_all_stages_may_be_visited():
    assert {partial(5, 5).stage_order(Microbatch(step, 0, 0)) for step in range(9)} == {
        (0, 1, 2, 3, 4)
    }
    assert [partial(5, 5).share(stage) for stage in range(5)] == [1] * 5
    assert [partial(5, 4).share(stage) for stage in range(5)] == [1, *[Fraction(2, 3)] * 3, 1]


@pytest.mark.parametrize(("stages", "visited"), [(5, 2), (5, 6), (3, 2), (2, 1), (1, 0), (4, -1)])
def test_what_would_leave_out_an_end_or_train_no_stage_between_is_refused(stages, visited):
    with pytest.raises(
        BadSkip,
        match=f"visit {visited} of {stages} stages; choose {min(3, stages)} to {stages}",
    ):
        partial(stages, visited)


def test_no_lane_keeps_its_edges():
    assert not PartialPaths(fixed(4), 4, 3, "s").pinned
    policy = PartialPaths(fixed(5), 5, 4, "s")
    edges = {
        edge
        for step in range(9)
        for edge in itertools.pairwise(policy.stage_order(Microbatch(step, 0, 0)))
    }
    assert len(edges) > 4


def test_swapped_stages_change_places_where_both_are_visited_and_stand_in_where_one_is():
    policy = SwappedPaths(PartialPaths(fixed(4), 4, 3, "s"), [1, 2, 2, 1])
    orders = {policy.stage_order(Microbatch(step, 0, 0)) for step in range(16)}
    assert orders == {(0, 1, 3), (0, 2, 3)}
    assert [policy.share(stage) for stage in range(4)] == [1, Fraction(1, 2), Fraction(1, 2), 1]
