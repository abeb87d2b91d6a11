"""The number of trained steps is on disk after each one, for its own run alone."""

import os

import pytest

from farflock.node.state.paths import RunFolder
from farflock.node.state.sample_cursor import SampleCursor

RUN, OTHER = "a" * 32, "b" * 32


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path)


def test_what_was_written_last_is_read_in_the_next_life(folder):
    cursor = SampleCursor(folder, RUN)
    assert cursor.read() == 0
    for steps in (1, 2, 2**40):
        cursor.write(steps)
        assert SampleCursor(folder, RUN).read() == steps  # without a close, as after a kill
    cursor.close()
    cursor.close()
    assert SampleCursor(folder, RUN).read() == 2**40


def test_another_runs_number_does_not_count(folder):
    SampleCursor(folder, RUN).write(7)
    assert SampleCursor(folder, OTHER).read() == 0


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"x" * 41, bytes(range(40))])
def test_a_damaged_file_counts_for_nothing(folder, content):
    (folder.path / "samples").write_bytes(content)
    assert SampleCursor(folder, RUN).read() == 0


def test_a_full_disk_does_not_end_the_node(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    cursor = SampleCursor(folder, RUN)
    monkeypatch.setattr(os, "pwrite", full)
    cursor.write(3)
    cursor.close()


def test_a_link_in_its_place_is_not_followed(folder, tmp_path):
    (tmp_path / "victim.txt").write_text("mine")
    (tmp_path / "samples").symlink_to(tmp_path / "victim.txt")
    SampleCursor(folder, RUN).write(7)
    assert (tmp_path / "victim.txt").read_text() == "mine"
