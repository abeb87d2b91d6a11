"""Traces of joins and departures, queues of a closed network, and what the product's rule makes of
both."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.experiments.pipelines.rebalancing import (
    HOUR_S,
    Size,
    Speed,
    played,
    queues,
    share,
    trace,
)
from farflock.swarm.protocol.rebalance import RebalanceRule

SMALL = {
    "stages": 4,
    "servers": 40,
    "lifetime_h": 4.0,
    "hours": 6.0,
    "periods_s": [300.0, 60.0],
    "in_flight": 32,
}


def size(**changes):
    return Size(**{**SMALL, "seeds": [1], **changes})


def test_a_trace_is_in_order_begins_evenly_and_only_present_peers_leave():
    events = list(trace(size(), random.Random(1)))
    assert [when_s for when_s, *_ in events] == sorted(when_s for when_s, *_ in events)
    assert events[-1][0] < 6 * HOUR_S
    first = [stage for when_s, _, _, stage in events if when_s == 0]
    assert [first.count(stage) for stage in range(4)] == [10] * 4
    there = set()
    for _, what, peer, _ in events:
        assert (peer in there) == (what == "leave")
        there ^= {peer}


def test_as_many_join_as_leave_and_each_lives_as_long_as_told():
    events = list(trace(size(hours=400.0), random.Random(2)))
    joins, leaves = (
        sum(what == one for when_s, what, *_ in events if when_s) for one in ("join", "leave")
    )
    assert joins == pytest.approx(400 * 40 / 4, rel=0.1)
    assert leaves == pytest.approx(joins, rel=0.1)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 50))
def test_queues_hold_all_microbatches_and_the_smallest_stage_the_most(servers, in_flight):
    waiting = queues(servers, in_flight)
    assert sum(waiting) == pytest.approx(in_flight)
    assert waiting[servers.index(min(servers))] == pytest.approx(max(waiting))


def test_two_equal_queues_share_what_goes_round():
    assert queues([3, 3], 10) == pytest.approx([5, 5])
    assert queues([1, 100], 10)[0] > 9.8


def test_the_share_is_work_over_what_an_even_spread_does():
    speeds = [Speed(0.0, 2, 4), Speed(10.0, 4, 4), Speed(20.0, 1, 4)]
    assert share(speeds, 0.0, 20.0) == pytest.approx(0.75)
    assert share(speeds, 15.0, 40.0) == pytest.approx((5 * 4 + 20 * 1) / (25 * 4))


def test_no_policy_changes_which_peers_are_there():
    """The best that is possible is the same for all: moves only move."""
    events = list(trace(size(), random.Random(3)))
    still, moved = (
        {speed.since_s: speed for speed in played(size(), events, policy)}
        for policy in (None, (60.0, RebalanceRule()))
    )
    assert all(moved[when_s].best == speed.best for when_s, speed in still.items())
    assert all(speed.least <= speed.best for speed in moved.values())
    assert any(moved[when_s].least > speed.least for when_s, speed in still.items())


def test_without_churn_nothing_moves_and_nothing_is_lost(table):
    found = table(
        "swarm-rebalancing",
        **{**SMALL, "lifetime_h": 1000.0, "servers": 8, "hours": 2.0},
        seeds=[5],
    )
    quiet = [value for name, values in found.items() if "overall" in name for value in values]
    assert min(quiet) > 40
    everybody = [(0.0, "join", f"{number}", number % 4) for number in range(8)]
    speeds = played(size(), everybody, (60.0, RebalanceRule()))
    assert share(speeds, 60.0, 6 * HOUR_S) == 1


def test_a_move_each_period_beats_none_and_more_often_is_better(table):
    found = table("swarm-rebalancing", **SMALL, seeds=[1, 2, 3])
    for none, slow, fast in zip(
        *(found[f"{name}, overall"] for name in ("none", "300 s", "60 s")), strict=True
    ):
        assert none < slow < fast <= 100
