"""CO2 compared with a slow twin written from the specification, its clip and its staleness penalty,
and whole swarms."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.optimizers.contrib.co2 import CO2, FARTHEST, UNITS, distance
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.parts.outer import OuterHeavyBall

EXACT = {"codec": "fp32", "return_codec": "fp32"}
SHAPES = {"weight": (3, 5), "bias": (7,)}
INFINITE = float("inf")


def co2(period=4, **more):
    return lambda: CO2(period, **{**EXACT, **more})


def phi_of(peer):
    return dict(peer.method.eval_params(peer.replica))


# the twin


def twin(rounds, period, peers, values, rate, *, delay, lr, momentum, clip, penalty):
    """The specification in float64 on bowls: parameters are averaged, and the average moves the
    anchor a round later. Yields the anchor after each round, and whether the clip or the penalty
    did anything."""
    phi = {
        name: values(f"initial {name}", shape).double().numpy() for name, shape in SHAPES.items()
    }
    target = {
        (p, name): values(f"target {p} {name}", s).double().numpy()
        for p in peers
        for name, s in SHAPES.items()
    }
    u = {name: np.zeros_like(x) for name, x in phi.items()}
    x = {p: {name: a.copy() for name, a in phi.items()} for p in peers}
    anchors, flying = [phi], None
    for _ in range(rounds):
        for p in peers:
            for name in SHAPES:
                for _ in range(period):
                    x[p][name] = x[p][name] - rate * (x[p][name] - target[p, name])
        average = {name: np.mean([x[p][name] for p in peers], axis=0) for name in SHAPES}
        arrived, flying = (flying, average) if delay else (average, None)
        gap, clipped = 1.0, False
        if arrived is not None:
            if penalty and len(anchors) >= 3:
                oldest, older, old = anchors[-3:]
                before, now = (
                    sum(np.abs(a[n] - b[n]).sum() for n in SHAPES)
                    for a, b in ((oldest, older), (older, old))
                )
                gap = max(1.0, now / before)
            raw = {name: momentum * u[name] + (phi[name] - arrived[name]) / gap for name in SHAPES}
            u = {name: np.clip(raw[name], -clip, clip) for name in SHAPES}
            clipped = any((raw[name] != u[name]).any() for name in SHAPES)
            phi = {name: phi[name] - lr * u[name] for name in SHAPES}
            anchors.append(phi)
        x = {p: {name: a.copy() for name, a in phi.items()} for p in peers}
        yield phi, gap > 1.0, clipped


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("lr", "momentum", "clip", "penalty"),
    [
        (1.0, 0.5, INFINITE, False),
        (1.0, 0.5, INFINITE, True),
        (0.7, 0.8, 0.05, False),
        (1.5, 0.9, 0.04, True),
    ],
)
def test_it_is_the_specification_written_down_slowly(
    loopback, gradients, values, delay, lr, momentum, clip, penalty
):
    peers, period, rounds = "abc", 3, 12
    make = co2(
        period,
        outer_lr=lr,
        outer_momentum=momentum,
        clip=None if clip == INFINITE else clip,
        penalty=penalty,
        delay=delay,
    )
    swarm = loopback(make, peers, lr=0.0625, gradient=gradients["bowl"])
    options = {"lr": lr, "momentum": momentum, "clip": clip, "penalty": penalty, "delay": delay}
    seen = []
    for phi, *did in twin(rounds, period, peers, values, 0.0625, **options):
        swarm.steps(period)
        seen.append(did)
        for peer in swarm.peers.values():
            for name, x in peer.theta().items():
                np.testing.assert_allclose(x.numpy(), phi[name], atol=1e-5)
                assert torch.equal(phi_of(peer)[name], x)
    assert any(gap for gap, _ in seen) == penalty
    assert any(clipped for _, clipped in seen) == (clip != INFINITE)


def test_alone_and_without_misfortune_the_anchors_own_movement_is_a_pull_back(loopback, gradients):
    """u <- (m - lr)·u + D: the effect of measuring against today's anchor instead of the old
    one."""
    swarm = loopback(
        co2(2, outer_momentum=0.75, clip=None, penalty=False),
        "a",
        lr=0.125,
        gradient=gradients["bowl"],
    )
    peer, u, work = swarm.peers["a"], torch.zeros(7), None
    for _ in range(10):
        start = peer.theta()["bias"]
        before = phi_of(peer)["bias"]
        swarm.steps(1)
        if work is not None:  # it is applied one step before the round ends
            u = (0.75 - 1.0) * u + work
            torch.testing.assert_close(phi_of(peer)["bias"], before - u, rtol=0, atol=1e-6)
        theta = peer.theta()["bias"]
        swarm.steps(1)
        end = theta - 0.125 * gradients["bowl"]("a", 0, "bias", theta)
        work = start - end


# 5 and 6


@pytest.mark.parametrize("fate", ["calm", "late", "unlucky"], indirect=True)
def test_without_delay_clip_and_penalty_it_is_heavy_ball_bit_for_bit(loopback, same, fate):
    make = co2(3, outer_lr=0.7, outer_momentum=0.9, clip=None, penalty=False, delay=0)
    ours = loopback(make, "ab", inner="adamw", lr=0.01)
    theirs = loopback(
        lambda: DiLoCo(3, OuterHeavyBall(0.7, 0.9), **EXACT), "ab", inner="adamw", lr=0.01
    )
    fate(ours), fate(theirs)
    for _ in range(24):
        ours.steps(1), theirs.steps(1)
        for peer, other in zip(ours.peers.values(), theirs.peers.values(), strict=True):
            assert same(phi_of(peer), phi_of(other))
            assert same(peer.theta(), other.theta())


@pytest.mark.parametrize("clip", [0.25, 0.03125])
def test_no_value_of_the_momentum_ever_exceeds_the_clip(loopback, clip):
    bounded, free = (
        loopback(co2(2, outer_momentum=0.9, clip=limit), "ab") for limit in (clip, None)
    )
    reached = False
    for _ in range(30):
        before = phi_of(bounded.peers["a"])
        bounded.steps(1), free.steps(1)
        state = bounded.peers["a"].outer()
        u = torch.cat([state[f"momentum.{name}"].reshape(-1) for name in SHAPES])
        assert float(u.abs().max()) <= clip
        reached = reached or float(u.abs().max()) == clip
        for name, phi in phi_of(bounded.peers["a"]).items():
            assert float((phi - before[name]).abs().max()) <= clip * 1.001
    assert reached
    assert (
        max(float(free.peers["a"].outer()[f"momentum.{name}"].abs().max()) for name in SHAPES)
        > clip
    )


# the penalty


@given(st.lists(st.floats(-20, 20, width=32), max_size=40), st.randoms(use_true_random=False))
def test_a_distance_is_the_same_in_any_order_and_as_exact_as_its_unit(numbers, chance):
    x = torch.tensor(numbers, dtype=torch.float32)
    chance.shuffle(numbers)
    assert distance(x) == distance(torch.tensor(numbers, dtype=torch.float32))
    exact = sum(min(abs(number), FARTHEST) for number in numbers)
    assert 0 <= exact * UNITS - distance(x) <= len(numbers)


def test_a_distance_does_not_wrap_around():
    huge = torch.full((2**12,), 3e38)
    assert distance(huge) == 2**12 * int(FARTHEST * UNITS)
    assert int(FARTHEST * UNITS) * 2**34 < 2**63


def test_the_penalty_divides_by_how_much_faster_phi_moves_than_before(loopback):
    """After moves of 1 and 2, a pseudo-gradient of 4 is twice as fast as before and counts half."""
    grown = {0: 1.0, 1: 2.0, 2: 4.0}

    def growing(peer, step, name, theta):
        return torch.full_like(theta, grown.get(step, 0.0))

    for penalty, third in ((True, 2.0), (False, 4.0)):
        make = co2(1, delay=0, outer_momentum=0.0, clip=None, penalty=penalty)
        swarm = loopback(make, "ab", gradient=growing)
        phis = [phi_of(swarm.peers["a"])["bias"]]
        for _ in range(3):
            swarm.steps(1)
            phis.append(phi_of(swarm.peers["a"])["bias"])
        assert [float((a - b)[0]) for a, b in itertools.pairwise(phis)] == [1.0, 2.0, third]


def test_slowing_down_is_no_reason_for_larger_steps(loopback):
    def shrinking(peer, step, name, theta):
        return torch.full_like(theta, 2.0**-step)

    swarm = loopback(co2(1, delay=0, outer_momentum=0.0, clip=None), "ab", gradient=shrinking)
    swarm.steps(4)
    moved = phi_of(swarm.build("new"))["bias"] - phi_of(swarm.peers["a"])["bias"]
    assert torch.equal(moved, torch.full((7,), 1.875))


# in a swarm


def test_work_that_was_not_taken_is_sent_again(loopback):
    """After the failed round the message is what it would have been, plus the lost work."""
    swarms = [loopback(co2(2, clip=None, penalty=False), "ab") for _ in range(2)]
    swarms[1].fails = lambda number: number == 0
    for swarm in swarms:
        swarm.steps(4)
    calm, failed = (swarm.peers["a"] for swarm in swarms)
    (_, lost), (_, again) = failed.offered
    (_, first), (_, second) = calm.offered
    start = phi_of(swarms[0].build("new"))
    for name in SHAPES:
        assert torch.equal(lost.tensors[name], first.tensors[name])
        # of the anchor, which did not move where the round failed
        drift = phi_of(calm)[name] - start[name]
        assert torch.equal(again.tensors[name], second.tensors[name] - drift + lost.tensors[name])
        assert torch.equal(phi_of(failed)[name], start[name])


def test_messages_leave_a_period_apart_and_the_replica_starts_from_the_anchor(loopback):
    swarm = loopback(co2(4), "abc", inner="adamw", lr=0.01)
    for step in range(1, 33):
        swarm.steps(1)
        for peer in swarm.peers.values():
            if step % 4 == 0:
                assert peer.offered[-1][0] == step
                assert all(
                    torch.equal(x, phi_of(swarm.peers["a"])[name])
                    for name, x in peer.theta().items()
                )
    assert [step for step, _ in swarm.peers["a"].offered] == list(range(4, 33, 4))


def test_a_joiner_replays_the_pending_mean_and_has_the_same_gap(loopback, same):
    swarm = loopback(co2(4), "ab", inner="adamw", lr=0.01)
    swarm.steps(17)
    joiner = swarm.join("c", "a")
    swarm.steps(26)
    assert all("c" in result.participants for result in joiner.results[1:])
    met = 0
    for _ in range(4):
        swarm.steps(1)
        if joiner.applied == swarm.peers["a"].applied:
            met += 1
            assert same(joiner.outer(), swarm.peers["a"].outer())
    assert met
    assert int(joiner.outer()["moved"]) > 0


def test_carrying_a_snapshot_keeps_sent_and_unsent_work_on_top_of_phi(loopback):
    swarm = loopback(co2(4), "ab")
    swarm.steps(14)
    peer, other = swarm.peers["a"], swarm.peers["b"]
    outside = peer.method.untold(peer.theta())
    peer.method.restore(peer.replica, other.outer(), "carry")
    for name, x in peer.theta().items():
        assert torch.equal(x, phi_of(other)[name] - outside[name])
        assert bool(outside[name].any())


def test_the_defaults_are_those_of_the_released_code_but_for_the_clip():
    made = CO2()
    assert (made.period, made.outer_lr, made.outer_momentum, made.clip, made.penalty) == (
        48,
        1.0,
        0.5,
        1.0,
        True,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "a period of 0 steps"),
        ({"period": 1}, "a period of 1 step is too short to hide an exchange"),
        ({"delay": 3}, "a delay of 3 rounds is not known"),
        ({"outer_lr": 0.0}, r"an outer_lr of 0.0 is out of range; choose one in \(0, 10\]"),
        (
            {"outer_momentum": 1.0},
            r"an outer_momentum of 1.0 is out of range; choose one in \[0, 1\)",
        ),
        (
            {"clip": 0.0},
            "a clip of 0.0 is out of range; choose one above 0, or None",
        ),
        ({"clip": INFINITE}, "a clip of inf"),
        ({"deadline_s": INFINITE}, "a deadline of inf s"),
        ({"codec": "topk:64/4096"}, "codec topk:64/4096 is biased.*no feedback"),
        ({"return_codec": "topk:64/4096"}, "return codec topk:64/4096 is biased"),
    ],
)
def test_options_that_cannot_train_are_refused_with_the_nearest_that_can(options, message):
    with pytest.raises(ValueError, match=message):
        CO2(**options)


def test_the_bits_of_a_run_are_those_that_were_written_down(loopback, golden, bits_of):
    """Dyadic gradients, four peers, some rounds late, partial or failed: a change here is a change
    of protocol."""
    found = {}
    for delay in (0, 1):
        swarm = loopback(co2(3, delay=delay, clip=0.125, codec="int8", return_codec="bf16"), "abcd")
        found[f"delay {delay}"] = bits_of(swarm)
    assert golden("co2", found) == found
