"""Files of lines are bounded, each begins with its head, and no crash or full disk spoils them."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.state import line_file
from farflock.node.state.line_file import LineFile

LINE = st.binary(max_size=30).map(lambda raw: raw.replace(b"\n", b"") + b"\n")
LINES = st.lists(LINE.filter(lambda line: line != b"head\n"))


@pytest.fixture
def lines(tmp_path):
    return LineFile(tmp_path / "a.txt", b"head\n")


@given(LINES, st.sampled_from([b"", b"head\n"]))
def test_lines_come_back_in_order_and_files_stay_within_their_size(tmp_path_factory, added, head):
    file = LineFile(tmp_path_factory.mktemp("lines") / "a.txt", head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_file, "FILE_BYTES", 100)
        for line in added:
            file.append(line)
            sizes = [path.stat().st_size for path in file.path.parent.iterdir()]
            assert max(sizes) <= 100 + len(head)
            assert len(sizes) <= 2
    kept = b"".join(path.read_bytes() for path in (file.older, file.path) if path.exists())
    assert kept.removeprefix(head).replace(b"\n" + head, b"\n") in b"\n" + b"".join(added)
    assert kept.endswith(b"".join(added[-1:]))


def test_a_file_begins_with_its_head_once(lines):
    lines.append(b"one\n")
    lines.append(b"two\n")
    assert lines.lines() == [b"head", b"one", b"two"]


def test_a_file_with_another_head_becomes_the_older_one(lines):
    lines.path.write_bytes(b"old head\nzero\n")
    lines.mend()
    lines.append(b"one\n")
    assert lines.older.read_bytes() == b"old head\nzero\n"
    assert lines.path.read_bytes() == b"head\none\n"


def test_a_line_that_was_cut_short_is_ended(lines):
    lines.append(b"one\n")
    with lines.path.open("ab") as file:
        file.write(b"tor")
    lines.mend()
    lines.mend()
    lines.append(b"two\n")
    assert lines.lines() == [b"head", b"one", b"tor", b"two"]


def test_half_a_line_is_taken_back(lines, monkeypatch):
    lines.append(b"one\n")
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda place, raw: write(place, raw[:2]))
        with pytest.raises(OSError, match="No space left"):
            lines.append(b"two\n")
    assert lines.lines() == [b"head", b"one"]
