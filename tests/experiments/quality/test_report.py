"""Tables, lines and the page: nothing that failed is left out, and writing twice changes
nothing."""

import json
import math
from dataclasses import asdict

import pytest

from farflock.experiments.quality import report as report
from farflock.experiments.quality.score import Final
from farflock.experiments.quality.screen import Size
from farflock.node.cli.output import one_line
from farflock.node.errors import Usage
from farflock.node.model.llama import PRESETS

SIZE = Size(model=PRESETS["tiny"], seeds=(1, 2))
PAGE = f"# Quality\n\nBy hand.\n\n{report.BEGIN}\n\nnothing yet\n\n{report.END}\n\nAfter.\n"


def row(table, name):
    columns, rows = table
    return dict(zip(columns, next(line for line in rows if line[0] == name), strict=True))


def test_the_final_has_lines_first_and_methods_by_their_share(scores):
    table = report.final_table(scores, 100)
    assert [line[0] for line in table[1]] == ["ddp", "none", "fast", "slow"]


def test_a_finalist_s_share_is_the_mean_over_seeds_with_its_error(scores):
    _, rows = report.final_table(scores, 100)
    fast = rows[2]
    assert fast[5:8] == ("70.0%", "5.0%", "75% 65%")
    assert fast[3:5] == ("2.1700", "0.0700")
    assert fast[8] == "100.0"
    assert [line[5] for line in rows[:2]] == ["100.0%", "0.0%"]


def test_savings_are_rounded_down_and_the_worst_seed_s(run_of):
    runs = [run_of("a.100", 1.0, sent=9.99), run_of("a.100", 1.0, 2, sent=9.0)]
    assert report.byte_saving(runs) == "100.1"
    assert report.byte_saving([run_of("a.100", 1.0, sent=10.001)]) == "99.9"
    assert report.byte_saving([run_of("none", 1.0)]) == "none"
    assert report.byte_saving([run_of("a.100", None)]) == "-"


def test_the_screen_shows_every_trial_also_those_that_do_not_count(scores):
    columns, rows = report.screen_table(scores, 100)
    remarks = [(line[0], line[columns.index("")]) for line in rows]
    assert remarks == [
        ("fast", "best"),
        ("fast", "15.0% above its budget"),
        ("slow", ""),
        ("slow", "best"),
        ("lost", "diverged"),
        ("lost", "100.0% above its budget"),
    ]
    assert rows[0][columns.index("share")] == "75.0%"
    assert rows[4][columns.index("loss")] == "diverged"


def test_the_grids_mark_their_best_and_an_edge(scores):
    _, rows = report.grid_table(scores)
    assert [line[-1] for line in rows] == ["", "best", "", "best, at the edge in lr", ""]


def test_a_metric_is_named_by_method_and_budget_and_says_what_it_rests_on(scores):
    first, second = report.metrics(scores, 100)
    assert (first.metric, first.n, first.yardstick) == ("quality.share.fast.100", 2, 1.0)
    assert first.value == pytest.approx(0.7)
    assert first.ratio == 0.7
    assert (
        "± 0.0500 (standard error); bytes 1/100.0 of DDP's; lr 0.001, warm-up 0.25, period 16"
        in first.note
    )
    assert second.metric == "quality.share.slow.100"
    assert json.loads(one_line(asdict(first)))["unit"] == "of DDP's gain"


def test_where_ddp_gains_nothing_there_is_no_number_and_the_reason(scores, run_of):
    flat = Final(scores.finals["ddp"].ladder, (run_of("ddp", 2.5), run_of("ddp", 2.6, 2)))
    changed = type(scores)(scores.screen, {**scores.finals, "ddp": flat})
    first, _ = report.metrics(changed, 100)
    assert math.isnan(first.value)
    assert json.loads(one_line(asdict(first)))["value"] is None
    assert report.NO_GAIN in first.note
    assert row(report.final_table(changed, 100), "fast")["share"] == "-"


def test_a_final_run_above_its_budget_is_said_with_its_seed(scores, run_of):
    over = Final(
        scores.finals["slow.100"].ladder,
        (run_of("slow.100", 2.2), run_of("slow.100", 2.2, 2, sent=12.0)),
    )
    changed = type(scores)(scores.screen, {**scores.finals, "slow.100": over})
    assert "seed 2: 20.0% above its budget" in report.final_table(changed, 100)[1][-1][-1]


def test_a_rate_at_the_edge_of_its_ladder_and_a_grid_s_edge_are_said(scores, run_of):
    ladder = (run_of("none", 2.0, lr=1e-3), run_of("none", 2.1, lr=2e-3))
    finals = {**scores.finals, "none": Final(ladder, scores.finals["none"].runs)}
    said = row(report.final_table(type(scores)(scores.screen, finals), 100), "none")[""]
    assert said


def test_a_section_has_settings_seeds_date_all_tables_and_every_rate(scores):
    text = report.section(scores, SIZE, 100, "2026-11-21")
    assert text.startswith("## At 1/100\n")
    for part in (
        "2026-11-21",
        "2000 steps on seeds 1, 2",
        "400 steps on seed 1",
        "1024 tokens",
        "### Screen",
        "diverged",
    ):
        assert part in text
    assert "- fast.100: 0.0005: 2.9000, 0.001: 2.1000, 0.002: 3.0000" in text


def test_recording_twice_changes_nothing_and_keeps_the_other_budget(scores, tmp_path):
    page = tmp_path / "quality.md"
    page.write_text(PAGE)
    text = report.section(scores, SIZE, 100, "2026-11-21")
    report.record(page, {500: text.replace("1/100", "1/500")})
    report.record(page, {100: text})
    once = page.read_text()
    report.record(page, {100: text})
    assert page.read_text() == once
    assert once.index("## At 1/100") < once.index("## At 1/500")
    assert once.startswith("# Quality\n\nBy hand.")
    assert once.endswith("After.\n")
    assert "nothing yet" not in once


def test_a_page_without_a_place_for_it_is_left_alone(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Mine\n")
    with pytest.raises(Usage, match="not marked"):
        report.record(page, {100: "## At 1/100"})
    assert page.read_text() == "# Mine\n"
    with pytest.raises(Usage, match="cannot be read"):
        report.record(tmp_path / "absent.md", {})


def test_a_bar_in_a_cell_does_not_make_a_column():
    assert report.pages.table(("a", "b"), [("x|y", 1)]) == [
        "| a | b |",
        "| --- | --- |",
        "| x/y | 1 |",
    ]
