"""NoLoCo: its invariants, its stability bound, and the identity that halves its bytes."""

import warnings

import pytest
import torch

from farflock.optimizers.method import Exchange, ExchangeKey, RandomGroups, Result
from farflock.optimizers.noloco import NoLoCo, stability_bound
from farflock.optimizers.parts.outer import OuterHeavyBall


def ones(value: float) -> torch.Tensor:
    return torch.full((6,), value)


def pairs(loopback, peers, **options):
    return loopback(lambda: NoLoCo(period=1, codec="fp32", **options), peers)


def test_alone_it_is_heavy_ball_on_the_own_pseudo_gradient(loopback):
    world = pairs(loopback, 1)
    phi, u = torch.zeros(6), torch.zeros(6)
    for _ in range(4):
        world.step(0, ones(0.5))
        sent = world.sync()[0].tensors["x"]
        phi, u = OuterHeavyBall(0.7, 0.5).step(phi, phi - sent, u)
        torch.testing.assert_close(world.phi(0), phi)


def test_without_momentum_and_with_full_rate_alone_it_is_the_inner_optimizer(loopback):
    world = pairs(loopback, 1, alpha=0.0, beta=1.0, gamma=1.0)
    for step in range(3):
        world.step(0, ones(0.5))
        world.sync()
        assert torch.equal(world.theta(0), ones(-0.5 * (step + 1)))


def test_equal_peers_stay_equal_bit_for_bit(loopback):
    world = pairs(loopback, 2)
    for _ in range(4):
        for peer in range(2):
            world.step(peer, ones(0.3))
        world.sync()
        assert torch.equal(world.phi(0), world.phi(1))


def test_without_gradients_the_mean_stays_and_the_spread_shrinks(loopback):
    world = pairs(loopback, 2)
    for peer, value in enumerate((1.0, -3.0)):
        state = {"phi.x": ones(value), "delta.x": ones(0.0), "round": torch.tensor(0)}
        world.methods[peer].restore(world.replicas[peer], state, "adopt")
    for _ in range(30):
        for peer in range(2):
            world.step(peer, ones(0.0))
        world.sync()
    torch.testing.assert_close((world.phi(0) + world.phi(1)) / 2, ones(-1.0), atol=1e-5, rtol=0)
    assert float((world.phi(0) - world.phi(1)).abs().max()) < 1e-3


def test_sending_theta_alone_equals_sending_both_vectors_where_gamma_is_beta(loopback):
    short, long = pairs(loopback, 2), pairs(loopback, 2, gamma=0.7 + 1e-12)
    assert "x" in short.methods[0].streams(short.replicas[0])[0].tensors
    assert set(long.methods[0].streams(long.replicas[0])[0].tensors) == {"delta.x", "phi.x"}
    for _ in range(3):
        for world in (short, long):
            for peer in range(2):
                world.step(peer, ones(0.2 * (peer + 1)))
            world.sync()
    torch.testing.assert_close(short.phi(0), long.phi(0))
    torch.testing.assert_close(short.phi(1), long.phi(1))


def test_a_round_goes_downhill_on_a_quadratic(loopback):
    world = pairs(loopback, 2)
    for peer in range(2):
        state = {"phi.x": ones(4.0), "delta.x": ones(0.0), "round": torch.tensor(0)}
        world.methods[peer].restore(world.replicas[peer], state, "adopt")
    for peer in range(2):
        world.step(peer, 0.1 * world.theta(peer))
    world.sync()
    assert float(world.phi(0).norm()) < float(ones(4.0).norm())


def test_a_failed_swap_changes_nothing(loopback):
    world = pairs(loopback, 2)
    for peer in range(2):
        world.step(peer, ones(1.0))
    world.sync(failed=[0])
    assert torch.equal(world.phi(0), ones(0.0))
    assert torch.equal(world.theta(0), ones(-1.0))


def test_steps_since_the_snapshot_are_kept(loopback):
    world = pairs(loopback, 1, alpha=0.0, beta=1.0, gamma=1.0)
    world.step(0, ones(1.0))
    exchange = world.due(0)[0]
    world.step(0, ones(0.5))
    taken = {"x": [(0, 6)]}
    result = Result(
        "ok", 1, ("a", "b"), (1.0, 1.0), mean={"x": ones(-3.0)}, sent=exchange.tensors, taken=taken
    )
    world.apply(0, exchange, result, steps_since=1)
    assert torch.equal(world.phi(0), ones(-3.0))
    assert torch.equal(world.theta(0), ones(-3.5))


def spread_after(alpha: float, gamma: float, peers: int = 64, rounds: int = 120) -> float:
    """The variance over random pairs without gradients, computed by the update itself, not by the
    class's check."""
    generator = torch.Generator().manual_seed(1)
    phi, delta = torch.randn(peers, generator=generator), torch.zeros(peers)
    for _ in range(rounds):
        order = torch.randperm(peers, generator=generator)
        mean = torch.empty(peers)
        left, right = order[::2], order[1::2]
        mean[left] = mean[right] = (phi[left] + phi[right]) / 2
        delta = alpha * delta - gamma * (phi - mean)
        phi = phi + delta
    return float(phi.var())


def test_the_released_default_blows_up_and_ours_draws_together():
    assert spread_after(0.9, 0.7) > 1e3
    assert spread_after(0.5, 0.7) < 1e-3


def test_outside_the_stable_region_it_refuses_and_names_the_bound():
    with pytest.raises(ValueError, match=r"0\.380"):
        NoLoCo(alpha=0.9, beta=0.7, gamma=0.7)
    assert stability_bound(0.5) == pytest.approx(1.5)
    assert stability_bound(0.9) == pytest.approx(0.38)


def test_near_the_bound_it_warns_and_elsewhere_not():
    with pytest.warns(UserWarning, match="10 %"):
        NoLoCo(gamma=1.45)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoLoCo(gamma=1.2)


def test_biased_codecs_are_refused():
    with pytest.raises(ValueError, match="biased"):
        NoLoCo(codec="topk:2/8")


def test_it_asks_for_pairs(loopback):
    world = pairs(loopback, 1)
    template = world.methods[0].streams(world.replicas[0])[0]
    assert template.group == RandomGroups(2)
    assert isinstance(template, Exchange)
    assert template.key == ExchangeKey("pairs", 0)
