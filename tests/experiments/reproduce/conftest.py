"""The smallest recipe that trains, jobs of it, outcomes with given numbers,
and the command line in this process."""

import pytest

from farflock.experiments.pipelines.text import texts
from farflock.experiments.reproduce.job import Line, Noise, Outcome, Point, Swarm
from farflock.node.cli import main as cli
from farflock.node.model.llama import PRESETS

RECIPE = """
question = "Is it so?"
method = "diloco"
claim = "It is so"
source = "a paper"
reproduced_if = "the loss is lower."

[common]
model = "tiny"
batch = 4
seq = 8
steps = 4
held_out = 4
points = 2
peers = 2

[tiers.ci]
seeds = [1]

[tiers.cpu]
seeds = [1, 2]
lr = [1e-3, 4e-3]

[arms.short]
label = "H = 1"
method = "diloco"
options = { period = 1, codec = "fp32", return_codec = "fp32" }

[arms.long]
label = "H = 2"
method = "diloco"
options = { period = 2, codec = "fp32", return_codec = "fp32" }

[[verdict]]
kind = "ordering"
arms = ["short", "long"]
says = "longer is worse"
paper = "1 < 2"
"""

COMMON = {
    "seed": 1,
    "model": PRESETS["tiny"],
    "batch": 4,
    "seq": 8,
    "steps": 4,
    "lr": 3e-3,
    "warmup": 0.25,
    "floor": 0.1,
    "weight_decay": 0.1,
    "betas": (0.9, 0.95),
    "clip": 1.0,
    "optimizer": "adamw",
    "points": 2,
    "held_out": 4,
    "device": "cpu",
}
EXACT = {"codec": "fp32", "return_codec": "fp32"}


@pytest.fixture
def recipe_text():
    return RECIPE


@pytest.fixture
def line():
    """A function that makes a job of one process."""
    return lambda **changes: Line(**{**COMMON, "corpus": texts()[2], **changes})


@pytest.fixture
def swarm():
    """A function that makes a job of two simulated peers that run DiLoCo with H = 2."""

    def make(**changes):
        base = {
            **COMMON,
            "corpus": texts()[2],
            "method": "diloco",
            "options": {"period": 2, **EXACT},
            "peers": 2,
        }
        return Swarm(**{**base, "late": 0.0, "speeds": (), "step_s": 0.5, **changes})

    return make


@pytest.fixture
def noise():
    """A function that makes a job without gradients."""
    return lambda **changes: Noise(
        **{"seed": 1, "peers": 32, "rounds": 60, "alpha": 0.5, "gamma": 0.7, **changes}
    )


@pytest.fixture
def outcome():
    """A function that makes an outcome with this final loss, of 32 tokens and 8 parameters."""

    def make(loss, **metrics):
        points = [
            Point(tokens=tokens, sent_bytes=tokens, compute_s=tokens / 16, loss=loss, lr=0.1)
            for tokens in (16, 32)
        ]
        return Outcome(
            metrics={"loss": loss, "tokens": 128, "bytes": 32, **metrics},
            curve=points,
            parameters=8,
        )

    return make


@pytest.fixture
def farflock(capfd):
    """A function that runs a command in this process -> (exit code, standard output,
    standard error)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return (ended.value.code, *capfd.readouterr())

    return run
