"""Portable steps are torch's within rounding, and are made of operations that round alone."""

import copy
import hashlib

import numpy as np
import pytest
import torch
from operators import Operators
from torch import nn
from torch.nn.utils import clip_grad_norm_

from farflock.optimizers.parts.portable_inner import (
    PIECE,
    PortableAdamW,
    PortableSGD,
    clip_norm_,
    is_portable,
    make_portable,
)

STEPS = 20
# Each rounds once on every machine; products with a number are exact products, rounded.
ROUNDED_ALONE = {"mul", "mul_", "add", "add_", "sub_", "div", "sqrt", "copy_"}
MAKE_AND_CUT = {"lift_fresh", "zeros", "zeros_like", "view", "slice", "detach", "new_full", "alias"}
COUNT = {"_local_scalar_dense"}  # of steps
# Torch's profiler, which sees the steps of a class as soon as one has loaded a state.
PROFILED = {"_record_function_enter_new", "_record_function_exit"}
KINDS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "decay": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
}

each_kind = pytest.mark.parametrize("kind", KINDS)


def drawn(shape, seed):
    """Normal values, whatever the processor; torch's depend on its vector instructions."""
    return torch.tensor(np.random.default_rng(seed).normal(size=shape), dtype=torch.float32)


def weights(transposed=False):
    first = drawn((40, 30), 5)
    return [nn.Parameter(first.t() if transposed else first), nn.Parameter(torch.zeros(7))]


def stepped(optimizer, parameters, steps=STEPS):
    """Let the optimizer take steps with drawn gradients, the last parameter's first one missing."""
    for step in range(steps):
        for x in parameters:
            x.grad = drawn(x.shape, step).to(x.device)
        if not step:
            parameters[-1].grad = None
        optimizer.step()


@each_kind
@pytest.mark.parametrize("transposed", [False, True])
def test_steps_are_torchs_within_rounding(kind, transposed):
    ours, theirs = weights(transposed), weights(transposed)
    made = [KINDS[kind](each) for each in (ours, theirs)]
    make_portable(made[0])
    for optimizer, parameters in zip(made, (ours, theirs), strict=True):
        stepped(optimizer, parameters)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    states = [each.state_dict()["state"] for each in made]
    for number, held in states[1].items():
        assert states[0][number].keys() == held.keys()
        for what, x in held.items():
            if isinstance(x, torch.Tensor):
                torch.testing.assert_close(states[0][number][what], x, rtol=1e-5, atol=1e-6)


def no_fused_product(kwargs):
    for factor in ("alpha", "value"):
        assert kwargs.get(factor, 1) == 1, "a product and a sum at once"


@each_kind
def test_every_operation_is_rounded_by_itself(kind):
    parameters = weights()
    optimizer = KINDS[kind](parameters)
    make_portable(optimizer)
    for x in parameters:
        x.grad = torch.ones_like(x)
    with Operators(no_fused_product) as operators:
        optimizer.step()
        optimizer.step()
    assert operators.called <= ROUNDED_ALONE | MAKE_AND_CUT | COUNT | PROFILED


def test_a_checkpoint_of_torchs_goes_on_here_and_back():
    ours, theirs = weights(), weights()
    first, second = (KINDS["adamw"](each) for each in (ours, theirs))
    stepped(first, ours, 5)
    make_portable(second)
    second.load_state_dict(first.state_dict())
    assert is_portable(second)
    assert int(second.state[theirs[0]]["step"]) == 5
    stepped(second, theirs, 1)
    first.load_state_dict(second.state_dict())
    assert type(first) is torch.optim.AdamW


def test_a_tensor_of_several_pieces_steps_as_a_whole():
    values = torch.linspace(-1, 1, PIECE + 3)
    parts = [nn.Parameter(values.clone()), nn.Parameter(values[: PIECE + 1].clone())]
    optimizer = PortableAdamW(parts, lr=0.01)
    for x in parts:
        x.grad = torch.ones_like(x)
    optimizer.step()
    assert torch.equal(parts[0][: PIECE + 1], parts[1])
    assert not torch.equal(parts[0], values)


def test_options_of_torchs_own_are_left_to_torch():
    for options in ({"amsgrad": True}, {"maximize": True}):
        optimizer = torch.optim.AdamW(weights(), **options)
        make_portable(optimizer)
        assert type(optimizer) is torch.optim.AdamW
    dampened = torch.optim.SGD(weights(), momentum=0.9, dampening=0.1)
    make_portable(dampened)
    assert not is_portable(dampened)
    other = torch.optim.Adagrad(weights())
    make_portable(other)
    assert type(other) is torch.optim.Adagrad


@each_kind
@pytest.mark.parametrize("loaded", [False, True], ids=["new", "loaded"])
def test_hooks_are_called_once_a_step(kind, loaded):
    parameters, called = weights(), []
    optimizer = KINDS[kind](parameters)
    optimizer.register_step_pre_hook(lambda *given: called.append("before"))
    make_portable(optimizer)
    optimizer.register_step_post_hook(lambda *given: called.append("after"))
    if loaded:
        optimizer.load_state_dict(optimizer.state_dict())
    stepped(optimizer, parameters, 2)
    assert called == ["before", "after"] * 2


def test_a_closures_loss_is_returned():
    parameters = weights()
    assert PortableSGD(parameters, lr=0.1).step(lambda: 3.0) == 3.0


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_gradients_are_clipped_as_torch_clips(max_norm):
    ours = weights()
    for x in ours:
        x.grad = torch.arange(x.numel(), dtype=torch.float32).view(x.shape)
    theirs = copy.deepcopy(ours)
    for x, other in zip(ours, theirs, strict=True):
        other.grad = x.grad.clone()
    clip_norm_(ours, max_norm)
    clip_grad_norm_(theirs, max_norm)
    for x, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, other.grad)


def test_a_gradient_that_is_not_finite_spoils_all_as_torchs_does():
    ours = weights()
    for x in ours:
        x.grad = torch.ones_like(x)
    ours[0].grad[0, 0] = float("nan")
    clip_norm_([*ours, nn.Parameter(torch.zeros(1))], 1.0)
    assert all(bool(x.grad.isnan().all()) for x in ours)


def digest():
    """The bits that every processor must make of the same gradients."""
    made = hashlib.sha256()
    for kind in KINDS:
        parameters = weights()
        optimizer = KINDS[kind](parameters)
        make_portable(optimizer)
        stepped(optimizer, parameters, 3)
        for x in parameters:
            x.grad = x.detach().clone()
        clip_norm_(parameters, 0.3)
        for x in parameters:
            made.update(x.detach().numpy().tobytes() + x.grad.numpy().tobytes())
    return made.hexdigest()


@pytest.mark.net
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_processors_of_any_kind_make_the_same_bits(capability, same_bits):
    same_bits(capability, __file__, digest)


def test_a_device_makes_the_bits_of_the_cpu(accelerator):
    for kind in KINDS:
        here, there = weights(), [nn.Parameter(x.detach().to(accelerator)) for x in weights()]
        for parameters in (here, there):
            optimizer = KINDS[kind](parameters)
            make_portable(optimizer)
            stepped(optimizer, parameters)
            clip_norm_(parameters, 3.0)
            optimizer.step()
        for x, other in zip(here, there, strict=True):
            assert torch.equal(x, other.cpu()), kind
