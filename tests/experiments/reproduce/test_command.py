"""`farflock reproduce` as it is typed."""

import json
import sys
from pathlib import Path

import pytest
from worlds.card import CARD
from worlds.waiting import completed

from farflock.experiments.reproduce import pages, plot, recipe
from farflock.experiments.reproduce.job import Outcome

QUICK = "noloco-stability"


def lines(out):
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def no_figures(monkeypatch):
    """Figures take longer than the runs; one test looks at them."""
    monkeypatch.setattr(plot, "draw", lambda results, title, path, labels: None)


def test_alone_it_lists_the_recipes_with_their_last_verdicts(farflock, tmp_path):
    code, out, _ = farflock("reproduce", "--json", "--folder", tmp_path)
    listed = {entry["recipe"]: entry for entry in lines(out)[-1]["recipes"]}
    assert code == 0
    assert list(listed) == recipe.names()
    assert listed["interval"]["method"] == "diloco"
    assert listed["interval"]["tiers"] == ["ci", "cpu", "gpu"]
    assert "H = 1 is the worst" in listed["interval"]["claim"]
    assert listed["interval"]["last_verdict"] == {}
    assert list(tmp_path.iterdir()) == [], "listing makes nothing"


def test_a_recipe_runs_from_end_to_end_and_is_remembered(farflock, tmp_path):
    code, out, _ = farflock("reproduce", QUICK, "--tier", "ci", "--json", "--folder", tmp_path)
    (told,) = lines(out)
    assert code == 0
    assert told["verdict"] is None
    assert [rule["paper"] for rule in told["rules"]][2] == "stable (eq. 74)"
    place = tmp_path / QUICK / "ci"
    figure = {"loss.png", "loss.svg", "loss.csv"}
    assert {path.name for path in place.iterdir()} == figure | {"result.json", "table.md"}
    assert len(json.loads((place / "result.json").read_text())["arms"][0]["curves"]) == 2
    _, out, _ = farflock("reproduce", "--list", "--folder", tmp_path)
    assert "ci: ran" in out


@pytest.mark.usefixtures("no_figures")
def test_the_words_for_people_have_both_tables(farflock, tmp_path):
    _, out, _ = farflock("reproduce", QUICK, "--tier", "ci", "--folder", tmp_path)
    assert "alpha 0.9, gamma 0.7 (bound 0.38)" in out
    assert "no verdict" in out
    assert "plot and JSON in" in out


@pytest.mark.usefixtures("no_figures")
def test_a_training_recipe_runs_in_tier_ci_without_a_second_run_of_anything(farflock, tmp_path):
    farflock("reproduce", "single", "--tier", "ci", "--json", "--folder", tmp_path)
    kept = sorted((tmp_path / "arms").glob("*/outcome.json"))
    times = [path.stat().st_mtime_ns for path in kept]
    code, out, _ = farflock("reproduce", "single", "--tier", "ci", "--json", "--folder", tmp_path)
    assert code == 0
    assert [path.stat().st_mtime_ns for path in kept] == times
    arms = {arm["name"]: arm for arm in lines(out)[-1]["arms"]}
    assert list(arms) == ["ddp", "none", "m1", "m1_07"]
    assert {arm["mean"]["tokens"] for arm in arms.values()} == {512}


def test_a_dry_run_prints_the_configuration_and_its_hash_and_does_nothing(farflock, tmp_path):
    code, out, _ = farflock("reproduce", "interval", "--dry-run", "--json", "--folder", tmp_path)
    (told,) = lines(out)
    assert code == 0
    assert len(told["hash"]) == 64
    assert told["sizes"]["steps"] == 300
    assert list(told["arms"]) == ["ddp", "none", "h1", "h10", "h30", "h100"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["intervall"], "did you mean 'interval'"),
        (["interval", "--all"], "leave out --all or NAME"),
        (["interval", "--tier", "tpu"], "'tpu' is not one of"),
        (["--record", "/nowhere/page.md"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(farflock, tmp_path, arguments, said):
    code, _, err = farflock("reproduce", *arguments, "--folder", tmp_path)
    assert code == 2
    assert said in err


def test_a_gpu_tier_without_a_gpu_is_refused_before_anything_runs(farflock, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available: None)
    code, _, err = farflock("reproduce", "interval", "--tier", "gpu", "--folder", tmp_path)
    assert code == 2
    assert "torch finds none here" in err
    assert "--tier cpu" in err
    code, _, err = farflock("reproduce", "interval", "--device", "cuda", "--folder", tmp_path)
    assert code == 2
    assert "finds only a CPU here" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ci_more
def test_a_recipe_trains_on_the_device_that_was_chosen(
    farflock, tmp_path, monkeypatch, recipe_text, card
):
    monkeypatch.setattr(recipe, "load", lambda name: recipe.read(name, recipe_text))
    monkeypatch.setattr(recipe, "names", lambda: ["mine"])
    arguments = ("reproduce", "mine", "--tier", "ci", "--json", "--folder", tmp_path)
    told = []
    for device in ((), ("--device", "auto")):
        CARD.reset_counters()
        code, out, _ = farflock(*arguments, *device)
        assert code == 0
        told.append(lines(out)[-1])
        used = CARD.to_card_bytes
        assert bool(used) == bool(device)
    assert told[1]["scale"].endswith(f", on {card}")
    # the double rounds as the CPU does, with products in float32
    by_device = [[arm["mean"]["loss"] for arm in one["arms"]] for one in told]
    assert by_device[0] == pytest.approx(by_device[1], rel=1e-6)


def test_all_goes_on_after_a_recipe_that_fails_and_says_so_in_the_end(
    farflock, tmp_path, monkeypatch, recipe_text
):
    def load(name):
        return recipe.read(
            name, recipe_text.replace('method = "diloco"\noptions', 'method = "tomorrow"\noptions')
        )

    monkeypatch.setattr(recipe, "names", lambda: ["one", "two"])
    monkeypatch.setattr(recipe, "load", load)
    code, out, err = farflock("reproduce", "--all", "--tier", "ci", "--folder", tmp_path)
    assert code == 1
    assert out.count("no method tomorrow") == 2
    assert "2 of 2 recipes failed: one, two" in err


@pytest.fixture
def mine(monkeypatch, no_figures, recipe_text):
    """There is one recipe, whose runs are over at once; returns their jobs.
    The runs number `mine.interrupt` is interrupted."""

    class Jobs(list):
        interrupt = 0

    jobs = Jobs()

    def run(job, progress):
        jobs.append(job)
        if len(jobs) == jobs.interrupt:
            raise KeyboardInterrupt
        return Outcome(
            metrics={"loss": 1.0, "perplexity": 2.7, "tokens": 128, "bytes": 1}, parameters=8
        )

    monkeypatch.setattr("farflock.experiments.reproduce.workers.run", run)
    monkeypatch.setattr(recipe, "names", lambda: ["mine"])
    monkeypatch.setattr(recipe, "load", lambda name: recipe.read(name, recipe_text))
    monkeypatch.setattr(
        "farflock.experiments.reproduce.study.Study._scaled", lambda self, name, outcome: outcome
    )
    return jobs


def test_verdicts_are_recorded_in_a_page_and_those_of_tier_ci_are_none(farflock, tmp_path, mine):
    page = tmp_path / "page.md"
    page.write_text(f"{pages.BEGIN}\n{pages.END}\n")
    for tier in ("ci", "cpu"):
        farflock(
            "reproduce",
            "mine",
            "--tier",
            tier,
            "--workers",
            "1",
            "--folder",
            tmp_path / "kept",
            "--record",
            page,
        )
    assert "### mine (cpu)\n\n**Cannot tell at this scale.**" in page.read_text()
    assert "(ci)" not in page.read_text()


def test_what_was_run_before_can_be_recorded_later(farflock, tmp_path, mine):
    farflock("reproduce", "mine", "--workers", "1", "--folder", tmp_path / "kept")
    page = tmp_path / "page.md"
    page.write_text(f"{pages.BEGIN}\n{pages.END}\n")
    farflock("reproduce", "--folder", tmp_path / "kept", "--record", page)
    assert "### mine (cpu)" in page.read_text()


def test_ctrl_c_ends_it_in_good_order_and_the_next_time_goes_on(farflock, tmp_path, mine):
    mine.interrupt = 3
    code, _, err = farflock("reproduce", "mine", "--tier", "ci", "--folder", tmp_path)
    assert code == 130
    assert "interrupted" in err
    code, _, _ = farflock("reproduce", "mine", "--tier", "ci", "--folder", tmp_path)
    assert code == 0
    assert len(mine) == 3 + 2, "four runs in all, two of them before the interruption"


@pytest.mark.net
def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom farflock.node.cli.main import cli\n"
        "cli.get_command(None, 'reproduce')\nsys.stdout.write(' '.join(sys.modules))"
    )
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", code]
    done = completed(command, capture_output=True, text=True, cwd=root, check=True)
    assert not {"torch", "numpy", "matplotlib"} & set(done.stdout.split())
