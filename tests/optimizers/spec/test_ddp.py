"""DDP compared with local SGD: where they agree, where they differ, and the effect of a missed
step."""

import pytest
import torch

from farflock.optimizers.ddp import DDP
from farflock.optimizers.diloco import DiLoCo
from farflock.optimizers.local import Local
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.parts.state import state_hash


def ones(value: float) -> torch.Tensor:
    return torch.full((6,), value)


def ddp():
    return DDP(codec="fp32", return_codec="fp32")


def test_all_replicas_are_equal_after_each_step(loopback):
    world = loopback(ddp, 4)
    for _ in range(3):
        for peer in range(4):
            world.step(peer, ones(float(peer)))
        world.sync()
        hashes = {
            state_hash(m.snapshot(r)) for m, r in zip(world.methods, world.replicas, strict=True)
        }
        assert len(hashes) == 1
        assert torch.equal(world.theta(0), world.theta(3))


def test_one_peer_is_the_inner_optimizer_bit_for_bit(loopback):
    world, alone = loopback(ddp, 1), loopback(Local, 1)
    for _ in range(3):
        for each in (world, alone):
            each.step(0, ones(0.37))
        world.sync()
    assert torch.equal(world.theta(0), alone.theta(0))


def test_it_equals_local_sgd_with_one_plain_step_a_round(loopback):
    def averaging():
        return DiLoCo(1, OuterSGD(1.0), "fp32", "fp32")

    one, other = loopback(ddp, 3), loopback(averaging, 3)
    for world in (one, other):
        for _ in range(3):
            for peer in range(3):
                world.step(peer, ones(0.5 * peer))
            world.sync()
    torch.testing.assert_close(one.theta(0), other.theta(0))


def test_weights_one_and_three_equal_three_copies_of_the_second(loopback):
    weighted, copied = loopback(ddp, 2), loopback(ddp, 4)
    weighted.step(0, ones(1.0))
    for _ in range(3):
        weighted.step(1, ones(5.0))
    for peer in range(4):
        copied.step(peer, ones(1.0 if peer == 0 else 5.0))
    weighted.sync()
    copied.sync()
    torch.testing.assert_close(weighted.theta(0), copied.theta(0))


def test_a_late_peer_applies_the_same_step_and_keeps_its_gradient(loopback):
    world = loopback(ddp, 2)
    for peer in range(2):
        world.step(peer, ones(1.0))
    world.sync(missing=[1])
    assert torch.equal(world.theta(0), world.theta(1))
    assert torch.equal(world.replicas[1].read(["x"], "grad")["x"], ones(1.0))
    assert torch.equal(world.due(1)[0].tensors["x"], ones(1.0))


def test_a_failed_step_keeps_the_gradient_for_the_next(loopback):
    world = loopback(ddp, 1)
    world.step(0, ones(1.0))
    world.sync(failed=[0])
    assert torch.equal(world.theta(0), ones(0.0))
    world.step(0, ones(3.0))
    exchange = world.due(0)[0]
    assert torch.equal(exchange.tensors["x"], ones(2.0))
    assert exchange.weight == 2.0


def test_gradients_of_an_open_exchange_wait_for_the_next(loopback):
    world = loopback(ddp, 1)
    world.step(0, ones(1.0))
    exchange = world.due(0)[0]
    world.step(0, ones(4.0))
    assert world.due(0) == []
    world.apply(0, exchange, world.result(exchange, [0], exchange.tensors, taken=True))
    assert torch.equal(world.theta(0), ones(-1.0))
    assert torch.equal(world.due(0)[0].tensors["x"], ones(4.0))


def test_a_joiner_is_bit_equal_with_its_moments(loopback):
    world = loopback(ddp, 2)
    for peer in range(2):
        world.step(peer, ones(1.0))
    world.sync()
    state = world.methods[0].snapshot(world.replicas[0])
    fresh = loopback(ddp, 1)
    fresh.methods[0].restore(fresh.replicas[0], state, "adopt")
    assert state_hash(fresh.methods[0].snapshot(fresh.replicas[0])) == state_hash(state)


def test_local_never_asks_and_never_gets(loopback):
    world = loopback(Local, 1)
    world.step(0, ones(1.0))
    assert world.due(0) == []
    assert world.methods[0].streams(world.replicas[0]) == []
    with pytest.raises(AssertionError):
        world.methods[0].apply(world.replicas[0], None, Result("ok", 1))


def test_local_takes_over_a_snapshot(loopback):
    world = loopback(Local, 2)
    world.step(0, ones(2.0))
    world.methods[1].restore(
        world.replicas[1], world.methods[0].snapshot(world.replicas[0]), "adopt"
    )
    assert torch.equal(world.theta(1), world.theta(0))
    assert Progress(0).tokens == 0


# Steps that count more than once, or not at all.


def of_microbatches(world, peer, *values):
    """Take one step of a peer with the sum of the gradients of these microbatches."""
    world.step(peer, sum(map(ones, values), ones(0.0)), weight=float(len(values)))


def test_what_steps_weigh_makes_the_mean_that_of_all_microbatches_wherever_they_went(loopback):
    world, alone = loopback(ddp, 3), loopback(ddp, 1)
    of_microbatches(world, 0, 1.0, 2.0, 6.0)
    of_microbatches(world, 1, 11.0)
    of_microbatches(world, 2)
    of_microbatches(alone, 0, 1.0, 2.0, 6.0, 11.0)
    asked = world.sync()
    alone.sync()
    assert [asked[peer].weight for peer in range(3)] == [3.0, 1.0, 0.0]
    assert torch.equal(asked[2].tensors["x"], ones(0.0)), "nothing, said so, is finite"
    for peer in range(3):
        torch.testing.assert_close(world.theta(peer), ones(-5.0))
    torch.testing.assert_close(world.theta(0), alone.theta(0))


def test_steps_before_one_exchange_weigh_together(loopback):
    world = loopback(ddp, 1)
    of_microbatches(world, 0, 1.0, 2.0, 6.0)
    of_microbatches(world, 0, 11.0)
    (exchange,) = world.due(0)
    assert exchange.weight == 4.0
    assert torch.equal(exchange.tensors["x"], ones(5.0))


@pytest.mark.parametrize("why", ["missing", "failed"])
def test_a_gradient_that_goes_back_weighs_what_it_weighed(loopback, why):
    world = loopback(ddp, 2)
    of_microbatches(world, 0, 4.0)
    of_microbatches(world, 1, 1.0, 2.0, 6.0)
    world.sync(**{why: [1]})
    of_microbatches(world, 1, 11.0)
    (exchange,) = world.due(1)
    assert exchange.weight == 4.0
    torch.testing.assert_close(exchange.tensors["x"], ones(5.0))


def test_weights_are_those_before_after_a_restart_and_none_after_an_adoption(loopback):
    world = loopback(ddp, 1)
    of_microbatches(world, 0, 1.0, 2.0, 6.0)
    pending = world.due(0)[0]
    of_microbatches(world, 0, 11.0, 5.0)
    method, replica = world.methods[0], world.replicas[0]
    again = ddp()
    again.resume(replica, {**method.snapshot(replica), **method.personal(replica)})
    again.apply(replica, pending, Result("failed", 1))
    (exchange,) = again.due(replica, Progress(2))
    assert exchange.weight == 5.0
    torch.testing.assert_close(exchange.tensors["x"], ones(5.0))
    method.restore(replica, method.snapshot(replica), "adopt")
    method.local_step(replica, Progress(3, weight=2.0))
    assert method.due(replica, Progress(3))[0].weight == 2.0
