"""Gradients stay after a step, and a `GradScaler` works as with torch's own optimizers."""

import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from worlds.virtual_optimizer import alone

from farflock.node.library.step_gradients import kept

torch.set_num_threads(1)
SPOILED = 2  # the step whose gradients overflow
adamw = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1)


def net():
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    with torch.no_grad():
        for number, entry in enumerate(model.parameters()):
            entry.copy_(torch.linspace(-1, 1 + number, entry.numel()).view_as(entry))
    return model


def loss_of(model, step, spoiled=False):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    return loss * math.inf if spoiled else loss


def scaled_steps(optimizer, model, steps, clip=False, seen=None):
    scaler = GradScaler("cpu", init_scale=2.0**10)
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step, spoiled=step == SPOILED)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if seen is not None:
            seen.append([entry.grad.clone() for entry in model.parameters()])
    return scaler.get_scale()


@pytest.fixture
def make():
    made = []

    def one(model, method="diloco", **options):
        made.append(alone(model, method, inner=adamw, **options))
        return made[-1]

    yield one
    for each in made:
        each.close(patient=False)


@pytest.mark.parametrize("clip", [False, True])
def test_under_a_scaler_it_takes_the_very_steps_of_torch_and_shows_the_same_gradients(make, clip):
    ours, theirs, seen, expected = net(), net(), [], []
    optimizer, plain = make(ours, "local"), adamw(theirs.parameters())
    scales = (
        scaled_steps(optimizer, ours, 5, clip, seen),
        scaled_steps(plain, theirs, 5, clip, expected),
    )
    assert scales[0] == scales[1] == 2.0**9
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    for step, (one, other) in enumerate(zip(seen, expected, strict=True)):
        if step != SPOILED:  # torch leaves those of a skipped step in part unscaled
            assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("method", ["diloco", "ddp", "demo"])
def test_a_step_that_the_scaler_skips_is_a_local_step(make, method):
    inner = {"inner": partial(torch.optim.SGD, lr=0.02)} if method == "demo" else {}
    model = net()
    optimizer = alone(model, method, **({"inner": adamw} | inner))
    before = [entry.detach().clone() for entry in model.parameters()]
    scaler = GradScaler("cpu")
    scaler.scale(loss_of(model, 0, spoiled=True)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.tokens == 1
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.close(patient=False)


def test_skipped_steps_count_towards_the_next_round(make):
    model = net()
    optimizer = make(model, period=3)
    scaled_steps(optimizer, model, 6)
    assert (optimizer.tokens, optimizer.last_round.number) == (6, 1)


def test_a_scaler_asks_and_lightning_is_told_no(make):
    optimizer = make(net())
    question = "answer = getattr(optimizer, '_step_supports_amp_scaling', False)"
    for name, answer in (("torch.amp.grad_scaler", True), ("lightning.pytorch.plugins", False)):
        there = {"__name__": name, "optimizer": optimizer}
        exec(question, there)
        assert there["answer"] is answer


def test_half_gradients_are_refused_as_torch_does(make):
    model = net().half()
    optimizer = make(model)
    for entry in model.parameters():
        entry.grad = torch.ones_like(entry)
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.step(optimizer)


@pytest.mark.parametrize("method", ["local", "diloco", "noloco", "ddp"])
def test_gradients_stay_after_a_step_until_they_are_dropped(make, method):
    model = net()
    optimizer = make(model, method)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before = [entry.grad.clone() for entry in model.parameters()]
        optimizer.step()
        assert all(map(torch.equal, before, [entry.grad for entry in model.parameters()]))
    optimizer.zero_grad()
    assert [entry.grad for entry in model.parameters()] == [None] * 4


def test_those_of_a_closure_stay_too_and_the_ones_before_it_are_not_held(make):
    model = net()
    optimizer = make(model)
    loss_of(model, 0).backward()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    optimizer.step(closure)
    same = net()
    loss_of(same, 1).backward()
    assert all(
        torch.equal(x.grad, y.grad)
        for x, y in zip(*map(nn.Module.parameters, (model, same)), strict=True)
    )
    before = weakref.ref(model[0].weight.grad)

    def looking():
        optimizer.zero_grad()
        gone.append(before() is None)

    gone = []
    with kept(optimizer, looking) as wrapped:
        wrapped()
    assert gone == [True]
