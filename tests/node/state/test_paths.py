"""Files are in the named folder or in the user's data folder; one variable moves that one.

To name a folder does not make it.
"""

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


@pytest.mark.parametrize("version", ["it raises", "it leaves ~"])
def test_a_user_without_a_home_is_told_what_to_set_and_no_folder_is_called_tilde(
    monkeypatch, version
):
    def nowhere(*names, **options):
        if version == "it raises":
            raise RuntimeError("could not determine the home directory")
        return Path("~/.local/share/farflock")

    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    monkeypatch.setattr(platformdirs, "user_data_path", nowhere)
    with pytest.raises(Failure, match="this user has no home; set FARFLOCK_HOME, or choose a --f"):
        RunFolder.at(None)
    assert RunFolder.at(Path("here")).path == Path("here")


def test_a_tilde_in_the_variable_of_a_user_without_a_home_is_no_folder(monkeypatch):
    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setenv(HOME_VARIABLE, "~/flock")
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(Failure, match="this user has no home"):
        home()


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
        broken.setattr(
            Path,
            "write_bytes",
            lambda self, content: Path.open(self, "wb").write(content[:1]) and 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    write_whole(path, b"newer")
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (b"newer", [path])
