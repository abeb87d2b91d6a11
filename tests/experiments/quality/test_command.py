"""`farflock bench quality`: options of its own, lines of JSON, and never among those that run
without a name."""

import json
from dataclasses import replace

import pytest

from farflock.experiments.bench import command
from farflock.experiments.quality import arms as quality_arms
from farflock.experiments.quality import pace as quality_pace
from farflock.experiments.quality import screen as quality
from farflock.experiments.quality.runs import RunsFile


@pytest.fixture
def asked(monkeypatch, scores):
    """The arguments that the benchmark was built with; the scores are made up."""
    found = {}

    class Fake(quality.Bench):
        def __init__(self, size, arms, budgets, only):
            super().__init__(size, arms, budgets, only)
            found.update(size=size, budgets=self.budgets, only=self.only)

        def run(self, shelf, workers, pace):
            found.update(shelf=shelf, workers=workers)
            return scores

        def measured_at(self, shelf, scores):
            return 1.8e9

    monkeypatch.setattr(quality, "Bench", Fake)
    monkeypatch.setattr(quality_pace, "unit_s", lambda job: 0.004)
    return found


def test_each_finalist_is_a_line_of_json_and_people_get_tables(farflock, asked):
    code, out, err = farflock("bench", "quality")
    assert code == 0
    assert [json.loads(line)["metric"] for line in out.splitlines()] == [
        "quality.share.fast.100",
        "quality.share.slow.100",
    ]
    assert list(json.loads(out.splitlines()[0])) == list(command.COLUMNS)
    for part in (
        "final at 1/100",
        "screen at 1/100",
        "15.0% above its budget",
        "best, at the edge in lr",
    ):
        assert part in err
    assert (asked["size"], asked["budgets"], asked["only"]) == (quality.Size(), (100,), ())


def test_a_gpu_s_tier_is_larger_and_takes_one_process(farflock, asked, card):
    for options in (("--tier", "gpu"), ("--device", "auto")):
        code, _, _ = farflock("bench", "quality", *options)
        assert code == 0
        sizes = quality.GPU if options[0] == "--tier" else quality.Size()
        assert asked["size"] == replace(sizes, device=str(card))
        assert asked["workers"] == 1
    job = quality.Bench(asked["size"], quality_arms.load(), (100,), ()).probe()
    assert job.device == str(card)


def test_a_gpu_s_tier_without_a_gpu_is_refused(farflock, asked, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    code, _, err = farflock("bench", "quality", "--tier", "gpu")
    assert code == 2
    assert "torch finds none here" in err
    assert not asked


def test_programs_get_the_lines_alone(farflock, asked):
    _, out, err = farflock("bench", "quality", "--json")
    assert len(out.splitlines()) == 2
    assert "final at" not in err


def test_how_long_it_takes_is_said_before_it_starts_and_a_dry_run_ends_there(farflock, asked):
    code, out, err = farflock("bench", "quality", "--workers", "2", "--dry-run")
    assert (code, out) == (0, "")
    assert "runs of 400 steps, then finals of 2000 steps; about " in err
    assert "with 2 workers" in err
    assert "workers" not in asked


def test_options_reach_the_benchmark(farflock, asked, tmp_path):
    given = [
        "--steps",
        "50",
        "--screen-steps",
        "20",
        "--seeds",
        "2",
        "--finalists",
        "3",
        "--budget",
        "all",
    ]
    farflock("bench", "quality", *given, "--workers", "7", "--folder", tmp_path)
    size = asked["size"]
    assert (size.steps, size.screen_steps, size.seeds, size.finalists) == (50, 20, (1, 2), 3)
    assert (asked["budgets"], asked["workers"], asked["shelf"].folder) == ((100, 500), 7, tmp_path)
    farflock("bench", "quality", "--quick", "--seeds", "1")
    assert (asked["size"].steps, asked["size"].seeds) == (quality.QUICK.steps, (1,))


def test_one_metric_alone_is_measured_at_its_budget(farflock, asked):
    farflock("bench", "--json", "quality.share.diloco.500")
    assert (asked["only"], asked["budgets"]) == (("diloco.500",), (500,))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["quality.share.dilco.100"], "did you mean 'quality.share.diloco.100'?"),
        (["quality", "codec"], "quality has no metric with this name"),
        (["quality", "--budget", "50"], "--budget"),
        (["quality", "--quick", "--record", "page.md"], "leave out --quick"),
        (["quality", "--rate", "10mbit"], "--rate"),
        (["quality", "--runs", "runs.jsonl", "--folder", "."], "leave out --folder"),
    ],
)
def test_wrong_usage_is_exit_code_2_before_anything_is_measured(farflock, asked, arguments, named):
    code, out, err = farflock("bench", *arguments)
    assert (code, out) == (2, "")
    assert named in err
    assert "workers" not in asked


def test_it_is_not_among_those_that_run_without_a_name():
    assert "quality" not in command.BENCHMARKS


def test_results_are_recorded_with_the_day_that_they_were_measured(farflock, asked, tmp_path):
    from farflock.experiments.quality.report import BEGIN, END

    page = tmp_path / "quality.md"
    page.write_text(f"{BEGIN}\n{END}\n")
    assert farflock("bench", "quality", "--record", page)[0] == 0
    once = page.read_text()
    assert "Measured 2027-01-15" in once
    farflock("bench", "quality", "--record", page)
    assert page.read_text() == once


def test_runs_can_be_kept_in_a_file(farflock, asked, tmp_path):
    assert farflock("bench", "quality", "--runs", tmp_path / "runs.jsonl")[0] == 0
    assert isinstance(asked["shelf"], RunsFile)


def test_a_file_of_something_else_is_refused(farflock, asked, tmp_path):
    (tmp_path / "runs.jsonl").write_text("a page\n")
    code, _, err = farflock("bench", "quality", "--runs", tmp_path / "runs.jsonl")
    assert code == 2
    assert "line 1 is not a finished run" in err
