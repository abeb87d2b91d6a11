"""One printer: words and results stay apart, JSON is always JSON, only a terminal gets bars."""

import json
import logging
import math
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.cli.output import Output, clean, clean_logs, one_line, plain_table

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


def test_on_a_terminal_progress_is_a_bar_on_standard_error(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Output(as_json=False).progress("comparing") as progress:
        progress(0.5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "comparing: 50%" not in shown.err


# Commands to a terminal.

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J"


def is_control(char):
    return char not in "\n\t" and (ord(char) < 32 or 127 <= ord(char) < 160)


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (HOSTILE, ""),
        (f"5 ms  {HOSTILE}here\x1b[8m", "5 ms  here"),
        ("\x1b]8;;http://evil.example\x1b\\click\x1b]8;;\x1b\\", "click"),
        ("\x9b2J\x9d0;PWNED\x9cb", "b"),
        ("\x1bPq#0\x1b\\\x1bcdone\x1b(B", "done"),
        ("50%\r100%\x08\x7f", "50%100%"),
        ("\x1b\x1b[2J\x1b", ""),
        ("lines\n\tstay, é and 漢 too", "lines\n\tstay, é and 漢 too"),
    ],
)
def test_escape_sequences_and_control_characters_are_removed(text, left):
    assert clean(text) == left


def test_two_texts_cannot_hide_the_lines_between_them():
    assert clean("a\x1b]0;\nhonest\n\x07b") == "a0;\nhonest\nb"


@given(st.text(st.sampled_from("\x1b\x9b\x9d\x9c\x07[]P\\;0mJ \n\tab\x00\r\x7f")))
def test_no_control_character_survives_and_nothing_is_left_to_remove(text):
    left = clean(text)
    assert not any(map(is_control, left))
    assert clean(left) == left
    assert left.count("\n") == text.count("\n")


@given(st.text(st.characters(exclude_categories=["Cc"])))
def test_text_without_control_characters_stays_as_it_is(text):
    assert clean(text) == text


def test_many_unfinished_sequences_take_no_time():
    assert clean("\x1b]" * 200_000) == ""


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_that_is_printed_commands_a_terminal(capsys, as_json):
    out = Output(as_json)
    out.line(f"a{HOSTILE}")
    out.table([f"b{HOSTILE}"], [[f"c{HOSTILE}"]])
    out.result({"d": f"{HOSTILE}\x9b2J\x7f"}, f"d{HOSTILE}")
    out.failure(f"e{HOSTILE}", 1)
    with out.progress(f"f{HOSTILE}") as show:
        show(1.0)
    shown = "".join(capsys.readouterr())
    assert not any(map(is_control, shown))
    assert all(f"{letter}\n" in shown or letter in "df" for letter in "abcdef")
    if as_json:
        assert json.loads(shown[shown.index('{"d"') :].splitlines()[0])["d"].endswith("\x9b2J\x7f")


def test_a_table_on_a_terminal_holds_no_commands_but_our_own(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    Output(as_json=False).table([f"b{HOSTILE}"], [[f"c{HOSTILE}"]])
    shown = capsys.readouterr().out
    assert "PWNED" not in shown
    assert "\x1b[2J" not in shown


def test_logs_command_no_terminal_and_neither_do_their_tracebacks(caplog):
    with clean_logs():
        try:
            raise ValueError(HOSTILE + "bad")
        except ValueError:
            logging.getLogger("farflock.test").exception("from %s", f"{HOSTILE}peer")
    assert caplog.messages == ["from peer"]
    assert "ValueError: bad" in caplog.text
    assert not any(map(is_control, caplog.text))
    logging.getLogger("farflock.test").warning("%s", HOSTILE)
    assert caplog.messages[-1] == HOSTILE
