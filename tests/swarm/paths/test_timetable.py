"""Timetables: closed forms where they exist; and on any paths, no server works on two passes at a
time or holds too much."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.paths.skippipe import PathPlan, Stop, require_timetable
from farflock.swarm.paths.timetable import constant, timetable


def plan(*lanes):
    """A plan from paths of (stage, peer)."""
    return PathPlan(
        tuple(tuple(tuple(Stop(*stop) for stop in path) for path in lane) for lane in lanes), 1
    )


def even(peers, seconds):
    return {here: dict.fromkeys(peers, seconds) for here in peers}


LINE = [(0, "a"), (1, "b"), (2, "c")]
TIMES = {"a": 1.0, "b": 2.0, "c": 4.0}
HOPS = {"a": {"b": 0.5, "c": 5.0}, "b": {"a": 0.25, "c": 0.75}, "c": {"a": 3.0, "b": 0.125}}


def test_one_microbatch_takes_the_sum_of_its_work_and_its_hops():
    times = timetable(plan([LINE]), TIMES, 1, constant(HOPS))
    hops = (
        HOPS["a"]["b"]
        + HOPS["b"]["c"]
        + HOPS["c"]["a"]
        + HOPS["a"]["c"]
        + HOPS["c"]["b"]
        + HOPS["b"]["a"]
    )
    assert times.makespan_s == pytest.approx(2.5 * sum(TIMES.values()) + 0.25 * TIMES["a"] + hops)
    assert [work.peer for work in times.works] == ["a", "b", "c", "a", "c", "b", "a"]
    assert times.mean_s == times.makespan_s


def test_the_mean_is_that_of_all_microbatches():
    one = timetable(plan([LINE]), TIMES, 1, constant(HOPS)).makespan_s
    assert timetable(plan([LINE] * 4), TIMES, 1, constant(HOPS)).mean_s == pytest.approx(
        (1 + 2 + 3 + 4) / 4 * one
    )


def test_the_loss_is_where_the_head_is():
    times = timetable(plan([LINE]), TIMES, 1, constant(HOPS), head_is_first=False)
    hops = HOPS["a"]["b"] + HOPS["b"]["c"] + HOPS["c"]["b"] + HOPS["b"]["a"]
    assert times.makespan_s == pytest.approx(2.5 * sum(TIMES.values()) + 0.25 * TIMES["c"] + hops)


def test_a_path_of_one_stage_has_no_hops():
    assert timetable(plan([[(0, "a")]]), {"a": 2.0}, 1, constant({})).makespan_s == 2.75 * 2


def test_with_room_for_one_microbatches_go_one_after_the_other():
    one = timetable(plan([LINE]), TIMES, 1, constant(HOPS)).makespan_s
    assert timetable(plan([LINE] * 4), TIMES, 1, constant(HOPS)).makespan_s == pytest.approx(
        4 * one
    )
    assert timetable(plan([LINE] * 4), TIMES, 4, constant(HOPS)).makespan_s < 2.5 * one


def test_what_comes_back_goes_first():
    """Server a can choose between the third pass and the first loss once it has done the second
    forward pass."""
    send = constant({"a": {"b": 0.0}, "b": {"a": 0.0}})
    times = timetable(plan([[(0, "a"), (1, "b")]] * 3), {"a": 1.0, "b": 0.5}, 3, send)
    ours = [
        (work.microbatch[1], work.start_s, work.end_s) for work in times.works if work.peer == "a"
    ]
    assert ours[:4] == [(0, 0, 1), (1, 1, 2), (0, 2, 2.25), (2, 2.25, 3.25)]


def test_crossing_paths_that_hold_what_the_other_waits_for_never_end_and_that_is_said():
    peers = ["a", "b", "x", "y"]
    crossing = plan([[(0, "a"), (1, "x"), (2, "y")]], [[(0, "b"), (2, "y"), (1, "x")]])
    stuck = timetable(crossing, dict.fromkeys(peers, 1.0), 1, constant(even(peers, 0.1)))
    assert stuck.makespan_s == stuck.mean_s == math.inf
    assert not stuck.finished_s
    assert (
        timetable(crossing, dict.fromkeys(peers, 1.0), 2, constant(even(peers, 0.1))).makespan_s
        < 20
    )


@st.composite
def cases(draw):
    chance = random.Random(draw(st.integers(0, 2**32)))
    stages = [
        [f"s{stage}-{number}" for number in range(chance.randint(1, 3))] for stage in range(4)
    ]
    peers = [peer for each in stages for peer in each]
    lanes = []
    for origin in stages[0]:
        picked = [sorted(chance.sample((1, 2, 3), 2)) for _ in range(4)]
        lanes.append(
            [
                [(0, origin), *((stage, chance.choice(stages[stage])) for stage in order)]
                for order in picked
            ]
        )
    seconds = {peer: chance.choice((0.5, 1.0, 2.0)) for peer in peers}
    hops = {here: {there: chance.choice((0.0, 0.25, 3.0)) for there in peers} for here in peers}
    return plan(*lanes), seconds, draw(st.integers(1, 3)), hops


@given(cases())
@settings(max_examples=40, deadline=None)
def test_every_timetable_keeps_to_memory_and_finishes_and_has_no_collision(case):
    paths, seconds, memory, hops = case
    times = timetable(paths, seconds, memory, constant(hops))
    require_timetable(times.works, memory)
    assert times.finished_s.keys() == {
        (lane, turn) for lane in range(len(paths.lanes)) for turn in range(4)
    }
    assert len(times.works) == 7 * times.microbatches
    busy = {
        peer: sum(work.end_s - work.start_s for work in times.works if work.peer == peer)
        for peer in seconds
    }
    assert max(busy.values()) <= times.makespan_s + 1e-9


@given(cases(), st.sampled_from((0.5, 2.0, 4.0)))
@settings(max_examples=20, deadline=None)
def test_if_all_takes_longer_the_timetable_is_stretched(case, factor):
    paths, seconds, memory, hops = case
    slower = {peer: factor * value for peer, value in seconds.items()}
    slow_hops = {
        here: {there: factor * value for there, value in each.items()}
        for here, each in hops.items()
    }
    once, again = (
        timetable(paths, seconds, memory, constant(hops)),
        timetable(paths, slower, memory, constant(slow_hops)),
    )
    assert again.makespan_s == pytest.approx(factor * once.makespan_s)
    assert [work.microbatch for work in again.works] == [work.microbatch for work in once.works]


def test_messages_are_sent_in_the_order_of_time():
    sent = []

    def send(sender, receiver, now_s):
        sent.append(now_s)
        return now_s + HOPS[sender][receiver]

    timetable(plan([LINE] * 5), TIMES, 3, send)
    assert sent == sorted(sent)
    assert len(sent) == 5 * 6
