"""`farflock demo` never writes among other files, and removes its own folder when interrupted."""

import tempfile
from pathlib import Path

import pytest

from farflock.node.demo.demo import Demo
from farflock.node.errors import Failure, Terminated


@pytest.fixture
def interrupted(monkeypatch, tmp_path):
    """A function that makes demos end with an error as soon as they start, in `passing`."""
    (tmp_path / "passing").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "passing"))

    def install(error):
        def run(demo):
            assert demo.manifest.exists()
            raise error

        monkeypatch.setattr(Demo, "run", run)
        return tmp_path / "passing"

    return install


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (Terminated(15), 143)])
def test_an_interrupted_demo_leaves_no_folder_that_was_not_asked_for(
    farflock, interrupted, error, code
):
    passing = interrupted(error)
    assert farflock("demo")[0] == code
    assert not list(passing.iterdir())


def test_a_folder_that_was_named_is_kept(farflock, interrupted, tmp_path):
    interrupted(KeyboardInterrupt())
    assert farflock("demo", "--folder", tmp_path / "mine")[0] == 130
    assert (tmp_path / "mine" / "run.toml").exists()


def test_a_demo_that_fails_keeps_its_logs(farflock, interrupted):
    passing = interrupted(Failure("it failed", "so", "read the log"))
    assert farflock("demo")[0] == 1
    (kept,) = passing.iterdir()
    assert (kept / "run.toml").exists()


def test_a_folder_with_other_files_is_refused(farflock, interrupted, tmp_path):
    interrupted(KeyboardInterrupt())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    code, _, err = farflock("demo", "--folder", tmp_path / "mine")
    assert code == 2
    assert "is not empty" in err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter"]


def test_no_node_is_left_when_leaving_is_interrupted_too(tmp_path, monkeypatch):
    class Stubborn:
        def __init__(self):
            self.killed = self.waited = False

        def poll(self):
            return None

        def send_signal(self, number):
            raise KeyboardInterrupt

        def kill(self):
            self.killed = True

        def wait(self):
            self.waited = True

    from farflock.node.demo.demo import Child

    demo = Demo(tmp_path, Path("run.toml"), 2, lambda moment: None)
    demo.children = [Child(name, tmp_path, Stubborn()) for name in ("a", "b")]
    with pytest.raises(KeyboardInterrupt), demo.running():
        pass
    assert all(child.process.killed and child.process.waited for child in demo.children)
