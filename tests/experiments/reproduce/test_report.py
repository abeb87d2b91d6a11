"""The printed, drawn and recorded numbers are the measured ones."""

import csv

import msgspec
import pytest

from farflock.experiments.reproduce import pages, plot, recipe, report
from farflock.experiments.reproduce.job import Point
from farflock.experiments.reproduce.labels import figure_labels, labels
from farflock.experiments.reproduce.study import Result, Study
from farflock.node.errors import Usage


@pytest.fixture
def told(recipe_text, outcome):
    """A function that makes a tier's study, results and facts: DDP 1, none 2, arms 1.2 and 1.5."""

    def tell(tier="cpu", long=1.5):
        study = Study(recipe.read("mine", recipe_text), tier)
        losses = {"ddp": 1.0, "none": 2.0, "short": 1.2, "long": long}
        results = [
            Result(
                name,
                name.title(),
                (4e-3, 0.25),
                {},
                tuple(outcome(loss + 0.01 * seed) for seed in (1, 2)),
            )
            for name, loss in losses.items()
        ]
        return study, results, report.facts(study, results, study.judged(results))

    return tell


def test_time_is_computing_and_transfer_one_after_the_other_or_beside_each_other():
    point = Point(tokens=1, sent_bytes=1.25e6, compute_s=3.0, loss=1, lr=1)
    assert report.time_s(point, False, 10) == pytest.approx(3 + 1)
    assert report.time_s(point, True, 10) == 3
    assert report.time_s(point, True, 1) == 10


def test_the_facts_hold_verdict_paper_ours_and_every_seed(told):
    _, _, facts = told()
    assert facts["verdict"] == "reproduced"
    (rule,) = facts["rules"]
    assert rule["paper"] == "1 < 2"
    assert rule["ours"].startswith("short 1.215")
    short = facts["arms"][2]
    assert short["values"]["loss"] == [1.21, 1.22]
    assert short["mean"]["loss"] == pytest.approx(1.215)
    assert short["gain_kept"] == pytest.approx(0.8)
    assert short["curves"][0][-1]["time_s_100_mbit"] == pytest.approx(2.0)
    msgspec.json.encode(facts)


def test_tier_ci_has_numbers_and_no_verdict(told):
    _, _, facts = told("ci")
    assert facts["verdict"] is None
    assert facts["rules"][0]["verdict"] is None
    assert "too small to judge the claim" in facts["reason"]


def test_an_arm_that_diverged_has_a_row_that_says_so(told, outcome):
    study, results, _ = told()
    gone = msgspec.structs.replace(outcome(1.0), metrics={}, diverged=True)
    results[3] = Result("long", "Long", (4e-3, 0.25), {}, (outcome(1.5), gone))
    facts = report.facts(study, results, study.judged(results))
    assert facts["verdict"] == "cannot tell at this scale"
    columns, rows = report.arm_rows(facts)
    assert rows[3][:2] == ("Long", "1 of 2 seeds diverged")
    assert len(rows[3]) == len(columns)


def test_a_rate_at_the_edge_of_its_grid_is_marked(told, outcome):
    study, results, _ = told()
    results[2] = Result(
        "short", "Short", (4e-3, 0.25), {(1e-3, 0.25): 2.0, (4e-3, 0.25): 1.2}, results[2].outcomes
    )
    _, rows = report.arm_rows(report.facts(study, results, study.judged(results)))
    assert rows[2][8] == "0.004 (edge)"
    assert rows[3][8] == "0.004"


def test_the_page_s_section_has_the_claim_the_source_and_all_arms(told):
    text = report.markdown(told()[2])
    assert text.startswith("### mine (cpu)\n\n**Reproduced.** Is it so?")
    assert "**Claim**: It is so (a paper). **Reproduced if** the loss is lower." in text
    assert "| longer is worse | 1 < 2 |" in text
    assert all(f"| {label} |" in text for label in ("Ddp", "None", "Short", "Long"))
    assert "128 in all" in text


def test_the_figure_has_a_panel_for_each_axis_an_svg_and_its_data(told, tmp_path):
    _, results, _ = told()
    plot.draw(results, "mine", tmp_path / "loss.png", {"short": "DiLoCo, period 2"})
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert [name for name, _, _ in plot.panels()] == [
        "of the run",
        "sent per peer",
        *(f"at {rate} Mbit/s" for rate in (10, 100, 1000)),
    ]
    outcome = results[0].outcomes[0]
    assert [axis(outcome, outcome.curve[-1]) for _, _, axis in plot.panels()[:2]] == [32, 32]
    svg = (tmp_path / "loss.svg").read_text()
    for label in ("Ddp", "None", "DiLoCo, period 2", "tokens of the run", "bytes sent per peer"):
        assert f">{label}</text>" in svg
    assert ">Short</text>" not in svg
    assert "<dc:" not in svg
    rows = list(csv.DictReader((tmp_path / "loss.csv").open(newline="")))
    assert len(rows) == sum(len(each.curve) for result in results for each in result.outcomes)
    assert rows[0]["arm"] == "ddp"
    assert {row["label"] for row in rows} == {"Ddp", "None", "DiLoCo, period 2", "Long"}


def test_arms_of_one_method_are_told_apart_by_the_options_in_which_they_differ(told):
    study, results, _ = told()
    assert figure_labels(study, results) == {
        "ddp": "Ddp",
        "none": "None",
        "short": "DiLoCo, period 1",
        "long": "DiLoCo, period 2",
    }


def test_labels_are_of_the_options_that_run_and_not_of_those_that_a_tier_replaces():
    study = Study(recipe.load("noloco"), "ci")
    arms, own = study.arms, dict.fromkeys(study.arms, "its own")
    assert labels(arms, study.sizes, own)["noloco"] == "NoLoCo"
    both = {"a": arms["noloco"], "b": msgspec.structs.replace(arms["noloco"], peers=8)}
    assert labels(both, study.sizes, own | {"a": "A", "b": "B"}) == {
        "a": "NoLoCo, peers 4",
        "b": "NoLoCo, peers 8",
    }
    same = {"a": arms["noloco"], "b": arms["noloco"]}
    assert labels(same, study.sizes, {"a": "A", "b": "B"}) == {
        "a": "NoLoCo (arm a)",
        "b": "NoLoCo (arm b)",
    }


def test_each_rate_s_panel_uses_its_own_rate(told):
    outcome = told()[1][0].outcomes[0]
    seconds = [axis(outcome, outcome.curve[-1]) for _, _, axis in plot.panels()[2:]]
    assert seconds == [report.time_s(outcome.curve[-1], False, rate) for rate in (10, 100, 1000)]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "reproductions.md"
    path.write_text(f"# Title\n\nBy hand.\n\n{pages.BEGIN}\n{pages.END}\n\nThe end.\n")
    return path


def test_sections_are_recorded_between_the_marks_and_stay_until_they_are_recorded_again(told, page):
    pages.record(page, {("mine", "cpu"): report.markdown(told()[2])})
    pages.record(page, {("other", "gpu"): "### other (gpu)\n\n**Not reproduced.** Why?"})
    text = page.read_text()
    assert text.startswith("# Title\n\nBy hand.")
    assert text.endswith("The end.\n")
    assert "| [mine](#mine-cpu) | cpu | reproduced |" in text
    assert "| [other](#other-gpu) | gpu | not reproduced |" in text
    pages.record(page, {("mine", "cpu"): report.markdown(told(long=1.1)[2])})
    assert "| [mine](#mine-cpu) | cpu | not reproduced |" in page.read_text()
    assert page.read_text().count("### mine (cpu)") == 1


def test_recording_the_same_again_changes_nothing(told, page):
    sections = {("mine", "cpu"): report.markdown(told()[2])}
    pages.record(page, sections)
    before = page.read_text()
    pages.record(page, sections)
    assert page.read_text() == before


def test_a_page_without_marks_is_refused(tmp_path):
    (tmp_path / "page.md").write_text("# Title")
    with pytest.raises(Usage, match="is not marked; put"):
        pages.record(tmp_path / "page.md", {})
    with pytest.raises(Usage, match="cannot be read"):
        pages.record(tmp_path / "none.md", {})
