"""`farflock log` prints what a node has measured: for people, as CSV, and for programs."""

import csv
import io
import json

import msgspec
import pytest
from worlds.measured import measured, origin_in

from farflock.node.sinks.csv_file import CsvFile, head
from farflock.node.sinks.measures import NAMES

STEPS = 25


@pytest.fixture
def node(tmp_path):
    """The folder of a node that has measured something."""
    sink = CsvFile(origin_in(tmp_path))
    for step in range(STEPS):
        sink.write(measured(step, loss=None if step == 0 else 2.25))
    return tmp_path


def test_csv_is_everything_with_a_head(farflock, node):
    code, out, err = farflock("log", "--folder", node, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert (code, err) == (0, "")
    assert [int(row["step"]) for row in rows] == list(range(STEPS))
    assert tuple(rows[0]) == NAMES
    assert (rows[0]["loss"], rows[1]["loss"]) == ("", "2.25")


def test_people_get_a_table_of_the_newest(farflock, node):
    code, out, _ = farflock("log", "--folder", node)
    first, *rows = out.splitlines()
    assert code == 0
    assert first.split()[1:5] == ["step", "loss", "tokens", "tokens/s"]
    assert len(rows) == 20
    assert "11 ok, 2 partial, 1 alone, 4 failed" in rows[-1]
    assert "75%" in rows[-1]


@pytest.mark.parametrize(("last", "count"), [(3, 3), (100, STEPS)])
def test_fewer_can_be_asked_for(farflock, node, last, count):
    for form in ("--csv", "--json"):
        _, out, _ = farflock("log", "--folder", node, "--last", last, form)
        lines = out.splitlines()
        found = lines[1:] if form == "--csv" else json.loads(lines[-1])["measures"]
        assert len(found) == count


def test_programs_get_one_line_of_json(farflock, node):
    code, out, _ = farflock("log", "--folder", node, "--json", "--last", 1)
    assert code == 0
    assert json.loads(out) == {"measures": [msgspec.to_builtins(measured(STEPS - 1))]}


def test_a_folder_without_measures_is_said(farflock, tmp_path):
    code, out, err = farflock("log", "--folder", tmp_path)
    assert (code, out) == (1, "")
    assert f"no node has measured anything in {tmp_path}; start one with" in err


def test_one_form_at_a_time(farflock, node):
    code, _, err = farflock("log", "--folder", node, "--csv", "--json")
    assert code == 2
    assert "exclude each other" in err


def test_a_file_that_cannot_be_read_is_said(farflock, tmp_path):
    (tmp_path / "measures.csv").mkdir()
    code, _, err = farflock("log", "--folder", tmp_path)
    assert code == 1
    assert "measures.csv: Is a directory" in err
    assert head() not in err
