"""DiLoCo: the invariants of its specification, and what must hold when things go wrong."""

import pytest
import torch

from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.method import Result
from farflock.optimizers.parts.outer import OuterNesterov, OuterSGD
from farflock.optimizers.parts.state import state_hash


def averaging(period=1, codec="fp32", **options):
    return DiLoCo(period=period, outer=OuterSGD(1.0), codec=codec, return_codec="fp32", **options)


def ones(value: float) -> torch.Tensor:
    return torch.full((6,), value)


def test_one_peer_with_plain_averaging_is_the_inner_optimizer(loopback):
    world = loopback(lambda: averaging(2), 1)
    for step in range(4):
        world.step(0, ones(0.5))
        world.sync()
        assert torch.equal(world.theta(0), ones(-0.5 * (step + 1)))


def test_nesterov_without_momentum_and_rate_one_is_plain_averaging(loopback):
    plain = loopback(averaging, 2)
    nesterov = loopback(lambda: DiLoCo(1, OuterNesterov(1.0, 0.0), "fp32", "fp32"), 2)
    for world in (plain, nesterov):
        for peer in range(2):
            world.step(peer, ones(0.25 * (peer + 1)))
        world.sync()
    assert torch.equal(plain.phi(0), nesterov.phi(0))


def test_plain_averaging_gives_exactly_the_mean_of_the_replicas(loopback):
    world = loopback(averaging, 4)
    for peer in range(4):
        world.step(peer, ones(float(peer)))
    world.sync()
    assert all(torch.equal(world.theta(peer), ones(-1.5)) for peer in range(4))


def test_identical_replicas_behave_as_one(loopback):
    one, many = (
        loopback(lambda: DiLoCo(1, codec="fp32"), 1),
        loopback(lambda: DiLoCo(1, codec="fp32"), 7),
    )
    for world, peers in ((one, 1), (many, 7)):
        for _ in range(3):
            for peer in range(peers):
                world.step(peer, ones(0.5))
            world.sync()
    torch.testing.assert_close(one.phi(0), many.phi(6))


def test_without_local_change_phi_moves_by_momentum_alone(loopback):
    world = loopback(lambda: DiLoCo(1, OuterNesterov(0.7, 0.9), "fp32", "fp32"), 1)
    world.step(0, ones(1.0))
    world.sync()
    before = world.phi(0)
    world.step(0, ones(0.0))
    world.sync()
    torch.testing.assert_close(world.phi(0), before - 0.7 * 0.9 * 0.9 * ones(1.0))


def test_exactly_the_period_of_local_steps_lies_between_two_exchanges(loopback):
    world = loopback(lambda: averaging(3), 1)
    asked = []
    for step in range(12):
        world.step(0, ones(0.1))
        if world.sync():
            asked.append(step + 1)
    assert asked == [3, 6, 9, 12]


def test_a_dropped_worker_leaves_phi_as_if_it_had_never_been_there(loopback):
    with_it, without = loopback(averaging, 3), loopback(averaging, 2)
    for world, peers in ((with_it, 3), (without, 2)):
        for peer in range(peers):
            world.step(peer, ones(float(peer + 1)))
    with_it.sync(missing=[2])
    without.sync()
    assert torch.equal(with_it.phi(0), without.phi(0))


def test_a_dropped_worker_keeps_its_work_and_sends_it_next_time(loopback):
    world = loopback(averaging, 2)
    for peer in range(2):
        world.step(peer, ones(1.0))
    world.sync(missing=[1])
    assert torch.equal(world.theta(1), ones(-1.0))
    for peer in range(2):
        world.step(peer, ones(1.0))
    sent = world.sync()[1].tensors["x"]
    assert torch.equal(sent, world_delta(phi=-1.0, theta=-2.0))


def world_delta(phi: float, theta: float) -> torch.Tensor:
    return ones(phi - theta)


def test_a_failed_round_leaves_outer_state_and_local_work_untouched(loopback):
    world = loopback(lambda: DiLoCo(1, codec="fp32"), 2)
    world.step(0, ones(1.0))
    world.step(1, ones(1.0))
    before = world.methods[0].snapshot(world.replicas[0])
    world.sync(failed=[0, 1])
    after = world.methods[0].snapshot(world.replicas[0])
    assert torch.equal(before["phi.x"], after["phi.x"])
    assert torch.equal(before["momentum.x"], after["momentum.x"])
    assert torch.equal(world.theta(0), ones(-1.0))
    world.step(0, ones(1.0))
    # the next message covers both steps
    assert torch.equal(world.due(0)[0].tensors["x"], ones(2.0))


def test_a_late_result_keeps_the_steps_made_since_and_counts_nothing_twice(loopback):
    world = loopback(averaging, 1)
    world.step(0, ones(1.0))
    exchange = world.due(0)[0]
    world.step(0, ones(0.25))
    world.step(0, ones(0.25))
    result = world.result(exchange, [0], exchange.tensors, taken=True)
    world.apply(0, exchange, result, steps_since=2)
    assert torch.equal(world.phi(0), ones(-1.0))
    assert torch.equal(world.theta(0), ones(-1.5))
    assert torch.equal(world.due(0)[0].tensors["x"], ones(0.5))


def test_where_only_some_was_taken_the_rest_is_kept(loopback):
    world = loopback(averaging, 2)
    for peer in range(2):
        world.step(peer, ones(1.0))
    exchange = world.due(0)[0]
    ranges = {"x": [(0, 2)]}
    result = Result(
        "partial", 1, ("peer0",), (1.0,), mean={"x": ones(4.0)}, sent=exchange.tensors, taken=ranges
    )
    world.apply(0, exchange, result)
    assert torch.equal(world.phi(0), ones(-4.0))
    assert world.theta(0).tolist() == [-4.0, -4.0, -1.0, -1.0, -1.0, -1.0]


def test_a_replayed_round_moves_phi_and_keeps_local_work(loopback):
    world = loopback(lambda: averaging(5), 1)
    world.step(0, ones(1.0))
    exchange = world.methods[0].streams(world.replicas[0])[0]
    replay = Result("partial", 8, ("peer9",), (1.0,), mean={"x": ones(3.0)})
    world.methods[0].apply(
        world.replicas[0], exchange.__class__(exchange.key, "mean", exchange.group, {}), replay
    )
    assert torch.equal(world.phi(0), ones(-3.0))
    assert torch.equal(world.theta(0), ones(-1.0))
    for _ in range(4):
        world.step(0, ones(0.0))
    assert world.due(0)[0].key.round == 8


def test_no_second_exchange_while_one_is_open(loopback):
    world = loopback(averaging, 1)
    world.step(0, ones(1.0))
    assert world.due(0)
    world.step(0, ones(1.0))
    assert world.due(0) == []


def test_later_steps_do_not_change_what_was_asked_for(loopback):
    world = loopback(averaging, 1)
    world.step(0, ones(1.0))
    exchange = world.due(0)[0]
    world.step(0, ones(5.0))
    assert torch.equal(exchange.tensors["x"], ones(1.0))


def test_a_joiner_that_adopts_a_snapshot_has_the_same_future(loopback):
    world = loopback(lambda: DiLoCo(1, codec="fp32"), 2)
    for _ in range(2):
        for peer in range(2):
            world.step(peer, ones(0.5))
        world.sync()
    state = world.methods[0].snapshot(world.replicas[0])
    fresh = loopback(lambda: DiLoCo(1, codec="fp32"), 1)
    fresh.methods[0].restore(fresh.replicas[0], state, "adopt")
    assert state_hash(fresh.methods[0].snapshot(fresh.replicas[0])) == state_hash(state)
    assert torch.equal(fresh.theta(0), world.theta(0))


def test_carrying_a_snapshot_keeps_local_work_on_top(loopback):
    world = loopback(lambda: averaging(9), 1)
    world.step(0, ones(1.0))
    state = {"phi.x": ones(-7.0), "momentum.x": ones(0.0), "round": torch.tensor(4)}
    world.methods[0].restore(world.replicas[0], state, "carry")
    assert torch.equal(world.theta(0), ones(-8.0))


def test_feedback_is_settled_only_where_a_message_was_taken(loopback):
    world = loopback(lambda: averaging(codec="topk:2/8", feedback=1.0), 1)
    world.step(0, torch.tensor([5.0, 4.0, 1.0, 1.0, 0.0, 0.0]))
    exchange = world.due(0)[0]
    kept = torch.tensor([5.0, 4.0, 0.0, 0.0, 0.0, 0.0])
    world.apply(0, exchange, Result("failed", 1))
    world.step(0, ones(0.0))
    again = world.due(0)[0]
    # It was not taken: nothing is lost, nothing doubled.
    assert torch.equal(again.tensors["x"], exchange.tensors["x"])
    taken = {"x": [(0, 6)]}
    world.apply(
        0, again, Result("ok", 2, ("p",), (1.0,), mean={"x": kept}, sent={"x": kept}, taken=taken)
    )
    world.step(0, ones(0.0))
    assert world.due(0)[0].tensors["x"].tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"period": 0}, "period"),
        ({"codec": "topk:2/8"}, "feedback"),
        ({"return_codec": "topk:2/8"}, "return"),
    ],
)
def test_impossible_options_are_refused_with_the_reason(options, word):
    with pytest.raises(ValueError, match=word):
        DiLoCo(**options)
