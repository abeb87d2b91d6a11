"""The simulator is held against a plain loop that takes as many steps, and its peers have a
price."""

import math

from farflock.experiments.bench import sim
from farflock.node.simulate.simulation import SimulationResult


def test_both_metrics_are_there_and_sane(quick):
    steps, peer = sim.run(quick())
    assert (steps.metric, peer.metric) == ("sim", "sim.peer_s")
    assert 0 < steps.value < math.inf
    assert 0 < steps.yardstick < math.inf
    assert 0 < steps.ratio < 10
    assert math.isfinite(peer.value)
    assert (peer.yardstick, peer.ratio) == (None, None)


def test_only_what_was_asked_for_is_run(quick, monkeypatch):
    monkeypatch.setattr(sim, "_steps", None)
    assert [line.metric for line in sim.run(quick("sim.peer_s"))] == ["sim.peer_s"]


def test_the_plain_loop_takes_the_steps_that_the_swarm_took(monkeypatch):
    trained = []

    class Counted:
        def __init__(self, plan, tokens, peer):
            self.peer = peer

        def train(self, steps):
            trained.append(self.peer)

    outcome = SimulationResult("", 0, [], 0, 0.0, 0.0, 0, steps=7)
    monkeypatch.setattr(sim, "Bare", Counted)
    monkeypatch.setattr(sim, "_simulated", lambda size, tokens, peers, total: outcome)
    sim.simulated_turn(sim.Size(peers=3), None)
    assert trained == ["0", "1", "2", "0", "1", "2", "0"]


def test_a_peers_price_is_what_a_larger_swarm_costs_more(monkeypatch):
    monkeypatch.setattr(sim, "_simulated", lambda size, tokens, peers, total: peers)
    monkeypatch.setattr(sim, "seconds", lambda work, clock: 1.0 + 0.25 * work())
    assert sim.peer_metric(sim.Size(), None, 3).value == 0.25
