"""AdamW with moments of fewer bytes: torch's step, and nearly its training."""

import pytest
import torch
from torch import nn

from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.packed_moment import PackedMoment
from farflock.optimizers.parts.small_adamw import SmallAdamW, to_bf16

KINDS = ("bf16", "int8")
CONFIG = InnerConfig(lr=3e-3)


def net():
    """Return a net whose matrices are large enough to be packed, with some that are not."""
    layers = [nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.LayerNorm(64)]
    made, generator = nn.Sequential(*layers), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) / 8)
    return made


def batch(number):
    """Return inputs, some of them large or always near zero, and what is to be learned of them."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(number))
    x = x * torch.logspace(-2, 1, 64)
    return x, torch.sin(x.roll(1, 1)) + x.flip(1).tanh()


def trained(optimizer_of, steps=300):
    module = net()
    optimizer, losses = optimizer_of(module), []
    for number in range(steps):
        x, wanted = batch(number)
        loss = (module(x) - wanted).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return module, optimizer, losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_step_is_torchs_bit_for_bit(kind):
    (plain, _, _), (ours, _, _) = (
        trained(lambda module, kind=kind: CONFIG.build(module, moments=kind), steps=1)
        for kind in ("fp32", kind)
    )
    for x, y in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(x, y)


def test_moments_in_float32_make_every_step_torchs():
    plain, _, _ = trained(CONFIG.build, steps=20)
    ours, _, _ = trained(
        lambda module: SmallAdamW(
            CONFIG.build(module).param_groups, CONFIG.lr, CONFIG.betas, CONFIG.eps, "fp32"
        ),
        steps=20,
    )
    for x, y in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_it_gains_what_float32_moments_gain(betas):
    config, gains = InnerConfig(lr=3e-3, betas=betas), {}
    for kind in ("fp32", *KINDS):
        _, _, losses = trained(lambda module, kind=kind: config.build(module, moments=kind), 200)
        gains[kind] = losses[0] - sum(losses[-20:]) / 20
    assert gains["fp32"] > 0.3 * losses[0]
    assert gains["bf16"] == pytest.approx(gains["fp32"], rel=0.01)
    assert gains["int8"] == pytest.approx(gains["fp32"], rel=0.02)


def test_large_tensors_have_small_moments_and_small_ones_float32():
    for kind, size in (("bf16", 2), ("int8", 1 + 4 / 256)):
        _, optimizer, _ = trained(lambda module, kind=kind: CONFIG.build(module, moments=kind), 1)
        for parameter, state in optimizer.state.items():
            wanted = size if parameter.dim() == 2 else 4
            for what in ("exp_avg", "exp_avg_sq"):
                assert state[what].nbytes == wanted * parameter.numel()
                assert isinstance(state[what], PackedMoment) == (wanted < 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_pieces_is_the_step(kind, monkeypatch):
    def stepped():
        module = nn.Linear(300, 500, bias=False)
        nn.init.constant_(module.weight, 0.5)
        optimizer = CONFIG.build(module, moments=kind)
        for number in range(3):
            generator = torch.Generator().manual_seed(number)
            module.weight.grad = torch.randn(500, 300, generator=generator)
            optimizer.step()
        return module.weight

    whole = stepped()
    monkeypatch.setattr("farflock.optimizers.parts.small_adamw.PIECE", 65_536)
    assert torch.equal(stepped(), whole)


def test_a_frozen_parameter_keeps_its_value_and_a_rate_of_zero_changes_none():
    module = net()
    before = [x.detach().clone() for x in module.parameters()]
    module[0].weight.requires_grad_(False)
    optimizer = CONFIG.build(module, moments="int8")
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    x, wanted = batch(0)
    (module(x) - wanted).square().mean().backward()
    optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(before, module.parameters(), strict=True))
    assert module[0].weight not in optimizer.state


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite_shows_in_the_weights(kind):
    module = net()
    optimizer = CONFIG.build(module, moments=kind)
    for bad in (float("nan"), 1.0):
        for weight in module.parameters():
            weight.grad = torch.full_like(weight, bad)
        optimizer.step()
    assert not any(bool(weight.isfinite().any()) for weight in module.parameters())


def test_bf16_values_are_right_on_average():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    mean = sum(to_bf16(x, turn).double() for turn in range(256)) / 256
    assert ((mean - x) / x).abs().max() < 1e-4
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0])
    torch.testing.assert_close(to_bf16(odd, 3).float(), odd, equal_nan=True)


@pytest.mark.parametrize("name", ["sgd", "muon", "nadam"])
def test_another_optimizer_has_no_such_moments(name):
    with pytest.raises(ValueError, match=f"moments of {name} are float32, not int8"):
        InnerConfig(name).build(net(), moments="int8")
