"""Fixtures that run the command for benchmark tests, with the smallest sizes that a benchmark
accepts."""

import pytest

from farflock.experiments.measure.metric import Options
from farflock.experiments.quality.arms import Trial
from farflock.experiments.quality.score import Contender, Final, Run, Scores
from farflock.experiments.reproduce.job import Outcome
from farflock.node.cli import main as cli


@pytest.fixture
def farflock(capfd):
    """A function that runs a command in this process -> (exit code, standard output,
    standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return (ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def quick():
    """A function that makes the options of a quick run of two repeats."""

    def options(only=None, **chosen):
        return Options(repeats=2, quick=True, only=only, **chosen)

    return options


@pytest.fixture
def trial():
    """A function that makes a trial: its learning rate, and whatever else is told."""

    def make(lr=4e-3, warmup=0.25, options=None, why="to see", beta2=0.95):
        return Trial(lr, warmup, options or {"period": 16}, why, beta2)

    return make


@pytest.fixture
def run_of(trial):
    """A function that makes a run: `of("diloco.100", 2.0)` sent what its budget allows;
    DDP sends 1000 bytes."""

    def make(name, loss, seed=1, sent=None, **settings):
        arm, _, number = name.partition(".")
        budget = int(number) if number else None
        metrics = {} if loss is None else {"loss": loss, "bytes": 1000 / budget if budget else 0.0}
        if sent is not None:
            metrics["bytes"] = sent
        contender = Contender(arm, budget, trial(**settings))
        return Run(contender, seed, Outcome(metrics=metrics, diverged=loss is None), 1000.0)

    return make


@pytest.fixture
def scores(run_of):
    """Made-up scores of three methods at 1/100: 75 % and 50 % of a gain of 0.4,
    and one that only diverged or sent too much."""
    screen = {
        "ddp": (
            run_of("ddp", 2.2, lr=1e-3),
            run_of("ddp", 2.0, lr=2e-3),
            run_of("ddp", 2.3, lr=4e-3),
        ),
        "none": (run_of("none", 2.4, lr=1e-3), run_of("none", 2.5, lr=2e-3)),
        "slow.100": (run_of("slow.100", 2.3, lr=1e-3), run_of("slow.100", 2.2, lr=2e-3)),
        "fast.100": (run_of("fast.100", 2.1, lr=1e-3), run_of("fast.100", 1.9, sent=11.5)),
        "lost.100": (run_of("lost.100", None), run_of("lost.100", 1.9, sent=20.0)),
    }
    losses = {
        "ddp": (2.0, 2.1),
        "none": (2.4, 2.5),
        "slow.100": (2.2, 2.3),
        "fast.100": (2.1, 2.24),
    }
    finals = {
        name: Final(
            (run_of(name, 3.0, lr=2e-3), run_of(name, first, lr=1e-3), run_of(name, 2.9, lr=5e-4)),
            (run_of(name, first, 1, lr=1e-3), run_of(name, second, 2, lr=1e-3)),
        )
        for name, (first, second) in losses.items()
    }
    return Scores(screen, finals)
