"""Outer optimizers compared with torch's own, with slow twins, and bit for bit."""

import hashlib

import numpy as np
import pytest
import torch

from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD, scaled

OUTERS = {
    "sgd": OuterSGD(0.7),
    "nesterov": OuterNesterov(0.7, 0.9),
    "heavyball": OuterHeavyBall(0.7, 0.9),
}
each = pytest.mark.parametrize("name", OUTERS)


def deltas(count, size=257):
    """Pseudo-gradients made by integer arithmetic and one division, the same on every machine."""
    grid = torch.arange(count * size, dtype=torch.int64) * 7919 % 2003 - 1001
    return (grid.to(torch.float32) / 4096).reshape(count, size)


def run(outer, steps, phi=None, momentum=None):
    phi = deltas(1)[0] * 3 if phi is None else phi
    momentum = torch.zeros_like(phi) if momentum is None else momentum
    for delta in steps:
        phi, momentum = outer.step(phi, delta, momentum)
    return phi, momentum


LR, MU = np.float32(0.7), np.float32(0.9)


def twin(name, phi, momentum, delta, lr=LR, mu=MU):
    """One step of the definitions in NumPy float32, with each operation rounded by itself."""
    if name == "sgd":
        return phi - lr * delta, momentum
    u = mu * momentum + delta
    return (phi - lr * u if name == "heavyball" else phi - lr * (delta + mu * u)), u


@each
def test_a_step_is_bit_equal_to_its_slow_twin(name):
    phi, momentum = run(OUTERS[name], deltas(5))
    slow = (deltas(1)[0] * 3).numpy(), np.zeros(257, np.float32)
    for delta in deltas(5).numpy():
        slow = twin(name, *slow, delta)
    assert np.array_equal(phi.numpy(), slow[0])
    assert np.array_equal(momentum.numpy(), slow[1])


@pytest.mark.parametrize(
    ("outer", "options"),
    [
        (OuterSGD(0.7), {}),
        (OuterNesterov(0.7, 0.9), {"momentum": 0.9, "nesterov": True}),
        (OuterHeavyBall(0.7, 0.9), {"momentum": 0.9}),
    ],
)
def test_twenty_steps_follow_torch_sgd(outer, options):
    reference = torch.nn.Parameter(deltas(1)[0] * 3)
    optimizer = torch.optim.SGD([reference], lr=0.7, **options)
    for delta in deltas(20):
        reference.grad = delta.clone()
        optimizer.step()
    phi, _ = run(outer, deltas(20))
    torch.testing.assert_close(phi, reference.detach(), rtol=1e-5, atol=1e-6)


def test_nesterovs_first_step_overshoots_the_average_and_heavy_balls_does_not():
    one = torch.ones(1)
    assert OuterNesterov(0.7, 0.9).step(one, one, torch.zeros(1))[0].item() == pytest.approx(
        1 - 0.7 * 1.9
    )
    assert OuterHeavyBall(0.7, 0.9).step(one, one, torch.zeros(1))[0].item() == pytest.approx(
        1 - 0.7
    )


def test_under_a_constant_pseudo_gradient_steps_grow_as_a_geometric_sum():
    phi, momentum, sizes = torch.zeros(1), torch.zeros(1), []
    for _ in range(200):
        new, momentum = OuterNesterov(0.7, 0.9).step(phi, torch.ones(1), momentum)
        sizes.append((phi - new).item())
        phi = new
    assert sizes[:3] == pytest.approx([0.7 * 1.9, 0.7 * 2.71, 0.7 * 3.439], rel=1e-5)
    assert sizes[-1] == pytest.approx(7, rel=1e-3)


@each
def test_nothing_moves_without_pseudo_gradient_and_momentum(name):
    phi, zeros = deltas(1)[0], torch.zeros(257)
    new, momentum = OUTERS[name].step(phi, zeros, zeros)
    assert torch.equal(new, phi)
    assert torch.equal(momentum, zeros)


@each
def test_a_step_changes_none_of_its_inputs(name):
    inputs = [deltas(3)[i].clone() for i in range(3)]
    OUTERS[name].step(*inputs)
    assert all(torch.equal(tensor, kept) for tensor, kept in zip(inputs, deltas(3), strict=True))


@each
def test_the_bits_of_three_steps_are_those_of_the_golden_file(name, golden):
    actual = {kind: _bits(outer) for kind, outer in OUTERS.items()}
    assert golden("outer", actual)[name] == actual[name]


def _bits(outer):
    phi, momentum = run(outer, deltas(3, 9), phi=deltas(1, 9)[0] * 3)
    return {"phi": phi.view(torch.int32).tolist(), "momentum": momentum.view(torch.int32).tolist()}


def digest():
    """One hash over all outer steps at sizes that vector loops take in bulk and at their tails;
    run by a subprocess too."""
    found = hashlib.sha256()
    for outer in OUTERS.values():
        for size in (1, 7, 257, 4099):
            for tensor in run(outer, deltas(4, size), phi=deltas(1, size)[0] * 3):
                found.update(tensor.numpy().tobytes())
    return found.hexdigest()


@pytest.mark.net
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_processors_of_any_kind_make_the_same_bits(capability, same_bits):
    same_bits(capability, __file__, digest)


def test_a_factor_is_rounded_to_float32_before_it_multiplies():
    x = deltas(1)[0]
    assert np.array_equal(scaled(x, 0.1).numpy(), x.numpy() * np.float32(0.1))


@pytest.mark.parametrize("lr", [0, -1, 11, float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [OuterSGD, OuterNesterov, OuterHeavyBall])
def test_a_senseless_rate_is_refused_with_its_value(kind, lr):
    with pytest.raises(ValueError, match=rf"rate of {lr}"):
        kind(lr)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("kind", [OuterNesterov, OuterHeavyBall])
def test_a_momentum_that_never_forgets_is_refused(kind, momentum):
    with pytest.raises(ValueError, match=f"momentum of {momentum}"):
        kind(0.7, momentum)
