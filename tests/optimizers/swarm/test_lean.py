"""Lean averaging in a swarm of three, with partial and failed rounds, compared with a slow twin in
NumPy."""

import numpy as np
import pytest

from farflock.optimizers.lean import Lean

BETAS, EPS = (0.9, 0.95), 1e-8


class Twin:
    """Peers in float64, from the equations alone: AdamW, one phi, and each peer's theta and
    moments. The decoded messages and means are taken from the swarm, because a value near a
    threshold of the codec may fall to either side."""

    def __init__(self, start, peers, **options):
        self.phi = {name: x.double().numpy().copy() for name, x in start.items()}
        self.theta = {peer: {name: x.copy() for name, x in self.phi.items()} for peer in peers}
        self.m = {peer: {name: 0 * x for name, x in self.phi.items()} for peer in peers}
        self.v = {peer: {name: 0 * x for name, x in self.phi.items()} for peer in peers}
        self.steps, self.rate, self.options = dict.fromkeys(peers, 0), {}, options

    def step(self, peer, gradients, lr):
        self.steps[peer] += 1
        t = self.steps[peer]
        for name, gradient in gradients.items():
            g = gradient.double().numpy()
            self.m[peer][name] = m = BETAS[0] * self.m[peer][name] + (1 - BETAS[0]) * g
            self.v[peer][name] = v = BETAS[1] * self.v[peer][name] + (1 - BETAS[1]) * g * g
            self.theta[peer][name] -= (
                lr * (m / (1 - BETAS[0] ** t)) / (np.sqrt(v / (1 - BETAS[1] ** t)) + EPS)
            )
            self.rate[peer, name] = lr * np.sqrt(1 - BETAS[1] ** t) / (1 - BETAS[0] ** t)

    def exchange(self, mean, sent, ranges):
        """Run one round of all peers; `ranges` are by peer and name."""
        old, options = {name: x.copy() for name, x in self.phi.items()}, self.options
        for name in self.phi:
            mu = mean[name].double().numpy()
            self.phi[name] = old[name] + mu
            for peer, theta in self.theta.items():
                work, q = theta[name] - old[name], sent[peer][name].double().numpy()
                inside = np.zeros(work.size, bool)
                for start, stop in ranges[peer].get(name, ()):
                    inside[start:stop] = True
                inside = inside.reshape(work.shape)
                kept = np.where(inside, options["decay"] * (work - q), work)
                theta[name] = self.phi[name] + kept
                push = options["correction"] * (mu - q) / self.rate[peer, name]
                push = np.clip(push, -options["cap"], options["cap"])
                self.m[peer][name] -= np.where(inside, np.sqrt(self.v[peer][name]) * push, 0)


@pytest.mark.parametrize("cap", [0.3, 50.0])
def test_three_peers_with_partial_and_failed_rounds_follow_the_twin(loopback, cap):
    options = {"correction": 0.6, "decay": 0.8, "cap": cap}
    swarm = loopback(lambda: Lean(period=2, **options), "abc", inner="adamw", lr=0.01)
    swarm.taken = lambda peer, number: partly if peer == "c" and number % 3 == 1 else whole
    swarm.fails = lambda number: number % 4 == 2
    twin = Twin(swarm.peers["a"].theta(), "abc", **options)
    for tick in range(16):
        for peer in swarm.peers.values():
            gradients = {
                name: swarm.gradient(peer.name, tick, name, x) for name, x in peer.theta().items()
            }
            twin.step(peer.name, gradients, 0.01)
        swarm.steps(1)
        results = {name: peer.results[-1] for name, peer in swarm.peers.items() if tick % 2}
        if results and results["a"].status != "failed":
            sent, ranges = (
                {name: getattr(x, what) for name, x in results.items()}
                for what in ("sent", "taken")
            )
            twin.exchange(results["a"].mean, sent, ranges)
        compare(swarm, twin)
    statuses = [result.status for result in swarm.peers["c"].results]
    assert {"ok", "partial", "failed"} == set(statuses)
    assert any(
        np.abs(x.numpy() - twin.phi[name]).max() > 1e-3
        for name, x in swarm.peers["a"].theta().items()
    )


def compare(swarm, twin):
    for peer in swarm.peers.values():
        theta, shared = peer.theta(), peer.method.eval_params(peer.replica)
        moments = peer.replica.read(peer.replica.names, "exp_avg")
        for name, x in theta.items():
            np.testing.assert_allclose(shared[name].numpy(), twin.phi[name], atol=1e-5)
            np.testing.assert_allclose(x.numpy(), twin.theta[peer.name][name], atol=1e-5)
            np.testing.assert_allclose(moments[name].numpy(), twin.m[peer.name][name], atol=1e-4)


def whole(name, count):
    return [(0, count)]


def partly(name, count):
    return [(2, count)]
