"""Joins over slow lines are compared with what the line, the state and the rounds allow."""

import dataclasses

import pytest

from farflock.experiments.bench import join
from farflock.experiments.bench.join import QUICK, Joined, Size
from farflock.experiments.measure.metric import Options

ANSWER = {
    "state_bytes": 86_000_000,
    "state_s": 100.0,
    "took_s": 110.0,
    "joined_s": 210.0,
    "counted_s": 114.0,
    "received_bytes": 90_000_000,
    "steady": True,
}
SLOWER = {**ANSWER, "took_s": 150.0, "joined_s": 250.0, "received_bytes": 110_000_000}
BEFORE = [2.0 * number for number in range(51)]  # a round every two seconds, up to 100
MEANWHILE = [100 + 2.5 * number for number in range(1, 61)]
FOUND = Joined([ANSWER, SLOWER], BEFORE + MEANWHILE, 500_000, 2.0, 100.0)


def test_the_goal_is_that_of_the_line_with_the_rounds_on_it():
    assert FOUND.goal_s(1e6) == pytest.approx(1.2 * 86 / 0.75 + 3)
    assert FOUND.goal_bytes == pytest.approx(1.1 * 86e6 + 500_000 * 114 / 2)


def test_the_slowest_newcomer_counts_and_the_members_pace_is_compared_with_itself():
    took, received, pace = join.metrics(FOUND, 1e6, "join.8.2")
    assert [each.metric for each in (took, received, pace)] == [
        "join.8.2",
        "join.8.2.bytes",
        "join.8.2.pace",
    ]
    assert (took.value, took.yardstick) == (150.0, pytest.approx(140.6))
    assert took.ratio == pytest.approx(140.6 / 150, abs=1e-4)
    assert "here after 100.0 s; rounds of 0.50 MB every 2.00 s take 25% of 1.00 MB/s" in took.note
    assert took.note.endswith("the progress never went back")
    assert received.value == 100.0
    assert (pace.value, pace.yardstick) == (pytest.approx(0.4), pytest.approx(0.5))
    back = dataclasses.replace(FOUND, answers=[{**ANSWER, "steady": False}])
    assert next(join.metrics(back, 1e6, "join")).note.endswith("WENT BACK")


def test_all_lines_are_measured_with_one_and_with_five_or_what_was_asked_for(monkeypatch):
    asked = []
    monkeypatch.setattr(join, "measure", lambda *what: asked.append(what) or iter(()))
    for options in (Options(), Options(rate_bits=1e7, quick=True), Options(only="join.20.5.pace")):
        list(join.run(options))
    names = [name for *_, name in asked]
    assert names[:6] == [f"join.{rate}.{count}" for rate in (5, 20, 100) for count in (1, 5)]
    assert names[6:] == ["join.10.1", "join.20.5"]
    assert [size for size, *_ in asked] == [Size()] * 6 + [QUICK, Size()]


@pytest.mark.net
@pytest.mark.long
def test_a_newcomer_joins_over_a_line_of_its_own(quick):
    took, received, pace = join.run(quick(rate_bits=2e7))
    assert 0 < took.value < took.yardstick
    assert 0 < received.value < 2 * received.yardstick
    assert pace.value > 0
