"""Swarms of EDiT: the invariants of its specification (section 11.7), a slow reference
implementation, and peers that miss one of the two phases."""

import math

import numpy as np
import pytest
import torch

from farflock.optimizers.contrib.edit import DELTA, NORMS, ONLOOKER, EDiT
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.parts.outer import OuterNesterov, OuterSGD

EXACT = {"codec": "fp32", "return_codec": "fp32"}
OFF = {"temperature": None, "threshold": None, "clip": None}
LAYERS = ("weight", "bias")


def edit(**options):
    return lambda: EDiT(**{"period": 3, "warmup": 4, **EXACT, **options})


def averaging(**options):
    return edit(**{"outer": OuterSGD(1.0), **options})


def outer_of(peer):
    """phi and momentum, which DiLoCo has too."""
    return {name: x for name, x in peer.outer().items() if name.startswith(("phi.", "momentum."))}


def spikes(at, of="a", size=64.0):
    """Make the noise `size` times as large in the steps `at` of one peer."""

    def gradient(peer, step, name, theta, noise):
        made = noise(peer, step, name, theta)
        return made * size if peer == of and step in at else made

    return gradient


def gradient_with(spike, noise):
    return lambda peer, step, name, theta: spike(peer, step, name, theta, noise)


def none_of(*missing):
    """A loopback's `taken`: nothing of the (peer, round) pairs in `missing`, all of the others."""
    return lambda peer, number: lambda what, n: [] if (peer, number) in missing else [(0, n)]


# the invariants


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_without_penalties_it_is_diloco_bit_for_bit(loopback, same, size):
    peers = "abcdefg"[:size]
    ours = loopback(edit(**OFF), peers, inner="adamw", lr=0.01)
    theirs = loopback(
        lambda: DiLoCo(3, OuterNesterov(0.7, 0.8), **EXACT), peers, inner="adamw", lr=0.01
    )
    for swarm in (ours, theirs):
        swarm.steps(17)
    for name in peers:
        assert same(outer_of(ours.peers[name]), outer_of(theirs.peers[name]))
        assert same(ours.peers[name].theta(), theirs.peers[name].theta())


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_with_equal_norms_it_is_diloco_bit_for_bit(loopback, gradients, same, size):
    peers = "abcdefg"[:size]
    ours = loopback(edit(threshold=None, clip=None), peers, gradient=gradients["shared"])
    theirs = loopback(
        lambda: DiLoCo(3, OuterNesterov(0.7, 0.8), **EXACT), peers, gradient=gradients["shared"]
    )
    for swarm in (ours, theirs):
        swarm.steps(17)
    assert same(outer_of(ours.peers["a"]), outer_of(theirs.peers["a"]))


def test_an_anomalous_peer_has_no_weight_and_takes_what_the_others_made(loopback, gradients, same):
    spike = gradient_with(spikes(at=range(18, 21)), gradients["noise"])
    spoilt = loopback(averaging(clip=None), "abc", gradient=spike)
    spoilt.steps(18)
    before = {name: x.clone() for name, x in outer_of(spoilt.peers["a"]).items()}
    spoilt.steps(3)
    (_, delta) = spoilt.peers["a"].offered[-1]
    assert delta.key.stream == DELTA
    assert not any(bool(x.any()) for x in delta.tensors.values())
    after = outer_of(spoilt.peers["a"])
    assert all(float((after[name] - before[name]).abs().max()) < 4 for name in after)
    assert same(
        spoilt.peers["a"].theta(),
        dict(spoilt.peers["b"].method.eval_params(spoilt.peers["b"].replica)),
    )


@pytest.mark.parametrize("clip", [0.05, 1.0])
def test_no_layer_moves_farther_than_the_clip(loopback, clip):
    swarm = loopback(averaging(clip=clip), "abc")
    before = swarm.peers["a"].outer()
    farthest = 0.0
    for _ in range(6):
        swarm.steps(3)
        after = swarm.peers["a"].outer()
        moves = [
            float((after[f"phi.{layer}"].double() - before[f"phi.{layer}"].double()).norm())
            for layer in LAYERS
        ]
        assert max(moves) <= clip * (1 + 1e-5)
        farthest, before = max(farthest, *moves), after
    assert farthest > clip * 0.9 or clip == 1.0


def test_the_names_of_peers_change_nothing(loopback):
    """Permuting the peers permutes what they send; sums are taken in another order, so only
    rounding may differ."""
    renamed = dict(zip("abcd", "cadb", strict=True))

    def moved(noise):
        return lambda peer, step, name, theta: noise(renamed[peer], step, name, theta)

    one = loopback(edit(), "abcd")
    other = loopback(edit(), "abcd", gradient=moved(one.gradient))
    for swarm in (one, other):
        swarm.steps(18)
    ours, theirs = one.peers["a"].outer(), other.peers["a"].outer()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5)


def test_where_all_are_anomalous_phi_stays_and_all_begin_there_again(loopback, gradients, same):
    def all_spike(peer, step, name, theta):
        made = gradients["noise"](peer, step, name, theta)
        return made * 64 if step >= 15 and name == "weight" else made

    swarm = loopback(edit(), "abc", gradient=all_spike)
    swarm.steps(15)
    before = outer_of(swarm.peers["a"])
    swarm.steps(3)
    for peer in swarm.peers.values():
        after = outer_of(peer)
        assert same({"x": after["phi.weight"]}, {"x": before["phi.weight"]})
        assert same({"x": after["momentum.weight"]}, {"x": before["momentum.weight"]})
        assert not torch.equal(after["phi.bias"], before["phi.bias"])
        assert torch.equal(peer.theta()["weight"], before["phi.weight"])


# the slow twin


class Twin:
    """Section 11.2 in float64 NumPy, one peer and one layer at a time, with plain SGD steps of
    rate 1."""

    def __init__(
        self, peers, start, *, lr=0.7, mu=0.8, clip=10.0, threshold=3.0, warmup=4, alpha=0.02
    ):
        self.phi = {layer: start[layer].double().numpy().copy() for layer in LAYERS}
        self.theta = {peer: {layer: x.copy() for layer, x in self.phi.items()} for peer in peers}
        self.u = {layer: np.zeros_like(x) for layer, x in self.phi.items()}
        self.options = lr, mu, clip, threshold, warmup, alpha
        self.mean, self.var, self.z_mean, self.z_var = ({} for _ in range(4))
        self.rounds, self.rejected = 0, []

    def sync(self):
        lr, mu, clip, *_ = self.options
        for layer in LAYERS:
            work = {peer: self.phi[layer] - theta[layer] for peer, theta in self.theta.items()}
            norm = {peer: math.sqrt((x**2).sum()) for peer, x in work.items()}
            bad = self.judge(layer, norm)
            good = [peer for peer in work if peer not in bad]
            if good:
                weight = {peer: math.exp(min(norm[p] for p in good) - norm[peer]) for peer in good}
                mean = sum(weight[peer] * work[peer] for peer in good) / sum(weight.values())
                mean = mean * min(1.0, clip / (math.sqrt((mean**2).sum()) + 1e-6))
                self.u[layer] = mu * self.u[layer] + mean
                self.phi[layer] = self.phi[layer] - lr * (mean + mu * self.u[layer])
            for theta in self.theta.values():
                theta[layer] = self.phi[layer].copy()
        self.rounds += 1

    def judge(self, layer, norm):
        *_, threshold, warmup, alpha = self.options
        if self.rounds == 0:
            values = list(norm.values())
            self.mean[layer], self.var[layer] = np.mean(values), np.var(values)
            self.z_mean[layer] = self.z_var[layer] = 0.0
            return []
        sigma, warm = math.sqrt(self.var[layer]), self.rounds >= warmup
        limit = threshold * max(1.0, math.sqrt(self.z_var[layer])) if warm else math.inf
        z = {peer: (x - self.mean[layer]) / sigma if warm else 0.0 for peer, x in norm.items()}
        bad = [peer for peer in norm if z[peer] > limit]
        entering = [
            self.mean[layer] + limit * sigma if peer in bad else x for peer, x in norm.items()
        ]
        self.mean[layer], self.var[layer] = moved(
            entering, self.mean[layer], self.var[layer], alpha
        )
        scores = [min(x, limit) for x in z.values()]
        self.z_mean[layer], self.z_var[layer] = moved(
            scores, self.z_mean[layer], self.z_var[layer], alpha
        )
        self.rejected += [(self.rounds, layer, peer) for peer in bad]
        return bad


def moved(values, mean, var, alpha):
    """d <- G - mu; mu <- mu + alpha·d; d' <- G - mu; var <- (1 - alpha)(var + alpha·d·d'),
    averaged over the peers."""
    d = [x - mean for x in values]
    mean = mean + alpha * np.mean(d)
    d_after = [x - mean for x in values]
    return mean, (1 - alpha) * (
        var + alpha * np.mean([x * y for x, y in zip(d, d_after, strict=True)])
    )


@pytest.mark.parametrize("clip", [10.0, 0.5])
def test_many_rounds_with_outliers_follow_the_slow_twin(loopback, gradients, clip):
    spiky = gradient_with(spikes(at=(21, 22, 40), of="c", size=24.0), gradients["noise"])
    swarm = loopback(edit(clip=clip), "abcd", gradient=spiky)
    twin = Twin("abcd", swarm.peers["a"].theta(), clip=clip)
    for step in range(60):
        for peer, theta in twin.theta.items():
            for layer in LAYERS:
                theta[layer] -= (
                    swarm.gradient(peer, step, layer, torch.zeros(theta[layer].shape))
                    .double()
                    .numpy()
                )
        swarm.steps(1)
        if step % 3 == 2:
            twin.sync()
            outer = swarm.peers["b"].outer()
            for layer in LAYERS:
                np.testing.assert_allclose(
                    outer[f"phi.{layer}"].numpy(), twin.phi[layer], rtol=1e-4, atol=2e-5
                )
                np.testing.assert_allclose(
                    outer[f"momentum.{layer}"].numpy(), twin.u[layer], rtol=1e-4, atol=2e-5
                )
    assert {(7, "weight", "c"), (13, "bias", "c")} <= set(twin.rejected)


# one phase missed


def test_a_peer_that_misses_the_norms_counts_as_absent_and_keeps_its_work(loopback, same):
    missed, without = loopback(averaging(), "abc"), loopback(averaging(), "ab")
    missed.struck, missed.taken = {NORMS}, none_of(("c", 0))
    for swarm in (missed, without):
        swarm.steps(3)
    c = missed.peers["c"]
    torch.testing.assert_close(c.outer()["phi.weight"], without.peers["a"].outer()["phi.weight"])
    start = missed.build("c").theta()
    work = sum(missed.gradient("c", step, "weight", start["weight"]) for step in range(3))
    assert torch.equal(c.theta()["weight"], start["weight"] - work)
    assert [(e.key.stream, e.weight) for _, e in c.offered] == [(NORMS, 1.0), (DELTA, ONLOOKER)]
    missed.steps(3)
    assert c.offered[2][1].tensors["steps"].tolist() == [6.0]


def test_a_peer_that_misses_the_mean_is_divided_out_and_keeps_its_work(loopback):
    swarm = loopback(averaging(clip=None), "abc")
    swarm.struck, swarm.taken = {DELTA}, none_of(("c", 0))
    start = swarm.peers["a"].theta()
    swarm.steps(3)
    weights, work = {}, {}
    for name in "abc":
        total = (
            sum(swarm.gradient(name, step, "weight", start["weight"]) for step in range(3))
            .double()
            .numpy()
        )
        weights[name], work[name] = math.exp(-math.sqrt((total**2).sum())), total
    expected = (weights["a"] * work["a"] + weights["b"] * work["b"]) / (weights["a"] + weights["b"])
    found = (
        start["weight"].double().numpy() - swarm.peers["c"].outer()["phi.weight"].double().numpy()
    )
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(
        swarm.peers["c"].theta()["weight"].double().numpy(),
        start["weight"].double().numpy() - work["c"],
        atol=1e-6,
    )


@pytest.mark.parametrize("stream", [NORMS, DELTA])
def test_one_phase_that_fails_stops_no_peer(loopback, same, stream):
    swarm = loopback(edit(), "abc")
    swarm.struck, swarm.fails = {stream}, lambda number: number == 1
    swarm.steps(12)
    outers = [peer.outer() for peer in swarm.peers.values()]
    assert all(same(outers[0], other) for other in outers)
    assert int(outers[0]["round"]) == int(outers[0]["delta_round"]) == 4
    assert int(outers[0]["seen"]) == (3 if stream == NORMS else 4)


def test_a_late_mean_keeps_the_steps_made_since_the_norms_were_taken(loopback, same):
    swarm = loopback(averaging(), "ab")
    swarm.late = lambda peer, number: 1 if (peer, number) == ("b", 0) else 0
    swarm.steps(5)
    b = swarm.peers["b"]
    assert [result.steps_since for result in b.results] == [1, 1]
    start = swarm.build("b").theta()
    since = sum(swarm.gradient("b", step, "weight", start["weight"]) for step in (3, 4))
    torch.testing.assert_close(b.theta()["weight"], b.outer()["phi.weight"] - since)


def test_a_joiner_has_the_veterans_statistics_and_decides_alike(loopback, same):
    swarm = loopback(edit(), "ab")
    swarm.steps(15)
    swarm.join("c", "a")
    swarm.steps(9)
    assert same(swarm.peers["c"].outer(), swarm.peers["a"].outer())
    assert all("c" in result.participants for result in swarm.peers["c"].results)


def test_the_first_phase_sends_one_number_a_layer_and_the_steps(loopback):
    swarm = loopback(edit(), "ab")
    norms, delta = swarm.peers["a"].method.streams(swarm.peers["a"].replica)
    assert sum(x.numel() for x in norms.tensors.values()) == len(LAYERS) + 1
    assert sum(x.numel() for x in delta.tensors.values()) == 22


# timed rounds


def test_timed_rounds_let_each_machine_do_what_it_can(loopback, same):
    swarm = loopback(edit(round_s=8.0, step_ratio=0.5), "abc")
    swarm.rests = lambda peer, tick: (
        (peer == "b" and tick % 2 == 0) or (peer == "c" and tick % 4 != 3)
    )
    swarm.steps(40)
    steps = {
        name: [e.tensors["steps"].item() for _, e in peer.offered if e.key.stream == NORMS]
        for name, peer in swarm.peers.items()
    }
    assert steps == {"a": [8.0] * 5, "b": [4.0] * 5, "c": [2.0] * 5}
    assert all(result.status == "ok" for peer in swarm.peers.values() for result in peer.results)
    assert same(swarm.peers["a"].outer(), swarm.peers["c"].outer())
