"""The promises of the methods' specification for whole swarms, beyond single rounds."""

import hashlib

import pytest
import torch

from farflock.optimizers.ddp import DDP
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.noloco import NoLoCo
from farflock.optimizers.parts.outer import OuterHeavyBall, OuterNesterov, OuterSGD

EXACT = {"codec": "fp32", "return_codec": "fp32"}
MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def local_sgd(period=1):
    return lambda: DiLoCo(period, OuterSGD(1.0), **EXACT)


def ddp():
    return DDP(**EXACT)


def close(a, b, tolerance=1e-6):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


def spread(swarm):
    """The variance of the peers' outer parameters around their mean, summed over all values."""
    phis = [
        torch.cat([x.double().reshape(-1) for x in peer.method.eval_params(peer.replica).values()])
        for peer in swarm.peers.values()
    ]
    return float(torch.stack(phis).var(dim=0).sum()), torch.stack(phis).mean(dim=0)


# DDP and Local SGD


@pytest.mark.parametrize(("inner", "equal"), [("sgd", True), ("adamw", False)])
def test_local_sgd_with_one_step_a_round_is_ddp_for_plain_sgd_and_not_for_adam(
    loopback, inner, equal
):
    swarms = [loopback(make, "abc", inner=inner, lr=0.125) for make in (local_sgd(), ddp)]
    for swarm in swarms:
        swarm.steps(5)
    ours, theirs = (swarm.peers["a"].theta() for swarm in swarms)
    if equal:
        close(ours, theirs)
    else:
        assert max(float((ours[name] - theirs[name]).abs().max()) for name in ours) > 1e-3


def test_ddp_of_peers_with_equal_batches_is_one_process_with_all_batches(loopback, gradients):
    """With unequal batches, only the mean weighted by their sizes is equal to it; `weight` counts
    the steps in DDP's exchanges."""
    swarm = loopback(ddp, "abcd", lr=0.5)

    def together(peer, step, name, theta):
        return sum(gradients["noise"](one, step, name, theta) for one in "abcd") / 4

    single = loopback(ddp, "a", gradient=together, lr=0.5)
    for each in (swarm, single):
        each.steps(6)
    close(swarm.peers["b"].theta(), single.peers["a"].theta())


def test_gradients_that_waited_weigh_as_much_as_their_number_of_steps(loopback, gradients):
    swarm = loopback(ddp, "ab", lr=1.0)
    swarm.fails = lambda number: number == 0
    swarm.steps(2)
    start = swarm.build("new").theta()
    for name, x in start.items():
        both = sum(gradients["noise"](peer, step, name, x) for peer in "ab" for step in (0, 1)) / 4
        torch.testing.assert_close(swarm.peers["a"].theta()[name], x - both)
    assert [exchange.weight for _, exchange in swarm.peers["a"].offered] == [1.0, 2.0]


@pytest.mark.parametrize("size", [2, 4, 7])
def test_all_replicas_are_equal_to_the_bit_after_averaging(loopback, same, size):
    swarm = loopback(local_sgd(3), "abcdefg"[:size], inner="adamw", lr=0.01)
    swarm.steps(9)
    first, *others = [peer.theta() for peer in swarm.peers.values()]
    assert all(same(first, other) for other in others)


# DiLoCo


@pytest.mark.parametrize("late", [0, 2])
def test_the_outer_step_does_not_touch_the_inner_optimizers_moments(loopback, same, late):
    """As long as gradients are the same, a swarm that agrees on nothing has the same moments as one
    that agrees."""
    agreeing, failing = (
        loopback(lambda: DiLoCo(3, **EXACT), "ab", inner="adamw", lr=0.01) for _ in range(2)
    )
    agreeing.late = lambda peer, number: late
    failing.fails = lambda number: True
    for swarm in (agreeing, failing):
        swarm.steps(8)
    for name in "ab":
        ours, theirs = (swarm.peers[name].replica for swarm in (agreeing, failing))
        assert not same(agreeing.peers[name].theta(), failing.peers[name].theta())
        for moment in MOMENTS:
            assert same(ours.read(ours.names, moment), theirs.read(theirs.names, moment))


@pytest.mark.parametrize("size", [2, 4])
def test_identical_replicas_with_identical_data_are_one_peer(loopback, gradients, same, size):
    one, many = (
        loopback(
            lambda: DiLoCo(2, **EXACT), peers, gradient=gradients["shared"], inner="adamw", lr=0.01
        )
        for peers in ("a", "abcd"[:size])
    )
    for swarm in (one, many):
        swarm.steps(8)
    assert same(one.peers["a"].outer(), many.peers["a"].outer())


def test_exactly_the_period_lies_between_exchanges_also_when_results_come_late_or_never(loopback):
    swarm = loopback(lambda: DiLoCo(5, **EXACT), "ab")
    swarm.late = lambda peer, number: 3 if peer == "b" else 0
    swarm.fails = lambda number: number == 1
    swarm.steps(25)
    for peer in swarm.peers.values():
        assert [step for step, _ in peer.offered] == [5, 10, 15, 20, 25]


def test_a_missing_worker_is_as_if_it_had_never_been_there_momentum_included(loopback, same):
    with_c, without_c = (loopback(lambda: DiLoCo(2, **EXACT), peers) for peers in ("abc", "ab"))
    with_c.taken = lambda peer, number: (
        lambda what, n: [] if peer == "c" and number == 1 else [(0, n)]
    )
    for swarm in (with_c, without_c):
        swarm.steps(2) if swarm is with_c else None
    snapshot = with_c.peers["a"].outer()
    for peer in without_c.peers.values():
        peer.step = 2
        peer.method.restore(peer.replica, snapshot, "adopt")
    for swarm in (with_c, without_c):
        swarm.steps(2)
    assert same(with_c.peers["a"].outer(), without_c.peers["b"].outer())


# NoLoCo


@pytest.mark.parametrize("gamma", [0.7, 0.6])
def test_two_peers_that_meet_each_round_are_heavy_ball_diloco(loopback, gradients, gamma):
    pairs = loopback(lambda: NoLoCo(3, alpha=0.5, beta=0.7, gamma=gamma, codec="fp32"), "ab")
    outer = loopback(lambda: DiLoCo(3, OuterHeavyBall(0.7, 0.5), **EXACT), "ab")
    for swarm in (pairs, outer):
        swarm.steps(9)
    phis = [
        dict(peer.method.eval_params(peer.replica))
        for swarm in (pairs, outer)
        for peer in swarm.peers.values()
    ]
    close(phis[0], phis[1])
    close(phis[0], phis[2])


def test_one_vector_and_two_vectors_are_the_same_update_where_gamma_is_beta(loopback):
    class Both(NoLoCo):
        """Send pseudo-gradient and phi although theta would do."""

        _one_vector = False

    options = {"period": 2, "codec": "fp32"}
    swarms = [loopback(lambda kind=kind: kind(**options), "abcdef") for kind in (NoLoCo, Both)]
    for swarm in swarms:
        swarm.late = lambda peer, number: 1 if peer in "bd" else 0
        swarm.steps(12)
    assert len(swarms[1].peers["a"].offered[0][1].tensors) == 2 * len(
        swarms[0].peers["a"].offered[0][1].tensors
    )
    for name in "abcdef":
        close(swarms[0].peers[name].theta(), swarms[1].peers[name].theta())


@pytest.mark.parametrize("size", [4, 7, 16])
def test_without_gradients_the_mean_stays_and_replicas_draw_together(
    loopback, gradients, values, size
):
    names = [chr(97 + number) for number in range(size)]
    swarm = loopback(lambda: NoLoCo(1, codec="fp32"), names, gradient=gradients["zero"])
    for peer in swarm.peers.values():
        peer.replica.write(
            {name: values(f"{peer.name} {name}", x.shape) for name, x in peer.theta().items()},
            "param",
        )
    before, mean = spread(swarm)
    swarm.steps(20)
    after, still = spread(swarm)
    assert after < 0.05 * before
    torch.testing.assert_close(still, mean, rtol=0, atol=1e-6)


def test_a_peer_left_alone_by_an_odd_number_takes_a_heavy_ball_step_by_itself(loopback):
    swarm = loopback(lambda: NoLoCo(2, codec="fp32"), "abc")
    swarm.steps(2)
    statuses = sorted(peer.results[0].status for peer in swarm.peers.values())
    assert statuses == ["alone", "ok", "ok"]
    (loner,) = [peer for peer in swarm.peers.values() if peer.results[0].status == "alone"]
    single = loopback(lambda: NoLoCo(2, codec="fp32"), loner.name)
    single.steps(2)
    close(single.peers[loner.name].theta(), loner.theta())


# the bits


@pytest.mark.parametrize("late", [0, 1])
def test_the_bits_of_a_run_are_those_that_were_written_down(loopback, golden, late):
    """Five rounds of four peers on dyadic gradients, for each outer optimizer:
    a change here is a change of protocol."""
    found = {}
    for outer in (OuterSGD(0.7), OuterNesterov(), OuterHeavyBall(0.6, 0.3)):
        swarm = loopback(
            lambda outer=outer: DiLoCo(2, outer, codec="int8", return_codec="bf16"), "abcd"
        )
        swarm.late = lambda peer, number: late
        swarm.steps(10 + late)
        phi = dict(swarm.peers["a"].method.eval_params(swarm.peers["a"].replica))
        blob = b"".join(x.numpy().tobytes() for x in phi.values())
        found[type(outer).__name__] = [
            phi["weight"].reshape(-1)[:4].tolist(),
            hashlib.sha256(blob).hexdigest(),
        ]
    assert golden(f"outer_late_{late}", found) == found
