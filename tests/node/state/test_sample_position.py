"""A node's position in its samples comes back from the disk, for its own run alone."""

import os

import pytest

from farflock.node.data.cursor import MAX_CURSOR_BYTES
from farflock.node.state.sample_position import FILE_NAME, SamplePosition

RUN, OTHER = "a" * 32, "b" * 32


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def test_the_newest_position_is_found_and_only_by_its_run(tmp_path):
    assert SamplePosition(tmp_path, RUN).read() == b""
    SamplePosition(tmp_path, RUN).write(b"first")
    SamplePosition(tmp_path, RUN).write(b"second")
    assert SamplePosition(tmp_path, RUN).read() == b"second"
    assert SamplePosition(tmp_path, OTHER).read() == b""
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_it_is_on_the_disk_before_it_counts_as_written(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    SamplePosition(tmp_path, RUN).write(b"12345")
    assert synced[0] == len(RUN) + 5
    assert len(synced) == 2, "the file, and then its name in the folder"


def test_no_more_of_a_large_file_is_read_than_a_cursor_takes(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(RUN.encode() + bytes(10**6))
    assert len(SamplePosition(tmp_path, RUN).read()) == MAX_CURSOR_BYTES + 1


def test_a_full_disk_leaves_the_position_before(tmp_path, monkeypatch):
    SamplePosition(tmp_path, RUN).write(b"first")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        SamplePosition(tmp_path, RUN).write(b"second")
    assert SamplePosition(tmp_path, RUN).read() == b"first"
    assert os.listdir(tmp_path) == [FILE_NAME]
