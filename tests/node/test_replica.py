"""The law of `Replica` (optimizers/method.py) for a plain module, and what its slots promise besides."""

import pytest
import torch
from torch import nn

from farflock.node.replica import PlainReplica

MAKERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.5, weight_decay=0.0),
}
MOMENTS = {"sgd": (), "momentum": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq", "step")}

each_inner = pytest.mark.parametrize("inner", MAKERS)
each_type = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Tied(nn.Module):
    """A matrix used twice, a bias, a scalar, and a buffer that is no parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Parameter(torch.arange(12.0).reshape(4, 3) / 8)
        self.head = self.embed
        self.bias = nn.Parameter(torch.tensor([1.0, -2.0]))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("seen", torch.ones(3))


def build(inner="adamw", dtype=torch.float32, clip_norm=None):
    module = Tied().to(dtype)
    return module, PlainReplica(module, MAKERS[inner](module.parameters()), clip_norm)


def train(module, replica, steps=1, factor=1.0):
    for step in range(steps):
        loss = sum(((step + 1) * factor * parameter.float()).sum() for parameter in module.parameters())
        loss.backward()
        replica.inner_step()


def read(replica, what="param"):
    return replica.read(replica.names, what)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def whats(inner):
    return ("param", "grad", *MOMENTS[inner])


def test_names_and_shapes_are_the_parameters_in_the_modules_order_each_once():
    _, replica = build()
    assert replica.names == ("embed", "bias", "scale")
    assert list(replica.shapes.items()) == [("embed", (4, 3)), ("bias", (2,)), ("scale", ())]
    assert replica.shapes == build()[1].shapes


@each_inner
@each_type
def test_what_is_read_are_full_float32_copies_that_later_steps_do_not_change(inner, dtype):
    module, replica = build(inner, dtype)
    train(module, replica)
    module.embed.grad.fill_(3.0)
    copies = {what: read(replica, what) for what in whats(inner)}
    kept = {what: {name: x.clone() for name, x in tensors.items()} for what, tensors in copies.items()}
    for what, tensors in copies.items():
        assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in tensors.values())
        if what != "step":
            assert {name: tuple(x.shape) for name, x in tensors.items()} == replica.shapes
    train(module, replica, steps=2)
    assert all(equal(copies[what], kept[what]) for what in copies)
    assert not equal(read(replica), kept["param"])


@each_inner
def test_changing_what_was_read_does_not_change_the_model(inner):
    module, replica = build(inner)
    train(module, replica)
    before = read(replica)
    for what in whats(inner):
        for x in read(replica, what).values():
            x.fill_(9.0)
    assert equal(read(replica), before)
    assert not any(float(x.abs().max()) == 9.0 for what in whats(inner) for x in read(replica, what).values())


@each_inner
@each_type
def test_writing_what_was_read_changes_nothing(inner, dtype):
    module, replica = build(inner, dtype)
    train(module, replica, steps=2)
    module.bias.grad.fill_(0.25)
    before = {what: read(replica, what) for what in whats(inner)}
    for what in whats(inner):
        replica.write(read(replica, what), what)
    assert all(equal(read(replica, what), before[what]) for what in whats(inner))


@each_inner
def test_what_is_written_is_what_is_read(inner):
    _, replica = build(inner)
    for number, what in enumerate(whats(inner)):
        new = {name: torch.full_like(x, 2.0 + number) for name, x in read(replica, what).items()}
        replica.write(new, what)
        assert equal(read(replica, what), new)


@pytest.mark.parametrize("what", ["param", "grad", "exp_avg"])
def test_writing_with_a_mix_blends_old_and_new(what):
    _, replica = build()
    replica.write({"bias": torch.tensor([4.0, 8.0])}, what)
    replica.write({"bias": torch.tensor([8.0, 0.0])}, what, mix=0.25)
    assert replica.read(["bias"], what)["bias"].tolist() == [5.0, 6.0]


def test_writing_some_parameters_leaves_the_others():
    _, replica = build()
    before = read(replica)
    replica.write({"scale": torch.tensor(7.0)}, "param")
    assert equal(read(replica), {**before, "scale": torch.tensor(7.0)})


def test_a_tied_parameter_that_is_written_is_written_for_both_uses():
    module, replica = build()
    replica.write({"embed": torch.zeros(4, 3)}, "param")
    assert module.head is module.embed
    assert not module.head.any()


@each_inner
@each_type
def test_an_inner_step_leaves_gradients_zeroed(inner, dtype):
    module, replica = build(inner, dtype)
    train(module, replica)
    assert not any(bool(x.any()) for x in read(replica, "grad").values())


@each_inner
def test_what_was_never_there_reads_as_zeros(inner):
    _, replica = build(inner)
    for what in whats(inner)[1:]:
        assert not any(bool(x.any()) for x in read(replica, what).values())


def test_the_inner_step_is_the_optimizers_own():
    module, replica = build("adamw")
    twin = Tied()
    optimizer = MAKERS["adamw"](twin.parameters())
    for step in range(3):
        train(module, replica, factor=step + 1)
        sum(((step + 1) * parameter).sum() for parameter in twin.parameters()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(read(replica)[name], x.detach()) for name, x in twin.named_parameters())


def test_the_rate_of_the_call_goes_before_that_of_the_loop_and_that_before_the_optimizers():
    def moved(set_lr, lr):
        module, replica = build("sgd")
        replica.lr = set_lr
        before = read(replica)["scale"]
        module.scale.grad = torch.tensor(1.0)
        replica.inner_step(lr)
        return float(before - read(replica)["scale"])

    assert moved(None, None) == 0.5
    assert moved(0.25, None) == 0.25
    assert moved(0.25, 0.125) == 0.125


def test_gradients_are_clipped_to_the_norm_over_all_parameters():
    module, replica = build("sgd", clip_norm=1.0)
    before = read(replica)
    module.bias.grad, module.scale.grad = torch.tensor([0.0, 30.0]), torch.tensor(40.0)
    replica.inner_step(1.0)
    after = read(replica)
    assert float(before["bias"][1] - after["bias"][1]) == pytest.approx(0.6)
    assert float(before["scale"] - after["scale"]) == pytest.approx(0.8)


@pytest.mark.parametrize("inner", ["momentum", "adamw"])
def test_moments_written_before_the_first_step_are_used_by_it(inner):
    module, replica = build(inner)
    train(module, replica, steps=3)
    fresh_module, fresh = build(inner)
    for what in ("param", *MOMENTS[inner]):
        fresh.write(read(replica, what), what)
    train(module, replica)
    train(fresh_module, fresh)
    assert all(equal(read(fresh, what), read(replica, what)) for what in ("param", *MOMENTS[inner]))


@pytest.mark.parametrize("moment", ["exp_avg", "exp_avg_sq", "step"])
def test_one_moment_written_alone_leaves_an_optimizer_that_still_steps(moment):
    module, replica = build("adamw")
    replica.write({name: torch.ones_like(x) for name, x in read(replica, moment).items()}, moment)
    train(module, replica)
    assert all(bool(torch.isfinite(x).all()) for x in read(replica).values())
    assert [float(x) for x in read(replica, "step").values()] == [2.0 if moment == "step" else 1.0] * 3


def test_a_wrong_shape_is_refused_and_named():
    _, replica = build()
    with pytest.raises(ValueError, match=r"bias.*\(2,\).*\(3,\)"):
        replica.write({"bias": torch.zeros(3)}, "param")


def test_a_moment_that_the_optimizer_does_not_keep_takes_zeros_only():
    _, replica = build("sgd")
    replica.write({"bias": torch.zeros(2)}, "exp_avg")
    with pytest.raises(ValueError, match="keeps no exp_avg for bias"):
        replica.write({"bias": torch.ones(2)}, "exp_avg")
