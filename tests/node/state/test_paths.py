"""Files are in the named folder or in the user's data folder; one variable moves that one.

To name a folder does not make it. A node's folder is its owner's alone, and no link that somebody
put into it is followed.
"""

import errno
import os
import stat
from pathlib import Path

import platformdirs
import pytest

from farflock.node.errors import Failure
from farflock.node.state.paths import HOME_VARIABLE, RunFolder, home, write_whole


def test_the_platform_says_where_a_users_data_is(monkeypatch):
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    assert home() == platformdirs.user_data_path("farflock", appauthor=False)
    assert home().name == "farflock"


@pytest.mark.parametrize("named", ["/srv/flock", "~/flock"])
def test_a_variable_moves_it(monkeypatch, named):
    monkeypatch.setenv(HOME_VARIABLE, named)
    assert home() == Path(named).expanduser()
    assert "~" not in str(home())


def test_an_empty_variable_counts_as_none(monkeypatch):
    monkeypatch.setenv(HOME_VARIABLE, "")
    assert home() == platformdirs.user_data_path("farflock", appauthor=False)


def test_a_nodes_folder_is_the_named_one_or_lies_in_the_users_data(monkeypatch, tmp_path):
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    assert RunFolder.at(None).path == tmp_path / "node"
    assert RunFolder.at(Path("here")).path == Path("here")


def test_a_folder_has_a_place_for_each_thing_and_naming_it_makes_nothing(tmp_path):
    folder = RunFolder.at(tmp_path / "run")
    assert folder.identity == tmp_path / "run" / "identity.key"
    assert folder.checkpoints == tmp_path / "run" / "checkpoints"
    assert not folder.path.exists()


def test_a_file_is_written_whole_or_stays_what_it_was(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_whole(path, b"old")
    with monkeypatch.context() as broken:

        def full(partial, path):
            raise OSError(errno.ENOSPC, "full")

        broken.setattr(os, "replace", full)
        with pytest.raises(OSError, match="full"):
            write_whole(path, b"new")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"old", [path])
    write_whole(path, b"newer")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"newer", [path])


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_file_has_the_mode_that_it_is_given(tmp_path, mode):
    write_whole(tmp_path / "a", b"new", mode)
    assert mode_of(tmp_path / "a") == mode
    write_whole(tmp_path / "a", b"newer", 0o600)
    assert mode_of(tmp_path / "a") == 0o600


def test_a_planted_link_is_not_followed(tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    (tmp_path / "status.partial").symlink_to(victim)
    (tmp_path / "status.json").symlink_to(victim)
    write_whole(tmp_path / "status.json", b"new")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "status.json").is_symlink()
    assert (tmp_path / "status.json").read_bytes() == b"new"


def test_what_a_crash_left_unfinished_is_in_nobodys_way(tmp_path):
    (tmp_path / "status.partial").write_bytes(b"a longer content than the new one")
    (tmp_path / "status.partial").chmod(0o666)
    write_whole(tmp_path / "status.json", b"new", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
    assert (tmp_path / "status.json").read_bytes() == b"new"
    assert mode_of(tmp_path / "status.json") == 0o600


def test_a_new_folder_is_its_owners_alone(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "node")
    folder.make()
    assert mode_of(folder.path) == 0o700
    folder.make()


@pytest.mark.parametrize(
    ("mode", "said"), [(0o755, "(mode was 0755)"), (0o770, "some could write to it before")]
)
def test_an_open_folder_is_closed_and_one_line_says_so(tmp_path, caplog, mode, said):
    folder = RunFolder(tmp_path / "node")
    folder.path.mkdir()
    folder.path.chmod(mode)
    folder.make()
    assert mode_of(folder.path) == 0o700
    (line,) = caplog.messages
    assert said in line
    folder.make()
    assert len(caplog.messages) == 1


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(Failure, match=r"belongs to another user.*name a folder of your own"):
        RunFolder(tmp_path).make()
    assert mode_of(tmp_path) == 0o755


def test_a_folder_that_others_need_is_not_closed(tmp_path, monkeypatch):
    shared, own = tmp_path / "tmp", tmp_path / "me"
    shared.mkdir()
    shared.chmod(0o1777)
    own.mkdir()
    own.chmod(0o755)
    monkeypatch.setenv("HOME", str(own))
    for path, mode in ((shared, 0o1777), (own, 0o755)):
        with pytest.raises(Failure, match=r"not for one node alone.*name a folder inside it"):
            RunFolder(path).make()
        assert mode_of(path) == mode
