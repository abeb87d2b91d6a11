"""Run a command in this process: what it wrote, how it ended, and data folders of its own."""

import pytest

from farflock.node.cli import main as cli


@pytest.fixture
def farflock(capfd, monkeypatch, tmp_path):
    """A function that runs a command: (exit code, standard output, standard error).

    The user's data are elsewhere.
    """
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return (ended.value.code, *capfd.readouterr())

    return run
