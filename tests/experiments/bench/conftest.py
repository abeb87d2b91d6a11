"""How the tests of benchmarks run the command, and the least that a benchmark can be asked for."""

import pytest

from farflock.experiments.bench.metric import Options
from farflock.node import cli


@pytest.fixture
def farflock(capfd):
    """A function that runs a command in this process -> (exit code, standard output, standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return (ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def quick():
    """A function that makes the options of a quick run of two repeats."""

    def options(only=None):
        return Options(repeats=2, quick=True, only=only)

    return options
