"""Outer state in files: it is memory like any other, has no names, and takes its room at once."""

import errno
import os

import pytest
import torch

from farflock.node.errors import Failure
from farflock.node.state import outer_files
from farflock.node.state.outer_files import MIN_FILE_BYTES, VALUE_BYTES, OuterFiles

COUNT = MIN_FILE_BYTES // VALUE_BYTES


def test_tensors_are_zeros_that_can_be_changed_and_read(tmp_path):
    x, y = (OuterFiles(tmp_path).allocate((2, COUNT)) for _ in range(2))
    assert x.shape == (2, COUNT)
    assert x.dtype == torch.float32
    assert not x.any()
    x.view(-1)[COUNT - 1 :] += 2.5
    assert float(x.sum()) == 2.5 * (COUNT + 1)
    assert not y.any()


def test_the_files_have_no_names_and_small_tensors_no_files(tmp_path):
    files = OuterFiles(tmp_path / "new")
    files.allocate((COUNT - 1,))
    assert not (tmp_path / "new").exists()
    kept = files.allocate((COUNT,))
    assert not list((tmp_path / "new").iterdir())
    kept.fill_(1.0)


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="room is taken by writing here")
def test_the_room_is_taken_before_the_tensor_is_used(tmp_path, monkeypatch):
    reserved = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: reserved.append(arguments[1:]))
    monkeypatch.setattr(torch, "from_file", lambda name, **options: torch.zeros(options["size"]))
    OuterFiles(tmp_path).allocate((3, COUNT))
    assert reserved == [(0, 3 * MIN_FILE_BYTES)]


def test_without_room_on_the_disk_it_says_what_to_do(tmp_path, monkeypatch):
    def full(file, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(outer_files, "_reserve", full)
    with pytest.raises(Failure, match=r"cannot hold the outer state.*no space left"):
        OuterFiles(tmp_path).allocate((COUNT,))
    assert not list(tmp_path.iterdir())


def test_where_the_system_cannot_reserve_room_zeros_are_written(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert not OuterFiles(tmp_path).allocate((COUNT + 1,)).any()
