"""Outer steps one round late in whole swarms: the invariants of the specification, and no work lost
or doubled."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflock.optimizers.contrib.delayed import Delayed
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.local import Local
from farflock.optimizers.parts.outer import OuterNesterov, OuterSGD

EXACT = {"codec": "fp32", "return_codec": "fp32"}
MODES = ("naive", "keep_pending", "eager")
each_mode = pytest.mark.parametrize("mode", MODES)


def delayed(mode="eager", period=4, **more):
    return lambda: Delayed(period, mode, **{**EXACT, **more})


def phi_of(peer):
    return dict(peer.method.eval_params(peer.replica))


def start_of(swarm):
    return swarm.build("fresh").theta()


def work(swarm, name, steps):
    """The sum of a peer's gradients so far."""
    theta = start_of(swarm)
    total = {what: torch.zeros_like(x) for what, x in theta.items()}
    for step in range(steps):
        total = {
            what: x + swarm.gradient(name, step, what, theta[what]) for what, x in total.items()
        }
    return total


# 1: without a delay


@each_mode
@pytest.mark.parametrize("fate", ["calm", "late", "unlucky", "absent"], indirect=True)
def test_without_a_delay_it_is_diloco_bit_for_bit(loopback, same, mode, fate):
    outer = OuterNesterov(0.7, 0.9)
    ours = loopback(delayed(mode, 3, outer=outer, delay=0), "ab", inner="adamw", lr=0.01)
    theirs = loopback(lambda: DiLoCo(3, outer, **EXACT), "ab", inner="adamw", lr=0.01)
    fate(ours), fate(theirs)
    for _ in range(30):
        ours.steps(1), theirs.steps(1)
        for peer, other in zip(ours.peers.values(), theirs.peers.values(), strict=True):
            assert same(peer.theta(), other.theta())
            assert same(phi_of(peer), phi_of(other))


# 2: by hand


def test_alone_on_a_bowl_the_naive_form_follows_the_recursion_made_by_hand(
    loopback, gradients, values
):
    """theta <- theta - (theta - c)/4 twice a round: D = 7/16·(phi - c), and phi_(r+1) = phi_r -
    D_(r-1)."""
    swarm = loopback(
        delayed("naive", 2, outer=OuterSGD(1.0)), "a", lr=0.25, gradient=gradients["bowl"]
    )
    phi, pending = values("initial bias", (7,)).double(), None
    target = values("target a bias", (7,)).double()
    for _ in range(12):
        swarm.steps(2)  # a round ends: its work is sent, and what was sent before is in phi
        phi, pending = (phi if pending is None else phi - pending), 7 / 16 * (phi - target)
        np.testing.assert_allclose(phi_of(swarm.peers["a"])["bias"].double(), phi, atol=1e-6)


# 3: exactly once


@each_mode
@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_once_drained_phi_has_moved_by_the_mean_of_all_work_times_the_rate(loopback, mode, rate):
    swarm = loopback(delayed(mode, 4, outer=OuterSGD(rate)), "ab")
    swarm.steps(4 * 25 + 3)  # the 25th message arrives 3 steps after it was sent
    done = [work(swarm, name, 100) for name in "ab"]
    for name, phi in phi_of(swarm.peers["a"]).items():
        mean = (done[0][name] + done[1][name]) / 2
        assert torch.equal(start_of(swarm)[name] - phi, rate * mean)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), period=st.integers(2, 4), mode=st.sampled_from(MODES))
def test_of_one_peer_nothing_is_lost_or_doubled_whatever_comes_late_partly_or_not(
    loopback, any_fate, data, period, mode
):
    """The work in phi, on its way, to be sent again, and not sent yet adds up to all work done."""
    swarm = loopback(delayed(mode, period, outer=OuterSGD(0.5)), "a")
    any_fate(swarm, data)
    swarm.steps(23)
    peer, total = swarm.peers["a"], work(swarm, "a", 23)
    outside = peer.method.untold(peer.theta())
    for name, x in phi_of(peer).items():
        assert torch.equal(2 * (start_of(swarm)[name] - x) + outside[name], total[name])


@each_mode
def test_with_several_peers_what_was_not_taken_is_sent_again(loopback, mode):
    swarm = loopback(delayed(mode, 3, outer=OuterSGD(1.0)), "ab")
    swarm.taken = lambda peer, number: (
        lambda what, n: [] if (peer, number % 3) == ("a", 1) else [(0, n)]
    )
    swarm.fails = lambda number: number == 4
    swarm.steps(3 * 12 + 2)
    total = {name: [work(swarm, peer, 36)[name] for peer in "ab"] for name in start_of(swarm)}
    lost = {1, 7, 10}  # in these rounds b's work counted alone, so twice as much
    for name, phi in phi_of(swarm.peers["b"]).items():
        halves = sum(total[name]) / 2
        sent_alone = [
            exchange.tensors[name]
            for _, exchange in swarm.peers["b"].offered
            if exchange.key.round in lost
        ]
        behind = swarm.peers["a"].method._work[name] if 11 in lost else 0
        assert torch.equal(start_of(swarm)[name] - phi, halves + sum(sent_alone) / 2 - behind)


# 4: eager


def test_alone_the_eager_form_is_diloco(loopback):
    outer = OuterNesterov(0.4, 0.9)
    ours = loopback(delayed("eager", 3, outer=outer), "a", lr=0.125)
    theirs = loopback(lambda: DiLoCo(3, outer, **EXACT), "a", lr=0.125)
    for _ in range(70):  # past the rounds at which peers in a swarm reset their lead
        ours.steps(1), theirs.steps(1)
        for name, x in ours.peers["a"].theta().items():
            torch.testing.assert_close(x, theirs.peers["a"].theta()[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("mix", [None, 0.25])
def test_it_is_the_eager_update_of_the_paper_written_down_slowly(loopback, gradients, values, mix):
    """In the paper, each replica has its own phi_m and u_m. M is 1 in the first round, since no
    replica knows of another yet."""
    period, rounds, peers = 3, 12, "abc"
    swarm = loopback(
        delayed("eager", period, eager_mix=mix, refresh=1000),
        peers,
        lr=0.125,
        gradient=gradients["bowl"],
    )
    target = {peer: values(f"target {peer} weight", (3, 5)).double().numpy() for peer in peers}
    phi = {peer: values("initial weight", (3, 5)).double().numpy() for peer in peers}
    momentum = {peer: np.zeros((3, 5)) for peer in peers}
    before, mean = {peer: np.zeros((3, 5)) for peer in peers}, np.zeros((3, 5))
    share_before = 0.0
    for number in range(rounds):
        delta, share = {}, 1.0 if number == 0 else 1 / len(peers)
        for peer in peers:
            theta = phi[peer]
            for _ in range(period):
                theta = theta - 0.125 * (theta - target[peer])
            delta[peer] = phi[peer] - theta
        for peer in peers:
            fresh = share * delta[peer] + (mean - share_before * before[peer])
            if mix is not None:
                fresh = mix * delta[peer] + (1 - mix) * mean
            momentum[peer] = 0.9 * momentum[peer] + fresh
            phi[peer] = phi[peer] - 0.4 * (fresh + 0.9 * momentum[peer])
        before, share_before, mean = delta, share, np.mean(list(delta.values()), axis=0)
        swarm.steps(period)
        for peer in swarm.peers.values():
            np.testing.assert_allclose(peer.theta()["weight"].numpy(), phi[peer.name], atol=3e-6)


def test_replacing_the_own_share_telescopes_so_that_replicas_stay_within_one_rounds_work(loopback):
    swarm = loopback(delayed("eager", 4, outer=OuterSGD(0.5)), "ab")
    for number in range(30):
        swarm.steps(4)
        for peer in swarm.peers.values():
            (_, exchange) = peer.offered[-1]
            share = 1 if number == 0 else 0.5
            for name, theta in peer.theta().items():
                assert torch.equal(theta, phi_of(peer)[name] - 0.5 * share * exchange.tensors[name])


def drifted(loopback, refresh):
    """The distances from phi, after 40 rounds, of two replicas that train against each other."""

    def opposite(peer, step, name, theta):
        return torch.full_like(theta, 0.25 if peer == "a" else -0.25)

    swarm = loopback(
        delayed("eager", 2, eager_mix=0.5, refresh=refresh, outer=OuterSGD(0.5)),
        "ab",
        gradient=opposite,
    )
    swarm.steps(81)
    peer = swarm.peers["a"]
    return float((peer.method._start["bias"] - phi_of(peer)["bias"]).abs().max())


def test_mixing_drifts_without_end_and_a_refresh_ends_it(loopback):
    assert drifted(loopback, 1000) == pytest.approx(0.5 * 0.5 * 0.5 * 40)
    assert drifted(loopback, 5) <= 0.5 * 0.5 * 0.5 * 5


@each_mode
def test_phi_is_the_same_at_all_peers_although_they_begin_rounds_elsewhere(loopback, same, mode):
    swarm = loopback(delayed(mode), "abc", inner="adamw", lr=0.01)
    swarm.steps(24)
    thetas = [peer.theta() for peer in swarm.peers.values()]
    assert same(thetas[0], thetas[1]) == (mode == "naive")
    assert all(same(phi_of(peer), phi_of(swarm.peers["a"])) for peer in swarm.peers.values())


# when and where


@each_mode
def test_a_period_of_local_steps_lies_between_messages_and_hides_all_but_the_last_of_them(
    loopback, mode
):
    swarm = loopback(delayed(mode, 5), "ab")
    applied = []
    for step in range(1, 31):
        before = phi_of(swarm.peers["a"])
        swarm.steps(1)
        applied += (
            [step]
            if any(not torch.equal(x, before[n]) for n, x in phi_of(swarm.peers["a"]).items())
            else []
        )
    assert [step for step, _ in swarm.peers["a"].offered] == [5, 10, 15, 20, 25, 30]
    assert applied == [9, 14, 19, 24, 29]


def test_naive_rounds_begin_at_phi_and_those_that_keep_pending_work_at_phi_with_it(loopback):
    starts = {}
    for mode in ("naive", "keep_pending"):
        swarm = loopback(delayed(mode, 4, outer=OuterSGD(1.0)), "ab")
        swarm.steps(12)
        peer = swarm.peers["a"]
        (_, exchange) = peer.offered[-1]
        work_kept = exchange.tensors["bias"] if mode == "keep_pending" else torch.zeros(7)
        assert torch.equal(peer.theta()["bias"], phi_of(peer)["bias"] - work_kept)
        starts[mode] = peer.theta()["bias"]
    assert not torch.equal(starts["naive"], starts["keep_pending"])


def test_with_pending_work_kept_the_first_round_ends_where_the_second_begins(loopback):
    swarm, alone = loopback(delayed("keep_pending", 4), "ab"), loopback(Local, "ab")
    swarm.steps(7), alone.steps(7)
    assert all(
        torch.equal(x, alone.peers["a"].theta()[name])
        for name, x in swarm.peers["a"].theta().items()
    )


@each_mode
def test_a_late_result_delays_the_next_message_and_nothing_is_stepped_over(loopback, mode):
    swarm = loopback(delayed(mode, 3), "ab")
    swarm.late = lambda peer, number: 8 if number == 1 else 0
    swarm.steps(30)
    steps = [step for step, _ in swarm.peers["a"].offered]
    assert steps == [3, 6, 15, 18, 21, 24, 27, 30]  # the second one's result came at step 14
    rounds = [exchange.key.round for _, exchange in swarm.peers["a"].offered]
    assert rounds == list(range(8))


@each_mode
def test_a_peer_that_others_left_behind_replays_and_is_back_in_the_newest_round(loopback, mode):
    swarm = loopback(delayed(mode, 3, outer=OuterSGD(1.0)), "abc")
    swarm.timeout_ticks = 3
    swarm.rests = lambda peer, tick: peer == "c" and 4 <= tick < 24
    swarm.steps(60)
    c = swarm.peers["c"]
    assert c.replayed
    assert all("c" in result.participants for result in swarm.peers["a"].results[-5:])
    outside, total = c.method.untold(c.theta()), work(swarm, "c", c.step)
    delivered = [result.sent["bias"] for result in c.results if result.taken]
    # thirds are rounded
    torch.testing.assert_close(sum(delivered) + outside["bias"], total["bias"], rtol=0, atol=1e-5)


@each_mode
@pytest.mark.parametrize("tick", [8, 9, 10, 11])
def test_a_joiner_replays_the_pending_mean_and_is_in_a_round_soon(loopback, mode, tick):
    swarm = loopback(delayed(mode, 4), "ab", inner="adamw", lr=0.01)
    swarm.late = lambda peer, number: 2  # at first no peer knows that a round is decided
    swarm.steps(tick)
    joiner = swarm.join("c", "a")
    swarm.steps(30)
    assert all("c" in result.participants for result in joiner.results[1:])
    assert joiner.method._members == 3
    assert len(joiner.results) >= 4


@each_mode
def test_carrying_a_snapshot_keeps_sent_and_unsent_work_on_top_of_phi(loopback, mode):
    swarm = loopback(delayed(mode, 4, outer=OuterSGD(1.0)), "ab")
    swarm.steps(14)  # the third message is on its way
    peer, other = swarm.peers["a"], swarm.peers["b"]
    outside = peer.method.untold(peer.theta())
    peer.method.restore(peer.replica, other.outer(), "carry")
    for name, x in peer.theta().items():
        assert torch.equal(x, phi_of(other)[name] - outside[name])
        assert bool(outside[name].any())
    again = peer.method.untold(peer.theta())
    assert all(torch.equal(again[name], x) for name, x in outside.items())


def test_the_outer_rate_and_the_period_are_those_of_the_eager_paper():
    made = Delayed()
    assert (made.mode, made.eager_mix, made.period, made.outer, made.refresh) == (
        "eager",
        None,
        30,
        OuterNesterov(0.4, 0.9),
        20,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "a period of 0 steps"),
        (
            {"period": 1},
            "a period of 1 step is too short to hide an exchange; choose 2 or more.* or delay=0",
        ),
        ({"delay": 2}, "a delay of 2 rounds is not known; choose 1, or 0"),
        ({"mode": "lazy"}, "mode 'lazy' is not known; choose naive, keep_pending or eager"),
        ({"mode": "naive", "eager_mix": 0.5}, "eager_mix=0.5 has no effect in mode naive"),
        ({"eager_mix": 1.5}, r"an eager_mix of 1.5 is out of range; choose one in \[0, 1\]"),
        ({"refresh": 0}, "a refresh every 0 rounds is out of range; choose 1 or more"),
        ({"deadline_s": -1.0}, "a deadline of -1.0 s"),
        ({"codec": "topk:64/4096"}, "codec topk:64/4096 is biased.*no feedback"),
        ({"return_codec": "topk:64/4096"}, "return codec topk:64/4096 is biased"),
    ],
)
def test_options_that_cannot_train_are_refused_with_the_nearest_that_can(options, message):
    with pytest.raises(ValueError, match=message):
        Delayed(**options)


def test_the_bits_of_a_run_are_those_that_were_written_down(loopback, golden, bits_of):
    """Dyadic gradients, four peers, some rounds late, partial or failed: a change here is a change
    of protocol."""
    found = {}
    for mode, mix in itertools.chain(((mode, None) for mode in MODES), [("eager", 0.5)]):
        swarm = loopback(delayed(mode, 3, eager_mix=mix, codec="int8", return_codec="bf16"), "abcd")
        found[f"{mode} {mix}"] = bits_of(swarm)
    assert golden("delayed", found) == found
