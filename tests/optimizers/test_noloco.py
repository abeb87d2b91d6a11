"""NoLoCo by the class alone: its stability region, and results that only pairs have."""

import random
import warnings

import pytest
import torch

from farflock.optimizers.method import Progress, Result
from farflock.optimizers.noloco import NoLoCo, stability_bound


def swarm_spread(vectors, alpha, gamma, peers=64, rounds=80):
    """Return the variance of phi over M peers in random pairs without gradients, at first and at
    last, and the drift of their mean.

    The constructor's check is bypassed: the values are set afterwards.
    """
    chance = random.Random(5)
    generator = torch.Generator().manual_seed(5)
    swarm = []
    for _ in range(peers):
        made = NoLoCo(period=1, codec="fp32")
        made.alpha, made.beta, made.gamma = alpha, gamma, gamma
        swarm.append((made, vectors(x=torch.randn(3, generator=generator))))

    def phis():
        return torch.stack([made.eval_params(replica)["x"] for made, replica in swarm]).double()

    before = phis()
    for number in range(rounds):
        order = chance.sample(range(peers), peers)
        for pair in zip(order[::2], order[1::2], strict=True):
            asked = []
            for index in pair:
                made, replica = swarm[index]
                made.local_step(replica, Progress(number))
                asked += made.due(replica, Progress(number + 1))
            mean = {"x": (asked[0].tensors["x"] + asked[1].tensors["x"]) / 2}
            for index, exchange in zip(pair, asked, strict=True):
                made, replica = swarm[index]
                sent, taken = exchange.tensors, {"x": [(0, 3)]}
                made.apply(
                    replica,
                    exchange,
                    Result("ok", number + 1, ("p", "q"), (1, 1), mean, None, sent, taken),
                )
    after = phis()
    drift = float((after.mean(dim=0) - before.mean(dim=0)).abs().max())
    return float(before.var(dim=0).sum()), float(after.var(dim=0).sum()), drift


def test_the_released_codes_default_pair_of_values_blows_up_at_64_peers(vectors):
    before, after, _ = swarm_spread(vectors, 0.9, 0.7)
    assert after > 100 * before


def test_our_default_pair_of_values_contracts_at_64_peers_and_keeps_the_mean(vectors):
    before, after, drift = swarm_spread(vectors, 0.5, 0.7)
    assert after < 1e-6 * before
    assert drift < 1e-6


@pytest.mark.parametrize(("alpha", "bound"), [(0.0, 2.0), (0.5, 1.5), (0.7, 1.02), (0.9, 0.38)])
def test_the_bound_for_pairs_is_two_times_one_minus_alpha_squared(alpha, bound):
    assert stability_bound(alpha) == pytest.approx(bound)


def test_the_bound_grows_with_the_group():
    assert stability_bound(0.5, 4) == pytest.approx(2 * 0.75 / 0.75)
    assert stability_bound(0.9, 8) > stability_bound(0.9, 4) > stability_bound(0.9, 2)


@pytest.mark.parametrize(
    ("alpha", "gamma", "bound"),
    [(0.9, 0.7, "0.380"), (0.5, 1.5, "1.500"), (0.5, 0.0, "1.500"), (0.7, 1.58, "1.020")],
)
def test_values_outside_the_region_are_refused_with_the_bound(alpha, gamma, bound):
    with pytest.raises(ValueError, match=rf"gamma={gamma} lies outside \(0, {bound}\)"):
        NoLoCo(alpha=alpha, gamma=gamma)


def test_within_ten_percent_of_the_bound_it_warns_the_caller_and_farther_away_it_does_not():
    with pytest.warns(
        UserWarning, match=r"gamma=1.4 is within 10 % of the stability bound 1.500"
    ) as caught:
        NoLoCo(alpha=0.5, gamma=1.4)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoLoCo(alpha=0.5, gamma=1.34)


def due_after(made, replica, gradient):
    replica.add_gradient(x=gradient)
    made.local_step(replica, Progress(0))
    (exchange,) = made.due(replica, Progress(1))
    return exchange


def test_the_update_is_that_of_the_paper_with_two_vectors(vectors):
    """d <- a·d - b·mean(D) - g·(phi - mean phi), computed alongside in float64."""
    made, replica = (
        NoLoCo(period=1, alpha=0.5, beta=0.7, gamma=0.6, codec="fp32"),
        vectors(x=torch.tensor([2.0, -1.0])),
    )
    phi, delta = torch.tensor([2.0, -1.0]).double(), torch.zeros(2).double()
    for number in range(4):
        exchange = due_after(made, replica, torch.tensor([0.5, 0.25]))
        assert exchange.tensors["phi.x"].tolist() == made.eval_params(replica)["x"].tolist()
        mean = {"delta.x": torch.tensor([0.3, 0.1 * number]), "phi.x": torch.tensor([1.0, 1.0])}
        taken = {name: [(0, 2)] for name in mean}
        made.apply(
            replica,
            exchange,
            Result("ok", number + 1, ("a", "b"), (1, 1), mean, None, exchange.tensors, taken),
        )
        delta = 0.5 * delta - 0.7 * mean["delta.x"].double() - 0.6 * (phi - mean["phi.x"].double())
        phi = phi + delta
        torch.testing.assert_close(
            made.eval_params(replica)["x"].double(), phi, rtol=1e-6, atol=1e-6
        )
        assert torch.equal(replica.read(["x"], "param")["x"], made.eval_params(replica)["x"])


def test_alone_there_is_no_pull_even_if_the_codec_bent_phi(vectors):
    made, replica = (
        NoLoCo(period=1, beta=0.7, gamma=0.6, codec="fp32"),
        vectors(x=torch.tensor([2.0])),
    )
    exchange = due_after(made, replica, torch.tensor([0.5]))
    bent = {"delta.x": exchange.tensors["delta.x"], "phi.x": torch.tensor([2.5])}
    taken = {name: [(0, 1)] for name in bent}
    made.apply(replica, exchange, Result("alone", 1, ("me",), (1.0,), bent, None, bent, taken))
    assert made.eval_params(replica)["x"].item() == pytest.approx(2.0 - 0.7 * 0.5)


@pytest.mark.parametrize("gamma", [0.7, 0.6])
def test_where_nothing_was_taken_local_work_stays(vectors, gamma):
    made, replica = NoLoCo(period=1, gamma=gamma, codec="fp32"), vectors(x=torch.zeros(4))
    exchange = due_after(made, replica, torch.ones(4))
    taken = {name: [(0, 2)] for name in exchange.tensors if name != "phi.x"}
    result = Result("partial", 1, ("me",), (1.0,), exchange.tensors, None, exchange.tensors, taken)
    made.apply(replica, exchange, result)
    theta, phi = replica.read(["x"], "param")["x"], made.eval_params(replica)["x"]
    assert torch.equal(theta[:2], phi[:2])
    assert theta[2:].tolist() == [-1.0, -1.0]


def test_momentum_is_part_of_a_snapshot_so_that_a_resumed_peer_goes_on_as_before(vectors):
    made, replica = NoLoCo(period=1, codec="fp32"), vectors(x=torch.zeros(1))
    exchange = due_after(made, replica, torch.ones(1))
    result = Result(
        "alone", 1, ("me",), (1.0,), exchange.tensors, None, exchange.tensors, {"x": [(0, 1)]}
    )
    made.apply(replica, exchange, result)
    assert made.snapshot(replica)["delta.x"].item() == pytest.approx(-0.7)


def test_the_default_sends_one_vector_and_another_gamma_two(vectors):
    replica = vectors(x=torch.zeros(3))
    assert list(NoLoCo().streams(replica)[0].tensors) == ["x"]
    assert list(NoLoCo(gamma=0.6).streams(replica)[0].tensors) == ["delta.x", "phi.x"]
