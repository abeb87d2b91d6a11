"""A scheduler that follows the run does not warm up when its peer joins late."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from worlds import virtual_optimizer

import farflock
from farflock.node.library.scheduled import tell_of_late_start


def adamw():
    return torch.optim.AdamW(nn.Linear(2, 1).parameters(), lr=1.0)


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()


def test_of_a_founder_it_is_the_scheduler_itself():
    rates = []
    for wrap in (farflock.scheduled, lambda optimizer, scheduler: scheduler):
        model = nn.Linear(2, 1)
        optimizer = virtual_optimizer.alone(model, period=3, inner="sgd", lr=1.0)
        scheduler = wrap(optimizer, halving(optimizer))
        assert optimizer.run_steps() == 0
        train(model, optimizer, scheduler, 7)
        rates.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr()))
        optimizer.close(patient=False)
    assert rates[0] == rates[1]
    assert rates[0][0] == 0.5**7


@pytest.mark.parametrize(("name", "options"), [("ddp", {}), ("local", {}), ("noloco", {})])
def test_it_counts_the_steps_of_methods_with_other_rounds(name, options):
    model = nn.Linear(2, 1)
    optimizer = virtual_optimizer.alone(model, name, inner="sgd", lr=1.0, **options)
    train(model, optimizer, farflock.scheduled(optimizer, halving(optimizer)), 5)
    assert optimizer.param_groups[0]["lr"] == 0.5**5
    optimizer.close(patient=False)


class Late:
    """An optimizer whose run has made steps, as the scheduler sees it."""

    def __init__(self, steps):
        self.steps, self.follows_run = steps, False

    def run_steps(self):
        return self.steps


def test_a_late_joiner_s_rate_is_the_run_s():
    torchs, late = adamw(), Late(900)
    scheduler = farflock.scheduled(
        late, torch.optim.lr_scheduler.OneCycleLR(torchs, 3e-2, total_steps=1000)
    )
    of_run = adamw()
    other = torch.optim.lr_scheduler.OneCycleLR(of_run, 3e-2, total_steps=1000)
    for _ in range(900):
        of_run.step()
        other.step()
    assert late.follows_run
    assert torchs.param_groups[0]["lr"] == of_run.param_groups[0]["lr"]
    late.steps = 905
    scheduler.step()
    assert scheduler.last_epoch == 905
    late.steps = 2000  # the schedule is over before the run is
    scheduler.step()
    scheduler.step()


def test_a_scheduler_that_begins_at_0_in_a_late_joiner_is_told():
    torchs = adamw()
    halving(torchs)
    joiner, founder = SimpleNamespace(founder=False), SimpleNamespace(founder=True)
    with pytest.warns(UserWarning, match="has made about 900 steps.*farflock.scheduled"):
        tell_of_late_start(joiner, torchs.param_groups, 900)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_of_late_start(joiner, torchs.param_groups, 20)
        tell_of_late_start(founder, torchs.param_groups, 900)
        tell_of_late_start(joiner, adamw().param_groups, 900)
