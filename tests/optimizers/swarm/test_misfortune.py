"""Whole swarms with late, partial, dropped and missed results: nothing is lost and nothing is
counted twice.

Gradients are dyadic and do not depend on the parameters, so all local work can be added up exactly:
with plain SGD at rate 1 it is the sum of the gradients.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflock.optimizers.ddp import DDP
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.method import ExchangeKey, Result
from farflock.optimizers.noloco import NoLoCo
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.parts.state_fields import saved

EXACT = {"codec": "fp32", "return_codec": "fp32"}


def local_sgd(period=4, **more):
    return lambda: DiLoCo(period, OuterSGD(1.0), **{**EXACT, **more})


def start_of(swarm):
    return swarm.build("fresh").theta()


def work(swarm, name, steps, since=0):
    """The sum of a peer's gradients in [since, steps)."""
    theta = start_of(swarm)
    total = {what: torch.zeros_like(x) for what, x in theta.items()}
    for step in range(since, steps):
        total = {
            what: x + swarm.gradient(name, step, what, theta[what]) for what, x in total.items()
        }
    return total


def minus(a, b):
    return {name: a[name] - b[name] for name in a}


def residual_of(peer):
    """The residuals of error feedback, by parameter, in the state that the method saves."""
    own = saved(peer.method, "own")
    return {key.removeprefix("residual."): own[key] for key in own if key.startswith("residual.")}


def phi_of(peer):
    return dict(peer.method.eval_params(peer.replica))


def drop(*missing):
    """A loopback's `taken`: nothing of the (peer, round) pairs in `missing`, all of the others."""
    return lambda peer, number: lambda what, n: [] if (peer, number) in missing else [(0, n)]


# one peer: everything sent, kept as residual or not yet sent is all that was ever done


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), period=st.integers(1, 4))
def test_of_one_peer_nothing_is_lost_or_doubled_whatever_comes_late_partly_or_not(
    loopback, same, any_fate, data, period
):
    swarm = loopback(local_sgd(period), "a")
    any_fate(swarm, data)
    swarm.steps(20)
    theta = swarm.peers["a"].theta()
    assert same(theta, minus(start_of(swarm), work(swarm, "a", 20)))


@pytest.mark.parametrize("codec", ["topk:2/8", "int4:2", "int8", "bf16", "topk:1/2"])
@pytest.mark.parametrize("late", [0, 1, 3])
def test_sent_and_residual_and_unsent_work_are_all_local_work(loopback, codec, late):
    swarm = loopback(local_sgd(3, codec=codec, feedback=1.0), "a")
    swarm.late = lambda peer, number: late
    swarm.fails = lambda number: number == 1
    swarm.taken = lambda peer, number: (
        (lambda what, n: [(1, 5)]) if number == 2 else (lambda what, n: [(0, n)])
    )
    swarm.steps(17)
    peer = swarm.peers["a"]
    residual, phi, theta = residual_of(peer), phi_of(peer), peer.theta()
    for name, total in work(swarm, "a", 17).items():
        arrived = start_of(swarm)[name] - phi[name]  # the sum of all that was sent and taken
        unsent = phi[name] - theta[name]
        torch.testing.assert_close(arrived + residual[name] + unsent, total, rtol=0, atol=1e-5)
    lossy = codec.startswith(("topk", "int4"))
    assert any(float(x.abs().max()) > 1e-3 for x in residual.values()) or not lossy


def test_feedback_is_settled_when_the_result_is_known_and_not_before(loopback, same):
    swarm = loopback(local_sgd(2, codec="topk:2/8", feedback=0.5), "a")
    swarm.late = lambda peer, number: 2 if number == 1 else 0
    swarm.steps(2)
    peer = swarm.peers["a"]
    settled = {name: x.clone() for name, x in residual_of(peer).items()}
    swarm.steps(2)
    assert peer.driver.pending == (ExchangeKey("delta", 1),)
    assert same(residual_of(peer), settled)
    message = dict(peer.offered[-1][1].tensors)
    swarm.steps(2)
    assert peer.driver.pending == (ExchangeKey("delta", 2),) or not peer.driver.pending
    sent = peer.results[1].sent
    assert same(residual_of(peer), {name: message[name] - sent[name] for name in message})


def test_a_failed_round_leaves_the_residual_as_it_was(loopback, same):
    swarm = loopback(local_sgd(2, codec="topk:2/8", feedback=0.5), "a")
    swarm.fails = lambda number: number == 1
    swarm.steps(2)
    peer = swarm.peers["a"]
    settled = {name: x.clone() for name, x in residual_of(peer).items()}
    swarm.steps(2)
    assert [result.status for result in peer.results] == ["alone", "failed"]
    assert same(residual_of(peer), settled)


def test_the_next_message_is_new_work_and_the_decayed_residual(loopback):
    swarm = loopback(local_sgd(2, codec="topk:2/8", feedback=0.5), "a")
    swarm.steps(2)
    peer = swarm.peers["a"]
    residual = {name: x.clone() for name, x in residual_of(peer).items()}
    swarm.steps(2)
    for name, x in peer.offered[1][1].tensors.items():
        assert torch.equal(x, residual[name] / 2 + work(swarm, "a", 4, since=2)[name])
        assert residual[name].any()


@pytest.mark.parametrize(("mode", "share"), [("adopt", 0.0), ("carry", 0.5)])
def test_adopting_a_snapshot_drops_the_residual_and_carrying_keeps_it(loopback, mode, share):
    swarm = loopback(local_sgd(2, codec="topk:2/8", feedback=0.5), "a")
    swarm.steps(2)
    peer = swarm.peers["a"]
    residual = {name: x.clone() for name, x in residual_of(peer).items()}
    peer.method.restore(peer.replica, peer.outer(), mode)
    swarm.steps(2)
    for name, x in peer.offered[1][1].tensors.items():
        assert torch.equal(x, residual[name] * share + work(swarm, "a", 4, since=2)[name])


# several peers


def test_phi_moves_by_the_mean_of_all_work_when_everybody_is_in(loopback, same):
    swarm = loopback(local_sgd(4), "abcd")
    swarm.late = lambda peer, number: {"b": 1, "c": 3}.get(peer, 0)
    swarm.steps(8)
    total = work(swarm, "a", 8)
    for name in "bcd":
        total = {what: total[what] + x for what, x in work(swarm, name, 8).items()}
    expected = {what: x - total[what] / 4 for what, x in start_of(swarm).items()}
    swarm.fails = lambda number: True
    swarm.steps(3)
    assert all(same(phi_of(peer), expected) for peer in swarm.peers.values())


def test_work_that_came_too_late_is_in_the_next_round_instead(loopback, same):
    swarm = loopback(local_sgd(4), "ab")
    swarm.taken = drop(("b", 0))
    swarm.steps(4)
    a, b = swarm.peers["a"], swarm.peers["b"]
    assert same(phi_of(a), minus(start_of(swarm), work(swarm, "a", 4)))
    assert same(phi_of(b), phi_of(a))
    assert same(b.theta(), minus(start_of(swarm), work(swarm, "b", 4)))
    swarm.steps(4)
    (_, second) = b.offered[-1]
    expected = minus(
        phi_of_start := minus(start_of(swarm), work(swarm, "a", 4)),
        minus(start_of(swarm), work(swarm, "b", 8)),
    )
    assert same(dict(second.tensors), expected)
    assert phi_of_start.keys() == expected.keys()
    assert same(b.theta(), phi_of(b))


def test_a_late_result_puts_the_steps_made_since_on_top_of_the_new_phi(loopback, same):
    swarm = loopback(local_sgd(4), "ab")
    swarm.late = lambda peer, number: 2 if peer == "b" else 0
    swarm.steps(6)
    a, b = swarm.peers["a"], swarm.peers["b"]
    assert same(phi_of(a), phi_of(b))
    assert same(b.theta(), minus(phi_of(b), work(swarm, "b", 6, since=4)))
    assert [result.steps_since for result in b.results] == [2]


def test_where_only_some_ranges_were_taken_the_rest_of_the_work_stays(loopback):
    swarm = loopback(local_sgd(4), "ab")
    swarm.taken = lambda peer, number: (
        (lambda what, n: [(0, 3)]) if peer == "b" else (lambda what, n: [(0, n)])
    )
    swarm.steps(4)
    b = swarm.peers["b"]
    own = minus(start_of(swarm), work(swarm, "b", 4))
    for name, theta in b.theta().items():
        flat, phi = theta.reshape(-1), phi_of(b)[name].reshape(-1)
        assert torch.equal(flat[:3], phi[:3])
        assert torch.equal(flat[3:], own[name].reshape(-1)[3:])


def test_a_replayed_round_moves_phi_and_keeps_local_work(loopback, same):
    swarm = loopback(local_sgd(4), "ab")
    swarm.steps(2)
    b = swarm.peers["b"]
    b.asleep = True
    swarm.steps(2)
    before = b.theta()
    swarm.replay("b", ExchangeKey("delta", 0))
    assert same(b.theta(), before)
    assert same(phi_of(b), phi_of(swarm.peers["a"]))
    assert same(b.outer(), swarm.peers["a"].outer())


@pytest.mark.parametrize("momentum", [False, True])
def test_a_peer_that_slept_and_replayed_is_as_one_whose_rounds_were_dropped(
    loopback, same, momentum
):
    make = (lambda: DiLoCo(4, **EXACT)) if momentum else local_sgd(4)
    slept, dropped = loopback(make, "ab"), loopback(make, "ab")
    dropped.taken = drop(("b", 0))
    dropped.steps(4)
    slept.steps(3)
    slept.peers["b"].asleep = True
    slept.steps(1)
    slept.replay("b", ExchangeKey("delta", 0))
    assert same(slept.peers["b"].outer(), dropped.peers["b"].outer())


def test_carrying_a_snapshot_puts_unsent_work_on_top_and_adopting_drops_it(loopback, same):
    swarm = loopback(local_sgd(4), "ab")
    swarm.steps(8)
    state = swarm.peers["a"].outer()
    for mode in ("carry", "adopt"):
        late = swarm.build("b")
        own = loopback(local_sgd(4), "b")
        own.peers["b"] = late
        own.steps(3)
        late.method.restore(late.replica, state, mode)
        assert same(late.outer(), state)
        new = phi_of(late)
        assert same(late.theta(), minus(new, work(swarm, "b", 3)) if mode == "carry" else new)


def test_a_joiner_that_adopts_takes_part_from_the_next_round_on(loopback, same):
    swarm = loopback(local_sgd(4), "ab")
    swarm.steps(8)
    joiner = swarm.build("c")
    joiner.method.restore(joiner.replica, swarm.peers["a"].outer(), "adopt")
    swarm.peers["c"] = joiner
    swarm.steps(4)
    assert [result.participants for result in joiner.results] == [("a", "b", "c")]
    assert all(same(peer.outer(), joiner.outer()) for peer in swarm.peers.values())


def test_permuting_the_peers_names_of_equal_work_leaves_phi_bitwise_unchanged(loopback, same):
    """The sum is made in the order of peers, so only what each peer did may matter, never which
    came first."""
    swarms = [loopback(local_sgd(3), order) for order in ("abcdefg", "gfedcba", "dagcebf")]
    for swarm in swarms:
        swarm.steps(9)
    first, *others = [swarm.peers["a"].outer() for swarm in swarms]
    assert all(same(first, other) for other in others)


# DDP


@pytest.mark.parametrize("late", [(0,), (1,), (2, 0, 3), (1, 4)])
@pytest.mark.parametrize("failing", [set(), {1}, {0, 3, 4}])
def test_every_gradient_is_sent_once_with_its_weight_or_waits(loopback, late, failing):
    swarm = loopback(lambda: DDP(codec="fp32", return_codec="fp32"), "ab", lr=0.5)
    swarm.late = lambda peer, number: late[number % len(late)] if peer == "b" else 0
    swarm.fails = lambda number: number in failing
    swarm.taken = drop(("b", 2))
    swarm.steps(14)
    for peer in swarm.peers.values():
        waiting = peer.replica.read(peer.replica.names, "grad")
        counted = [
            exchange
            for _, exchange in peer.offered
            if exchange.key in peer.driver.pending
            or not (exchange.key.round in failing or (peer.name, exchange.key.round) == ("b", 2))
        ]
        assert len(peer.offered) > 3
        for name, total in work(swarm, peer.name, peer.step).items():
            sent = sum(exchange.weight * exchange.tensors[name] for exchange in counted)
            torch.testing.assert_close(sent + waiting[name], total, rtol=0, atol=1e-5)


# NoLoCo


def test_a_late_pair_result_keeps_the_steps_made_since(loopback, same):
    make = lambda: NoLoCo(4, alpha=0.0, beta=1.0, gamma=1.0, codec="fp32")  # noqa: E731
    swarm = loopback(make, "a")
    swarm.late = lambda peer, number: number % 4
    swarm.steps(23)
    assert same(swarm.peers["a"].theta(), minus(start_of(swarm), work(swarm, "a", 23)))


def test_failed_pairs_keep_everything(loopback, same):
    swarm = loopback(lambda: NoLoCo(4, alpha=0.0, beta=1.0, gamma=1.0, codec="fp32"), "a")
    swarm.fails = lambda number: number % 2 == 0
    swarm.steps(16)
    peer = swarm.peers["a"]
    assert [result.status for result in peer.results] == ["failed", "alone"] * 2
    assert same(peer.theta(), minus(start_of(swarm), work(swarm, "a", 16)))


def test_a_round_between_others_means_nothing_to_a_pair(loopback, same):
    swarm = loopback(lambda: NoLoCo(4, codec="fp32"), "a")
    swarm.steps(6)
    peer = swarm.peers["a"]
    before, theta = peer.outer(), peer.theta()
    mean = {name: x + 1 for name, x in theta.items()}
    peer.driver.replay(
        ExchangeKey("pairs", 1), Result("ok", 2, ("x", "y"), (1.0, 1.0), mean=mean), peer.progress
    )
    assert same(peer.theta(), theta)
    after = peer.outer()
    assert int(after.pop("round")) == 2
    before.pop("round")
    assert same(after, before)


@pytest.mark.parametrize("gamma", [0.7, 0.6])
def test_a_pair_keeps_the_work_that_was_not_taken(loopback, gamma):
    """This also holds where both vectors are sent and what was taken is named `delta.NAME`."""
    swarm = loopback(lambda: NoLoCo(4, gamma=gamma, codec="fp32"), "ab")
    swarm.taken = lambda peer, number: (
        (lambda what, n: [(0, 3)]) if peer == "b" else (lambda what, n: [(0, n)])
    )
    swarm.steps(4)
    own = minus(start_of(swarm), work(swarm, "b", 4))
    b = swarm.peers["b"]
    for name, theta in b.theta().items():
        flat, phi = theta.reshape(-1), phi_of(b)[name].reshape(-1)
        assert torch.equal(flat[:3], phi[:3])
        assert torch.equal(flat[3:], own[name].reshape(-1)[3:])
        assert not torch.equal(flat, phi)


# unequal machines


@pytest.mark.parametrize("weights", ["uniform", "steps"])
def test_in_rounds_of_seconds_each_does_what_it_can_and_weighs_what_it_is_told(
    loopback, same, weights
):
    swarm = loopback(local_sgd(round_s=8.0, weights=weights), "abc")
    swarm.rests = lambda peer, tick: (
        (peer == "b" and tick % 2 == 0) or (peer == "c" and tick % 4 != 3)
    )
    swarm.steps(9)
    assert {name: peer.step for name, peer in swarm.peers.items()} == {"a": 9, "b": 4, "c": 2}
    for name, share in {"a": 8.0, "b": 4.0, "c": 2.0}.items():
        (offer,) = [exchange for _, exchange in swarm.peers[name].offered]
        assert offer.weight == (share if weights == "steps" else 1.0)
    (result,) = swarm.peers["a"].results
    assert result.status == "ok"
    works = {name: work(swarm, name, steps) for name, steps in {"a": 8, "b": 4, "c": 2}.items()}
    shares = (
        {"a": 8 / 14, "b": 4 / 14, "c": 2 / 14}
        if weights == "steps"
        else dict.fromkeys("abc", 1 / 3)
    )
    for name, start in start_of(swarm).items():
        mean = sum(shares[peer] * works[peer][name] for peer in "abc")
        torch.testing.assert_close(phi_of(swarm.peers["a"])[name], start - mean)
    assert same(swarm.peers["a"].outer(), swarm.peers["c"].outer())


def test_work_that_was_not_taken_weighs_with_the_next(loopback):
    swarm = loopback(local_sgd(weights="steps"), "ab")
    swarm.taken = drop(("b", 0))
    swarm.steps(12)
    weights = {
        name: [exchange.weight for _, exchange in peer.offered]
        for name, peer in swarm.peers.items()
    }
    assert weights == {"a": [4.0, 4.0, 4.0], "b": [4.0, 8.0, 4.0]}
