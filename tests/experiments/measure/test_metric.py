"""A line of the scoreboard says what was measured, and its arithmetic is that of medians of
alternating runs."""

import itertools
import json
import statistics
from dataclasses import asdict

import pytest

from farflock.experiments.measure.metric import Metric, Options, load, medians, seconds, turns
from farflock.node.cli.output import one_line


@pytest.fixture
def clock():
    """Return a clock, and a function that makes work that takes the given seconds of it."""
    now = [0.0]

    def work(*durations):
        each = itertools.cycle(durations)

        def do():
            now[0] += next(each)

        return do

    return (lambda: now[0]), work


def test_a_line_is_one_json_object_with_every_field():
    line = one_line(asdict(Metric("loop", 2.0, 4.0, 0.5, 5, 0.1, note="a note\nof two lines")))
    assert "\n" not in line
    assert json.loads(line) == {
        "metric": "loop",
        "value": 2.0,
        "yardstick": 4.0,
        "ratio": 0.5,
        "n": 5,
        "load": 0.1,
        "unit": "s",
        "note": "a note\nof two lines",
    }


def test_a_metric_without_a_yardstick_says_null():
    assert (
        json.loads(one_line(asdict(Metric("sim.peer_s", 0.1, None, None, 1, 0.0))))["ratio"] is None
    )


@pytest.mark.parametrize(
    ("only", "wanted"),
    [
        (None, True),
        ("codec.int8", True),
        ("codec", True),
        ("codec.int4", False),
        ("codec.int", False),
        ("codec.int8.a", False),
    ],
)
def test_options_want_everything_or_one_metric_with_its_parts(only, wanted):
    assert Options(only=only).wants("codec.int8") is wanted


def test_seconds_are_those_of_the_clock_that_is_given(clock):
    now, work = clock
    assert seconds(work(3.0), now) == 3.0


def test_works_take_turns_and_their_first_run_does_not_count(clock):
    now, work = clock
    assert turns(3, work(100.0, 1.0, 2.0, 3.0), work(50.0, 4.0, 5.0, 6.0), clock=now) == [
        (1.0, 4.0),
        (2.0, 5.0),
        (3.0, 6.0),
    ]


def test_each_work_runs_once_a_round_in_wall_seconds():
    order = []
    rounds = turns(3, lambda: order.append("a"), lambda: order.append(sum(range(200_000))))
    assert [one == "a" for one in order] == [True, False] * 4
    first, second = map(statistics.median, zip(*rounds, strict=True))
    assert 0 <= first < second


def test_the_ratio_is_the_median_of_the_pairs_own_ratios():
    slow_minute = [(1.0, 2.0), (10.0, 20.0), (1.1, 2.0)]
    assert medians(slow_minute) == (1.1, 2.0, 0.5)


def test_load_is_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (6.0, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert load() == 1.5
