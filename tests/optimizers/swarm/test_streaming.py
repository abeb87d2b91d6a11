"""Streaming DiLoCo in whole swarms: the invariants of its specification, bit for bit where
gradients are dyadic."""

import itertools

import numpy as np
import pytest
import torch

from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.local import Local
from farflock.optimizers.parts.outer import OuterNesterov, OuterSGD
from farflock.optimizers.streaming import Streaming

EXACT = {"codec": "fp32", "return_codec": "fp32"}
NAMES = {"fragment.0": "weight", "fragment.1": "bias"}


def streaming(period=4, fragments=2, overlap=1, mix=0.5, **more):
    return lambda: Streaming(period, fragments, "strided", overlap, mix, **{**EXACT, **more})


def phi_of(peer):
    return dict(peer.method.eval_params(peer.replica))


def offers(peer, stream):
    return [(step, exchange) for step, exchange in peer.offered if exchange.key.stream == stream]


@pytest.mark.parametrize("fate", ["calm", "late", "unlucky"], indirect=True)
@pytest.mark.parametrize(
    "more", [{}, {"feedback": 0.5, "codec": "int4"}], ids=["plain", "feedback"]
)
def test_one_fragment_without_overlap_or_mixing_is_diloco_bit_for_bit(loopback, same, fate, more):
    outer = OuterNesterov(0.7, 0.9)
    ours = loopback(streaming(3, 1, 0, 0.0, outer=outer, **more), "ab", inner="adamw", lr=0.01)
    theirs = loopback(lambda: DiLoCo(3, outer, **{**EXACT, **more}), "ab", inner="adamw", lr=0.01)
    fate(ours), fate(theirs)
    for _ in range(30):
        ours.steps(1), theirs.steps(1)
        for peer, other in zip(ours.peers.values(), theirs.peers.values(), strict=True):
            assert same(peer.theta(), other.theta())
            assert same(phi_of(peer), phi_of(other))
            assert [step for step, _ in peer.offered] == [step for step, _ in other.offered]


@pytest.mark.parametrize("fate", ["calm", "late", "unlucky"], indirect=True)
def test_mixing_all_of_the_local_values_makes_runs_of_their_own(loopback, fate):
    ours, theirs = loopback(streaming(mix=1.0), "abc"), loopback(Local, "abc")
    fate(ours)
    ours.steps(25), theirs.steps(25)
    for peer, other in zip(ours.peers.values(), theirs.peers.values(), strict=True):
        assert len(peer.results) > 8
        assert all(torch.equal(x, other.theta()[name]) for name, x in peer.theta().items())


def test_alone_with_plain_averaging_phi_is_theta_where_it_is_sent(loopback):
    ours, theirs = loopback(streaming(5, 2, 0, 0.0, outer=OuterSGD(1.0)), "a"), loopback(Local, "a")
    for step in range(1, 31):
        ours.steps(1), theirs.steps(1)
        peer, theta = ours.peers["a"], theirs.peers["a"].theta()
        assert all(torch.equal(x, theta[name]) for name, x in peer.theta().items())
        for sent_at, exchange in peer.offered:
            if sent_at == step:
                assert all(
                    torch.equal(phi_of(peer)[name], theta[name]) for name in exchange.tensors
                )


@pytest.mark.parametrize("size", [1, 3])
def test_every_fragment_is_sent_once_a_period_and_together_they_are_the_model(loopback, size):
    swarm = loopback(streaming(6, 2, 2), "abc"[:size])
    swarm.steps(36)
    for peer in swarm.peers.values():
        for stream, first in (("fragment.0", 3), ("fragment.1", 6)):
            assert [step for step, _ in offers(peer, stream)] == list(range(first, 37, 6))
        names = [set(exchange.tensors) for exchange in peer.method.streams(peer.replica)]
        assert set.union(*names) == set(peer.replica.names)
        assert not set.intersection(*names)


@pytest.mark.parametrize("overlap", [1, 3])
def test_with_an_overlap_and_no_mixing_the_fragment_is_phi_right_after_it_was_merged(
    loopback, overlap
):
    swarm = loopback(streaming(6, 2, overlap, 0.0), "abc", inner="adamw", lr=0.01)
    merged = 0
    for step in range(1, 40):
        swarm.steps(1)
        for peer in swarm.peers.values():
            for sent_at, exchange in peer.offered:
                for name in exchange.tensors if sent_at + overlap == step else ():
                    assert torch.equal(peer.theta()[name], phi_of(peer)[name])
                    assert torch.equal(peer.theta()[name], phi_of(swarm.peers["a"])[name])
                    merged += 1
    assert merged >= 30


def test_the_next_pseudo_gradient_is_measured_from_the_new_phi(loopback):
    swarm = loopback(streaming(4, 2, 1, 0.5), "ab")
    for step in range(1, 30):
        before = {name: phi_of(peer) for name, peer in swarm.peers.items()}
        swarm.steps(1)
        for name, peer in swarm.peers.items():
            for sent_at, exchange in peer.offered:
                if sent_at == step:
                    (what,) = exchange.tensors  # another fragment was merged in this step, if any
                    assert torch.equal(
                        exchange.tensors[what], before[name][what] - peer.theta()[what]
                    )


@pytest.mark.parametrize(("overlap", "mix"), [(0, 0.0), (1, 0.5), (2, 0.25)])
def test_it_is_the_papers_algorithm_written_down_slowly(loopback, gradients, values, overlap, mix):
    period, count, peers = 4, 32, "abc"
    swarm = loopback(
        streaming(period, 2, overlap, mix), peers, lr=0.125, gradient=gradients["bowl"]
    )
    swarm.steps(count)
    shapes = {"weight": (3, 5), "bias": (7,)}
    phi = {
        name: values(f"initial {name}", shape).double().numpy() for name, shape in shapes.items()
    }
    theta = {peer: {name: x.copy() for name, x in phi.items()} for peer in peers}
    momentum, flying = {name: np.zeros_like(x) for name, x in phi.items()}, {}
    phases = {"weight": period // 2, "bias": period}
    for t in range(1, count + 1):
        for peer, mine in theta.items():
            for name, shape in shapes.items():
                mine[name] = mine[name] - 0.125 * (
                    mine[name] - values(f"target {peer} {name}", shape).double().numpy()
                )
        for name, phase in phases.items():
            if t >= phase and (t - phase) % period == 0:
                flying[name] = np.mean([phi[name] - mine[name] for mine in theta.values()], axis=0)
            if name in flying and (t - phase - overlap) % period == 0:
                momentum[name] = 0.9 * momentum[name] + flying[name]
                phi[name] = phi[name] - 0.4 * (flying.pop(name) + 0.9 * momentum[name])
                for mine in theta.values():
                    mine[name] = mix * mine[name] + (1 - mix) * phi[name]
    for peer in swarm.peers.values():
        for name in shapes:
            np.testing.assert_allclose(phi_of(peer)[name].numpy(), phi[name], atol=2e-6)
            np.testing.assert_allclose(
                peer.theta()[name].numpy(), theta[peer.name][name], atol=2e-6
            )


def test_what_was_not_taken_stays_and_goes_with_the_next_pseudo_gradient_of_its_fragment(loopback):
    swarm = loopback(streaming(4, 2, 0, 0.0, outer=OuterSGD(1.0)), "ab")
    swarm.taken = lambda peer, number: (
        (lambda what, n: []) if (peer, number) == ("a", 0) else (lambda what, n: [(0, n)])
    )
    swarm.steps(2)
    a, b = swarm.peers["a"], swarm.peers["b"]
    assert torch.equal(b.theta()["weight"], phi_of(b)["weight"])
    mine, alone = a.theta()["weight"], loopback(Local, "ab")
    alone.steps(2)
    assert torch.equal(mine, alone.peers["a"].theta()["weight"])
    assert torch.equal(phi_of(a)["weight"], alone.peers["b"].theta()["weight"])
    swarm.steps(2)
    assert torch.equal(a.theta()["bias"], phi_of(a)["bias"])  # the other fragment is not concerned
    phi = phi_of(a)["weight"]
    swarm.steps(2)
    alone.steps(4)
    (_, again) = offers(a, "fragment.0")[1]
    assert torch.equal(again.tensors["weight"], phi - alone.peers["a"].theta()["weight"])


@pytest.mark.parametrize(("mix", "lateness"), [(0.0, 1), (0.0, 7), (0.5, 2)])
def test_a_late_result_keeps_all_steps_since_its_snapshot(loopback, mix, lateness):
    """theta + (1 - mix)·(phi_new - snapshot): nothing that was trained in the meantime is thrown
    away."""
    swarm, alone = (
        loopback(streaming(8, 2, 1, mix, outer=OuterSGD(1.0)), "ab"),
        loopback(Local, "ab"),
    )
    swarm.struck = {"fragment.0"}
    swarm.late = lambda peer, number: 1 + lateness if peer == "b" else 0
    swarm.steps(4), alone.steps(4)
    snapshot = alone.peers["b"].theta()["weight"]
    swarm.steps(1 + lateness), alone.steps(1 + lateness)
    free, b = alone.peers["b"].theta()["weight"], swarm.peers["b"]
    (result,) = [result for result in b.results if "weight" in result.taken]
    assert result.steps_since == 1 + lateness
    assert torch.equal(b.theta()["weight"], free + (1 - mix) * (phi_of(b)["weight"] - snapshot))


def test_a_fragment_that_hangs_holds_up_no_other(loopback):
    swarm = loopback(streaming(4, 2, 1), "ab")
    swarm.struck, swarm.late = {"fragment.0"}, lambda peer, number: 50
    swarm.steps(33)
    for peer in swarm.peers.values():
        assert [step for step, _ in offers(peer, "fragment.0")] == [2]
        assert [step for step, _ in offers(peer, "fragment.1")] == list(range(4, 34, 4))
    assert torch.equal(phi_of(swarm.peers["a"])["bias"], phi_of(swarm.peers["b"])["bias"])


def test_a_joiner_is_in_the_very_next_round_of_each_fragment_and_holds_the_same_phi(loopback):
    swarm = loopback(streaming(6, 2, 1), "ab", inner="adamw", lr=0.01)
    swarm.steps(13)
    joiner = swarm.join("c", "a")
    swarm.steps(30)
    asked = [exchange.key.round for _, exchange in joiner.offered]
    assert asked == sorted(asked)
    assert asked == list(range(asked[0], asked[0] + len(asked)))
    assert all("c" in result.participants for result in joiner.results)
    met = 0
    for _ in range(6):  # it merges some steps after the others
        swarm.steps(1)
        for stream, name in NAMES.items():
            if swarm.peers["a"].applied[stream] == joiner.applied[stream]:
                met += 1
                assert torch.equal(phi_of(swarm.peers["a"])[name], phi_of(joiner)[name])
    assert met >= 4


def test_peers_out_of_step_ask_for_rounds_in_the_same_order(loopback):
    """A peer that waits for fragment 0 must not block another peer that asks for it only after a
    different fragment."""
    swarm = loopback(streaming(4, 2, 1), "abc")
    swarm.rests = lambda peer, tick: peer == "b" and tick in (1, 2, 9)
    swarm.late = lambda peer, number: number % 5 if peer == "c" else 0
    swarm.steps(60)
    for peer in swarm.peers.values():
        assert len(peer.offered) > 15
        for (_, one), (_, other) in itertools.pairwise(peer.offered):
            # -1 or a gap only next to one that was on its way
            assert other.key.round - one.key.round in (1, -1, 2, 3)
    assert all("b" in result.participants for result in swarm.peers["a"].results[-4:])


def test_feedback_settles_each_fragment_by_itself(loopback):
    swarm = loopback(
        streaming(4, 2, 0, 0.0, outer=OuterSGD(1.0), codec="int4:2", feedback=1.0), "a"
    )
    swarm.steps(24)
    peer, alone = swarm.peers["a"], loopback(Local, "a")
    residual = {
        name: x for one in peer.method._fragments for name, x in one.memory.residual.items()
    }
    alone.steps(24)
    for name, x in alone.peers["a"].theta().items():
        unsent = phi_of(peer)[name] - peer.theta()[name]
        arrived = alone.build("new").theta()[name] - phi_of(peer)[name]
        total = alone.build("new").theta()[name] - x
        torch.testing.assert_close(arrived + residual[name] + unsent, total, rtol=0, atol=1e-5)
    assert all(float(x.abs().max()) > 1e-4 for x in residual.values())


def test_the_bits_of_a_run_are_those_that_were_written_down(loopback, golden, bits_of):
    """Dyadic gradients, four peers, every third round late or partial: a change here is a change of
    protocol."""
    found = {}
    for overlap, mix in ((0, 0.0), (1, 0.5)):
        swarm = loopback(streaming(4, 2, overlap, mix, codec="int8", return_codec="bf16"), "abcd")
        found[f"overlap {overlap} mix {mix}"] = bits_of(swarm)
    assert golden("streaming", found) == found
