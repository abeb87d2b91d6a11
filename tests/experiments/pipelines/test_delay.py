"""The study of late gradients: that it measures lateness and nothing else."""

import math

import pytest
import torch
from torch import nn

from farflock.experiments.pipelines import delay as study
from farflock.experiments.pipelines.delay import ARMS, Arm, Late, Size, read
from farflock.node.errors import Failure

SHORT = Size(steps=4, rates=[1e-2], held_out=2, seeds=[1])


class Quadratic(nn.Module):
    """w^2/2, with w = 1 at first."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self):
        return self.w**2 / 2


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_step_takes_the_gradient_of_the_weights_that_many_steps_ago(delay):
    module = Quadratic()
    trainer = Late(module, torch.optim.SGD(module.parameters(), 0.1), delay)
    path = [1.0]
    for step in range(9):
        trainer.step(lambda module: module(), clip_norm=None)
        path.append(path[-1] - 0.1 * path[max(step - delay, 0)])
        assert module.w.item() == pytest.approx(path[-1], rel=1e-12)


def test_every_arm_runs_and_equal_seeds_give_equal_numbers():
    losses = {arm.name: read(SHORT, arm, 1e-2, 1) for arm in ARMS}
    assert all(map(math.isfinite, losses.values()))
    assert len(set(losses.values())) == len(ARMS), "two arms are the same"
    assert read(SHORT, ARMS[-1], 1e-2, 1) == losses[ARMS[-1].name]
    assert read(SHORT, ARMS[-1], 1e-2, 2) != losses[ARMS[-1].name]


def test_what_diverges_has_an_infinite_loss():
    assert read(SHORT, Arm("adamw", 4), 1e30, 1) == math.inf


def test_each_optimizer_is_compared_with_itself_and_nadam_has_its_papers_momentum():
    assert len({arm.name for arm in ARMS}) == len(ARMS) == 8
    assert {(arm.base, arm.delay) for arm in ARMS} >= {
        ("adamw", 0),
        ("nadam", 0),
        ("muon", 0),
        ("nadam", 1),
    }
    nadam = Arm("nadam", 1).inner(nn.Linear(1, 1), 1e-3)
    assert {group["betas"][0] for group in nadam.param_groups} == {0.99}


@pytest.fixture
def invented(monkeypatch):
    """Every arm is best at 1e-2, where its loss is its place and a tenth of the seed,
    and diverges at the rates given."""

    def replace(diverging=()):
        def read(size, arm, rate, seed):
            loss = ARMS.index(arm) + seed / 10 + abs(rate - 1e-2)
            return math.inf if rate in diverging and seed == 2 else loss

        monkeypatch.setattr(study, "read", read)

    return replace


def test_rows_are_losses_at_the_best_rate_and_what_lateness_adds(table, invented):
    invented(diverging=[3e-2])
    found = table("delay", rates=[3e-3, 1e-2, 3e-2], seeds=[1, 2])
    assert found["adamw, 0 late"] == pytest.approx([0.1, 0.2])
    assert found["nadam, 4 late"] == pytest.approx([5.1, 5.2])
    assert found["what 1 late costs adamw"] == pytest.approx([1, 1])
    assert found["what 4 late costs nadam"] == pytest.approx([2, 2])
    assert found["what 1 late costs muon"] == pytest.approx([1, 1])
    assert {found[f"{arm.name}, best rate"] for arm in ARMS} == {1e-2}
    assert len(found) == 8 + 5 + 8


def test_an_arm_that_diverges_at_every_rate_is_no_row_but_a_failure(table, invented):
    invented(diverging=[3e-3, 1e-2])
    with pytest.raises(Failure, match="adamw, 0 late: every rate diverges"):
        table("delay", rates=[3e-3, 1e-2], seeds=[1, 2])


def test_a_short_computation_is_the_short_reading(table):
    found = table("delay", steps=4, rates=[1e-2], held_out=2, seeds=[1])
    assert found["nadam, 1 late"] == [read(SHORT, Arm("nadam", 1), 1e-2, 1)]
