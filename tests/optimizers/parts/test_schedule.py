"""The learning rate over the run's tokens."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.parts.schedule import Schedule

PLAIN = Schedule(peak=0.01, total_tokens=1000, warmup_tokens=100, floor=0.1)


def test_it_rises_to_the_peak_over_the_warm_up():
    assert PLAIN.rate(0, 0) == pytest.approx(0.01 / 100)
    assert PLAIN.rate(49, 0) == pytest.approx(0.005)
    assert PLAIN.rate(99, 0) == PLAIN.rate(100, 0) == pytest.approx(0.01)


def test_halfway_through_the_cosine_it_is_halfway_to_the_floor():
    assert PLAIN.rate(550, 0) == pytest.approx((0.01 + 0.001) / 2)


def test_it_ends_at_the_floor_and_stays_there():
    assert PLAIN.rate(1000, 0) == PLAIN.rate(10**9, 0) == pytest.approx(0.001)


def test_a_floor_of_one_makes_it_constant():
    constant = Schedule(peak=0.01, total_tokens=1000, floor=1.0)
    assert {constant.rate(tokens, 5) for tokens in range(0, 1500, 7)} == {0.01}


def test_a_joiner_rises_over_its_own_first_steps_wherever_the_run_is():
    joiner = Schedule(peak=0.01, total_tokens=1000, floor=1.0, joiner_steps=4)
    assert [joiner.rate(600, step) for step in range(6)] == pytest.approx(
        [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
    )


def test_two_peers_at_the_same_progress_have_the_same_rate_however_many_steps_they_made():
    assert PLAIN.rate(700, 3) == PLAIN.rate(700, 12345)


@given(st.integers(1, 10**12), st.floats(0, 1), st.floats(0, 1), st.integers(0, 2 * 10**12))
def test_after_the_warm_up_it_never_rises_and_never_leaves_peak_and_floor(
    total, share, floor, tokens
):
    schedule = Schedule(0.5, total, int(total * share), floor)
    tokens = max(tokens, schedule.warmup_tokens)
    assert 0.5 * floor - 1e-12 <= schedule.rate(tokens, 0) <= 0.5 + 1e-12
    assert schedule.rate(tokens + 1, 0) <= schedule.rate(tokens, 0) + 1e-12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peak": 0}, "rate of 0"),
        ({"peak": math.inf}, "rate of inf"),
        ({"total_tokens": 0}, "run of 0"),
        ({"warmup_tokens": 1001}, "1001 tokens does not fit a run of 1000"),
        ({"warmup_tokens": -1}, "-1 tokens"),
        ({"floor": 1.5}, "floor of 1.5"),
        ({"floor": math.nan}, "floor of nan"),
        ({"joiner_steps": -2}, "-2 warm-up steps"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**({"peak": 0.01, "total_tokens": 1000} | options))
