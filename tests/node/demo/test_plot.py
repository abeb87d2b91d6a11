"""The demo's plot: the run's tokens as x, a label at each line's end, nothing of the machine."""

import csv
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from farflock.node.demo.baselines import Comparison
from farflock.node.demo.demo import Child, Mark
from farflock.node.demo.figure import warn_of_no_figure
from farflock.node.demo.plot import plot, tokens_at
from farflock.node.state.history import History

COMPARED = Comparison(1.85, 0.01, 1.8, 0.01, 2.0, 0.01, 0.2, 0.01)
MARKS = (
    Mark(0.33, "peer 1 killed"),
    Mark(0.42, "newcomer invited"),
    Mark(0.62, "founder frozen"),
    Mark(0.7, "founder back"),
)
TOTAL = 800_000


@pytest.fixture
def peer(tmp_path):
    """A function that makes a peer with these losses, one per step, and (step, tokens) seen."""

    def made(name, losses, track):
        folder = tmp_path / name.replace(" ", "-")
        with History.open(folder, lambda: 0.0) as history:
            for step, loss in enumerate(losses, start=1):
                history.metrics(step, loss=loss)
        return Child(name, folder, SimpleNamespace(poll=lambda: 0), track=track)

    return made


@pytest.fixture
def plotted(peer, tmp_path):
    """A function that plots three peers, of which one was killed and one came late."""
    falling = [5.0 / (1 + step / 40) + 1.2 for step in range(200)]
    children = (
        peer("founder", falling, [(0, 0), (200, TOTAL)]),
        peer("peer 1", falling[:60], [(0, 0), (60, TOTAL // 3)]),
        peer("newcomer", falling[100:], [(0, TOTAL // 2), (100, TOTAL)]),
        peer("server", [float("nan")], []),
    )
    return lambda: plot(tmp_path, children, MARKS, TOTAL, COMPARED)


@pytest.fixture
def drawn(plotted):
    return plotted()


def test_it_is_a_png_with_an_svg_and_its_data_next_to_it(drawn):
    assert drawn.name == "loss.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert drawn.with_suffix(".svg").stat().st_size < 200_000
    assert drawn.with_suffix(".csv").exists()


def test_every_line_and_event_has_its_label(drawn):
    svg = drawn.with_suffix(".svg").read_text()
    for label in ("founder", "peer 1", "newcomer", *(mark.label for mark in MARKS)):
        assert f">{label}</text>" in svg
    for label in ("DDP, held out: 1.800", "k tokens that all peers have trained"):
        assert f">{label}</text>" in svg
    assert ">server</text>" not in svg


def test_the_files_say_nothing_of_the_machine_or_the_day(drawn):
    svg, png = drawn.with_suffix(".svg").read_text(), drawn.read_bytes()
    assert not re.search(r"<dc:|Matplotlib|/tmp|/home", svg)
    assert b"Software" not in png
    assert str(Path.cwd()) not in svg


def test_the_data_have_every_curve_loss_and_event(drawn):
    with drawn.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    newcomer = [row for row in rows if row["what"] == "newcomer"]
    assert int(newcomer[0]["tokens"]) > TOTAL // 2
    assert {"what": "held out: DDP", "tokens": str(TOTAL), "loss": "1.80000"} in rows
    assert {"what": "event: founder frozen", "tokens": "496000", "loss": ""} in rows


def test_without_matplotlib_the_data_are_written_and_the_line_that_brings_it_is_said(
    plotted, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = []
    warn_of_no_figure(said.append)
    assert "matplotlib is not installed: `pip install 'farflock[plot]'`" in said[0]
    path = plotted()
    assert path.name == "loss.csv"
    assert "held out: DDP" in path.read_text()
    assert not path.with_suffix(".png").exists()


def test_with_matplotlib_nothing_is_said():
    warn_of_no_figure(pytest.fail)


def test_a_step_between_two_looks_lies_between_their_tokens():
    track = [(10, 1000), (20, 3000), (21, 9000)]
    expected = {5: 0.0, 10: 1000.0, 15: 2000.0, 20: 3000.0, 21: 9000.0, 30: 9000.0}
    assert {step: tokens_at(track, step) for step in expected} == expected
    assert tokens_at([], 3) == 0.0
