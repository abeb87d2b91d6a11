import os
import stat

import pytest

from farflock.node.state.paths import RunFolder
from farflock.node.state.voting_files import VotingFiles


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "node")
    made.make()
    return made


def test_what_was_written_last_is_there_for_another_process(folder):
    files = VotingFiles(folder)
    assert files.read("votes") == b""
    files.write("votes", b"one")
    files.write("views", b"other")
    files.write("votes", b"two")
    assert VotingFiles(folder).read("votes") == b"two"
    assert VotingFiles(folder).read("views") == b"other"
    assert stat.S_IMODE((folder.path / "votes.bin").stat().st_mode) == 0o600


def test_it_is_on_the_disk_before_the_call_returns(folder, monkeypatch):
    """The file before it has its name, and the name too."""
    synced, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda place: synced.append(_kind(place)) or fsync(place))
    monkeypatch.setattr(os, "replace", lambda *names: synced.append("named") or replace(*names))
    VotingFiles(folder).write("votes", b"one")
    assert synced == ["file", "named", "folder"]


def _kind(place):
    return "folder" if stat.S_ISDIR(os.fstat(place).st_mode) else "file"


def test_a_failure_leaves_what_was_there(folder, monkeypatch):
    files = VotingFiles(folder)
    files.write("votes", b"one")

    def fails(place):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space"):
        files.write("votes", b"two")
    assert files.read("votes") == b"one"
    assert sorted(each.name for each in folder.path.iterdir()) == ["votes.bin"]
