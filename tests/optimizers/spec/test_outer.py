"""Outer steps compared with torch's own optimizer and with slow twins."""

import numpy as np
import pytest
import torch

from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD


def gradients(steps: int):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(17, generator=generator) for _ in range(steps)]


def test_nesterov_is_torchs():
    weight = torch.nn.Parameter(torch.zeros(17))
    theirs = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    phi, u = torch.zeros(17), torch.zeros(17)
    for gradient in gradients(6):
        weight.grad = gradient.clone()
        theirs.step()
        phi, u = OuterNesterov(0.7, 0.9).step(phi, gradient, u)
        torch.testing.assert_close(phi, weight.detach())


@pytest.mark.parametrize(
    "outer", [OuterSGD(0.5), OuterHeavyBall(0.7, 0.9), OuterNesterov(0.3, 0.5)]
)
def test_each_outer_equals_its_slow_twin(outer):
    phi, u = torch.ones(17), torch.zeros(17)
    slow_phi, slow_u = np.ones(17), np.zeros(17)
    mu = getattr(outer, "momentum", 0.0)
    for gradient in gradients(5):
        phi, u = outer.step(phi, gradient, u)
        slow_u = mu * slow_u + gradient.numpy().astype(np.float64)
        ahead = gradient.numpy() + mu * slow_u if isinstance(outer, OuterNesterov) else slow_u
        slow_phi = slow_phi - outer.lr * ahead
    np.testing.assert_allclose(phi.numpy(), slow_phi, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outer", [OuterSGD(), OuterNesterov(), OuterHeavyBall()])
def test_zero_gradient_and_zero_momentum_leave_everything_as_it_is(outer):
    phi, u = outer.step(torch.ones(4), torch.zeros(4), torch.zeros(4))
    assert torch.equal(phi, torch.ones(4))
    assert torch.equal(u, torch.zeros(4))


def test_constant_gradients_give_the_step_sizes_of_the_paper():
    """lr(1+mu), lr(1+mu+mu²), … towards lr/(1-mu)."""
    phi, u, sizes = torch.zeros(1), torch.zeros(1), []
    for _ in range(200):
        new, u = OuterNesterov(0.7, 0.9).step(phi, torch.ones(1), u)
        sizes.append(float(phi - new))
        phi = new
    assert sizes[0] == pytest.approx(0.7 * 1.9)
    assert sizes[1] == pytest.approx(0.7 * 2.71)
    assert sizes[-1] == pytest.approx(7.0, rel=1e-3)


@pytest.mark.parametrize(
    "make", [lambda: OuterSGD(0.0), lambda: OuterNesterov(0.7, 1.0), lambda: OuterHeavyBall(-1.0)]
)
def test_senseless_values_are_refused(make):
    with pytest.raises(ValueError, match="choose"):
        make()
