"""One printer: words and results stay apart, JSON is always JSON, only a terminal gets bars."""

import json
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.cli.output import Output, one_line, plain_table

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.floats(), st.text()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=12,
)


def with_null(value):
    """The JSON form of a value: the oracle."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: with_null(entry) for name, entry in value.items()}
    return [with_null(entry) for entry in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(), values, max_size=5))
def test_any_result_is_one_line_of_strict_json_with_null_for_what_is_no_number(facts):
    line = one_line(facts)
    assert "\n" not in line
    assert json.loads(
        line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")
    ) == with_null(facts)


def test_a_path_is_a_text_and_what_json_cannot_hold_is_refused():
    assert json.loads(one_line({"at": Path("a") / "b"})) == {"at": "a/b"}
    with pytest.raises(TypeError, match="complex is not a JSON value"):
        one_line({"x": 1j})


def test_for_people_words_and_result_go_to_standard_output(capsys):
    out = Output(as_json=False)
    out.line("on the way")
    out.result({"loss": 1.5}, "loss 1.5")
    assert capsys.readouterr() == ("on the way\nloss 1.5\n", "")


def test_for_programs_standard_output_holds_the_results_alone(capsys):
    out = Output(as_json=True)
    out.line("on the way")
    out.table(["a"], [[1]])
    for loss in (1.5, math.nan):
        out.result({"loss": loss}, "never shown")
    shown = capsys.readouterr()
    assert [json.loads(line) for line in shown.out.splitlines()] == [{"loss": 1.5}, {"loss": None}]
    assert shown.err.startswith("on the way\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_failure_is_a_sentence_and_hands_its_exit_code_back(capsys, as_json):
    assert Output(as_json).failure("it failed: so; do this", 3) == 3
    shown = capsys.readouterr()
    assert shown.err == "farflock: it failed: so; do this\n"
    assert shown.out == ('{"error":"it failed: so; do this","exit_code":3}\n' if as_json else "")


def test_a_table_is_aligned_numbers_to_the_right():
    table = plain_table(["name", "bytes"], [["noloco", 1200], ["ddp", 7]])
    assert table.splitlines() == ["name    bytes", "noloco   1200", "ddp         7"]
    assert plain_table(["a", "b"], []) == "a  b"


@given(
    st.lists(
        st.tuples(st.text(st.characters(categories=["L", "N"]), max_size=9), st.integers()),
        min_size=1,
    )
)
def test_every_cell_of_a_table_stands_under_its_column(rows):
    lines = plain_table(["some name", "n"], rows).splitlines()
    assert len(lines) == len(rows) + 1
    for line, (word, number) in zip(lines[1:], rows, strict=True):
        assert line.startswith(word)
        assert line.endswith(str(number))
        assert len(line) == len(lines[0])


def test_progress_without_a_terminal_is_a_line_for_each_tenth(capsys):
    with Output(as_json=True).progress("comparing") as progress:
        for percent in range(101):
            progress(percent / 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "comparing: 10%"
    assert lines[-1] == "comparing: 100%"
    assert len(lines) == 10


def test_a_download_without_a_terminal_says_its_rate_and_what_is_left(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    with Output(as_json=True).download("downloading") as progress:
        for here in range(10, 101, 2):
            progress(here * 1_000_000, 100_000_000)
            clock[0] += 10.0
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "downloading: 16% of 100.0 MB, 0.2 MB/s, about 0:07:00 left"
    assert "downloading: 20% of 100.0 MB, 0.2 MB/s, about 0:06:40 left" in lines
    assert lines[-1] == "downloading: 100% of 100.0 MB, 0.2 MB/s, about 0:00:00 left"
    assert len(lines) == 18


def test_a_download_on_a_terminal_is_a_bar_on_standard_error(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Output(as_json=False).download("downloading") as progress:
        progress(1_000_000, 100_000_000)
    assert capsys.readouterr().out == ""


def test_without_a_terminal_rich_is_not_even_imported(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    out = Output(as_json=False)
    out.table(["a", "b"], [["x", 1]])
    with out.progress("p") as progress:
        progress(0.5)
    assert "rich" not in sys.modules


def test_on_a_terminal_a_table_has_lines_and_its_cells_are_never_markup(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Output(as_json=False).table(["name", "n"], [["[bold]x[/bold]", 12]])
    shown = capsys.readouterr().out
    assert "[bold]x[/bold]" in shown
    assert "─" in shown


def test_on_a_terminal_a_piece_of_text_is_no_command(capsys, monkeypatch):
    Output(as_json=False).piece("\x1b[2Ja\tb\n")
    assert capsys.readouterr().out == "\x1b[2Ja\tb\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Output(as_json=False).piece("\x1b[2Jaé\tb\n")
    assert capsys.readouterr().out == "�[2Jaé\tb\n"


def test_on_a_terminal_progress_is_a_bar_on_standard_error(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Output(as_json=False).progress("comparing") as progress:
        progress(0.5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "comparing: 50%" not in shown.err
