"""Statements about time: efforts in proportion, a share that never falls,
and words for seconds."""

import pytest

from farflock.experiments.quality import pace as quality_pace
from farflock.experiments.quality.arms import Arm, Arms, Grid
from farflock.experiments.quality.pace import Lines, Pace, duration, effort
from farflock.experiments.quality.screen import Bench, Size


@pytest.fixture
def job(trial, run_of):
    """A function that makes a job of a line or of a swarm that exchanges every `period` steps."""

    def make(name="none", steps=10, period=1):
        made = Bench(Size(), Arms({}, {"diloco": Arm({"100": []})}), [100])
        return made.job(run_of(name, 1.0, options={"period": period}).contender, 1, steps)

    return make


def test_effort_grows_with_steps_sequences_and_exchanges(job):
    assert (
        effort(job(steps=30)) - effort(job(steps=20))
        == effort(job(steps=20)) - effort(job(steps=10))
        > 0
    )
    assert effort(job("ddp")) > effort(job("none"))
    often, seldom = effort(job("diloco.100", period=1)), effort(job("diloco.100", period=100))
    assert often > seldom > effort(job("none"))


def test_progress_counts_what_was_kept_and_ends_at_one(job, monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr(quality_pace.time, "monotonic", lambda: now[0])
    kept, running = job(steps=100), job(steps=425)
    pace = Pace(
        effort(kept) + effort(running), 2, 0.5, lambda share, left_s: told.append((share, left_s))
    )
    pace.keep([kept])
    assert told[-1] == (0.25, pytest.approx(effort(running) * 0.5 / 2)), (
        "as the machine was measured before"
    )
    now[0] = 60.0
    pace.told(running, 0.5)
    assert told[-1] == (pytest.approx(0.625), pytest.approx(60)), (
        "half took a minute, so the other half will"
    )
    pace.told(running, 1.0)
    assert told[-1] == (1.0, 0.0)


def test_more_than_was_foreseen_is_not_more_than_all(job):
    told = []
    Pace(1.0, 1, 1.0, lambda share, left_s: told.append((share, left_s))).keep([job()])
    assert told == [(1.0, 0.0)]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(3.2, "3 s"), (80, "80 s"), (150, "2 min"), (3540, "59 min"), (6600, "1 h 50 min")],
)
def test_durations_are_words(seconds, said):
    assert duration(seconds) == said


def test_without_a_terminal_there_is_a_line_for_each_twentieth():
    said = []
    lines = Lines(said.append)
    for share in (0.01, 0.051, 0.06, 0.2, 1.0):
        lines(share, 120)
    assert said == [
        "quality: 5%, about 2 min left",
        "quality: 20%, about 2 min left",
        "quality: 100%, about 2 min left",
    ]


def test_the_unit_is_measured_by_a_short_run_of_a_line():
    from farflock.node.model.llama import PRESETS

    bench = Bench(
        Size(model=PRESETS["tiny"], seq=8),
        Arms({line: Grid([1e-3], [0.1]) for line in ("ddp", "none")}, {}),
        [100],
    )
    assert 0 < quality_pace.unit_s(bench.probe()) < 1
