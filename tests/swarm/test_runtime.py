"""Run time: each peer's estimate of the founder's clock, which no single partner can move far."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.runtime import KEPT_SAMPLES, MAX_PARTNERS, RunClock


def answered(clock, partner, offset_s, rtt_s=0.1, there=0.5, at_s=100.0):
    """Note a ping at `at_s` to a partner whose run time is the local one plus `offset_s`; `there`
    is the outward leg's share of the round trip."""
    clock.answered(partner, at_s, at_s + rtt_s, at_s + rtt_s * there + offset_s)


def test_before_the_first_answer_run_time_is_local_time():
    assert RunClock().run_s(12.5) == 12.5


def test_the_founders_clock_is_the_origin_whatever_others_say():
    clock = RunClock(is_origin=True)
    answered(clock, "a", 1000.0)
    assert clock.run_s(12.5) == 12.5


def test_an_answer_half_way_gives_the_offset_exactly():
    clock = RunClock()
    answered(clock, "a", 1000.0)
    assert clock.offset_s == pytest.approx(1000.0)
    assert clock.run_s(5.0) == pytest.approx(1005.0)


@given(st.floats(-1e6, 1e6), st.floats(0, 10), st.floats(0, 1))
def test_an_uneven_way_costs_at_most_half_of_the_round_trip(offset_s, rtt_s, there):
    clock = RunClock()
    answered(clock, "a", offset_s, rtt_s, there)
    assert abs(clock.offset_s - offset_s) <= rtt_s / 2 + 1e-6


def test_of_a_partners_answers_the_one_with_the_shortest_round_trip_counts():
    clock = RunClock()
    answered(clock, "a", 10.0, rtt_s=2.0, there=1.0)
    answered(clock, "a", 10.0, rtt_s=0.01)
    answered(clock, "a", 10.0, rtt_s=3.0, there=0.0)
    assert clock.offset_s == pytest.approx(10.0)


def test_old_answers_are_forgotten_so_that_drift_is_followed():
    clock = RunClock()
    answered(clock, "a", 10.0, rtt_s=0.001)
    for _ in range(KEPT_SAMPLES - 1):
        answered(clock, "a", 11.0)
    assert clock.offset_s == pytest.approx(10.0)
    answered(clock, "a", 11.0)
    assert clock.offset_s == pytest.approx(11.0)


def test_the_median_over_partners_is_moved_by_no_minority():
    clock = RunClock()
    for partner, offset_s in (("a", 10.0), ("b", 10.2), ("c", 10.4), ("liar", -1e9), ("fool", 1e9)):
        answered(clock, partner, offset_s)
    assert clock.offset_s == pytest.approx(10.2)


def test_one_partner_counts_once_however_often_it_answers():
    clock = RunClock()
    for partner in "abc":
        answered(clock, partner, 10.0)
    for _ in range(100):
        answered(clock, "liar", 1e6, rtt_s=0.0)
    assert clock.offset_s == pytest.approx(10.0)


def test_an_answer_from_before_its_question_is_ignored():
    clock = RunClock()
    clock.answered("a", sent_s=100.0, received_s=99.9, their_run_s=500.0)
    clock.answered("a", sent_s=float("nan"), received_s=99.9, their_run_s=500.0)
    assert clock.offset_s == 0.0


def test_the_number_of_partners_is_bounded_and_the_oldest_goes_first():
    clock = RunClock()
    answered(clock, "first", 1e6)
    for number in range(MAX_PARTNERS):
        answered(clock, f"peer {number}", 10.0)
    assert len(clock.partners) == MAX_PARTNERS
    assert "first" not in clock.partners
    answered(clock, "peer 0", 10.0)
    assert len(clock.partners) == MAX_PARTNERS


def test_on_a_lossy_uneven_network_the_estimate_is_within_a_few_milliseconds():
    clock, chance = RunClock(), random.Random(3)
    for number in range(200):
        answered(
            clock,
            f"peer {number % 7}",
            50.0,
            chance.uniform(0.02, 0.2),
            chance.uniform(0.3, 0.7),
            5.0 * number,
        )
    assert abs(clock.offset_s - 50.0) < 0.01
