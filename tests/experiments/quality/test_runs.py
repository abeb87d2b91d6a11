"""A file of finished runs: what was kept is found again, by another process too,
and a crash costs one line at most."""

import msgspec
import pytest

from farflock.experiments.quality.arms import load
from farflock.experiments.quality.runs import RunsFile
from farflock.experiments.quality.screen import QUICK, Bench
from farflock.experiments.reproduce.job import Outcome
from farflock.node.errors import Usage


@pytest.fixture
def jobs():
    """A line's and a swarm's."""
    bench = Bench(QUICK, load(), (100,), ("noloco.100",))
    return [bench.job(one, 1, 8) for one in (bench.screened()[0], bench.screened()[-1])]


def test_what_was_kept_is_found_by_the_next_process(tmp_path, jobs):
    path = tmp_path / "deep" / "runs.jsonl"
    runs = RunsFile(path)
    outcomes = [Outcome(metrics={"loss": 0.1 + number, "sent_bytes": 1e7}) for number in range(2)]
    assert [runs.find(job) for job in jobs] == [None, None]
    for job, outcome in zip(jobs, outcomes, strict=True):
        runs.keep(job, outcome)
    again = RunsFile(path)
    assert [again.find(job) for job in jobs] == [runs.find(job) for job in jobs] == outcomes
    assert 0 < again.kept_at(jobs[0]) <= again.kept_at(jobs[1])


def test_the_line_that_a_crash_cut_short_is_dropped(tmp_path, jobs):
    path = tmp_path / "runs.jsonl"
    outcome = Outcome(metrics={"loss": 1.0})
    RunsFile(path).keep(jobs[0], outcome)
    whole = path.read_bytes()
    RunsFile(path).keep(jobs[1], outcome)
    path.write_bytes(path.read_bytes()[:-9])
    runs = RunsFile(path)
    assert runs.find(jobs[0]) == outcome
    assert runs.find(jobs[1]) is None
    runs.keep(jobs[1], outcome)
    assert path.read_bytes().startswith(whole)
    assert RunsFile(path).find(jobs[1]) == outcome


def test_a_job_beside_its_outcome_says_what_was_run(tmp_path, jobs):
    RunsFile(tmp_path / "runs.jsonl").keep(jobs[1], Outcome(metrics={}))
    (line,) = (tmp_path / "runs.jsonl").read_bytes().splitlines()
    assert msgspec.json.decode(line)["job"]["method"] == "noloco"


@pytest.mark.parametrize("content", [b"[]\n", b"{}\n", b"\xff\n", b"\n", b"one line"])
def test_another_file_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "page.md"
    path.write_bytes(content)
    with pytest.raises(Usage, match="not a finished run"):
        RunsFile(path)
    assert path.read_bytes() == content
