"""Snapshots from other peers: one that does not fit is refused as a whole, and one that fits is
adopted in the way that is asked for."""

import weakref
from dataclasses import replace

import pytest
import torch

from farflock.optimizers.catalog import METHODS
from farflock.optimizers.method import All, Exchange, Progress, Result
from farflock.optimizers.parts.state import WrongState, state_hash

each_method = pytest.mark.parametrize("name", METHODS)
TALKING = [name for name in METHODS if name != "local"]


def trained(quick, vectors, name, steps=2, gradient=1.0):
    """A method after some rounds by itself."""
    replica = vectors(a=torch.arange(4.0), b=torch.ones(2, 3))
    made = quick(name)
    for step in range(steps):
        replica.add_gradient(a=torch.full((4,), gradient), b=torch.full((2, 3), gradient / 2))
        made.local_step(replica, Progress(step))
        asked = made.due(replica, Progress(step + 1))
        for exchange in asked:  # second phases too
            everything = {what: [(0, tensor.numel())] for what, tensor in exchange.tensors.items()}
            number, sent = exchange.key.round + exchange.stride, exchange.tensors
            gathered = {"me": sent} if exchange.kind == "gather" else None
            result = Result("alone", number, ("me",), (1.0,), sent, gathered, sent, everything)
            asked += made.apply(replica, exchange, result)
    return made, replica


def broken_states(state):
    """Each way in which one entry of a state can be wrong."""
    for name, tensor in state.items():
        yield {other: kept for other, kept in state.items() if other != name}
        yield {**state, name: torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)}
        yield {**state, name: tensor.to(torch.float64)}
        yield {
            **state,
            name: torch.full_like(tensor, -1) if name == "round" else tensor * float("nan"),
        }


@each_method
@pytest.mark.parametrize("mode", ["adopt", "carry"])
def test_a_state_with_one_wrong_entry_is_refused_and_changes_nothing(quick, vectors, name, mode):
    made, replica = trained(quick, vectors, name)
    before, theta = state_hash(made.snapshot(replica)), replica.read(replica.names, "param")
    other, teacher = trained(quick, vectors, name, steps=4, gradient=0.5)
    count = 0
    for state in broken_states(other.snapshot(teacher)):
        with pytest.raises(WrongState, match=r"must be|holds NaN"):
            made.restore(replica, state, mode)
        count += 1
        assert state_hash(made.snapshot(replica)) == before
        assert all(
            torch.equal(x, theta[what]) for what, x in replica.read(replica.names, "param").items()
        )
    assert count >= 8


@each_method
def test_adopting_makes_theta_what_the_snapshot_evaluates(quick, vectors, name):
    teacher, source = trained(quick, vectors, name, steps=4)
    joiner, replica = trained(quick, vectors, name, steps=1, gradient=9.0)
    joiner.restore(replica, teacher.snapshot(source), "adopt")
    for what, x in teacher.eval_params(source).items():
        assert torch.equal(replica.read([what], "param")[what], x)
        assert torch.equal(joiner.eval_params(replica)[what], x)
    assert state_hash(joiner.snapshot(replica)) == state_hash(teacher.snapshot(source))


@each_method
def test_a_method_keeps_no_hold_of_the_state_that_it_took_over(quick, vectors, name):
    teacher, source = trained(quick, vectors, name, steps=4)
    state = teacher.snapshot(source)
    joiner, replica = trained(quick, vectors, name, steps=0)
    joiner.restore(replica, state, "adopt")
    before = state_hash(joiner.snapshot(replica))
    for tensor in state.values():
        tensor.fill_(7)
    assert state_hash(joiner.snapshot(replica)) == before


@pytest.mark.parametrize("name", ["diloco", "noloco"])
@pytest.mark.parametrize("asked", [False, True])
def test_carrying_puts_local_work_on_the_new_phi_and_the_next_exchange_holds_it(
    quick, vectors, name, asked
):
    """theta <- phi_new + (theta - phi_old), even if an exchange was pending, since no peer took
    it."""
    teacher, source = trained(quick, vectors, name, steps=4)
    made, replica = trained(quick, vectors, name)
    phi_old = made.eval_params(replica)
    for step in range(3 if asked else 1):
        replica.add_gradient(a=torch.full((4,), 0.25), b=torch.full((2, 3), 0.5))
        made.local_step(replica, Progress(step))
        assert bool(made.due(replica, Progress(step))) == (step == 1)
    work = {what: x - phi_old[what] for what, x in replica.read(replica.names, "param").items()}
    made.restore(replica, teacher.snapshot(source), "carry")
    phi_new = made.eval_params(replica)
    for what, theta in replica.read(replica.names, "param").items():
        assert torch.equal(theta, phi_new[what] + work[what])
        assert torch.equal(phi_new[what], teacher.eval_params(source)[what])
    assert state_hash(made.snapshot(replica)) == state_hash(teacher.snapshot(source))
    for step in range(2):
        made.local_step(replica, Progress(step))
    (exchange,) = made.due(replica, Progress(2))
    assert exchange.key.round == 2
    for what, tensor in exchange.tensors.items():
        covered = phi_new[what] - tensor if name == "diloco" else tensor
        torch.testing.assert_close(covered, phi_new[what] + work[what])


@pytest.mark.parametrize(("mode", "kept"), [("adopt", {}), ("carry", {"a": 0.5, "b": 4.0})])
def test_carrying_a_feedback_residual_keeps_what_was_never_delivered(quick, vectors, mode, kept):
    replica = vectors(a=torch.zeros(2), b=torch.zeros(2))
    made = quick("diloco", period=1, codec="topk:1/2", feedback=1.0)
    replica.add_gradient(a=torch.tensor([2.0, 0.5]), b=torch.tensor([4.0, 8.0]))
    made.local_step(replica, Progress(0))
    (exchange,) = made.due(replica, Progress(1))
    sent = {"a": torch.tensor([2.0, 0.0]), "b": torch.tensor([0.0, 8.0])}
    taken = {"a": [(0, 2)], "b": [(0, 2)]}
    made.apply(replica, exchange, Result("alone", 1, ("me",), (1.0,), sent, None, sent, taken))
    made.restore(replica, made.snapshot(replica), mode)
    made.local_step(replica, Progress(1))
    (exchange,) = made.due(replica, Progress(2))
    missing = {what: float(x.abs().sum()) for what, x in exchange.tensors.items() if bool(x.any())}
    assert missing == kept


@pytest.mark.parametrize(("mode", "steps"), [("carry", 3), ("adopt", 1)])
def test_ddp_carries_pending_and_waiting_gradients_and_adopting_drops_them(
    quick, vectors, mode, steps
):
    made, replica = trained(quick, vectors, "ddp")
    state = made.snapshot(replica)
    for step in range(2):  # one is sent, one waits
        replica.add_gradient(a=torch.full((4,), 2.0**step))
        made.local_step(replica, Progress(step))
        made.due(replica, Progress(step + 1))
    made.restore(replica, state, mode)
    replica.add_gradient(a=torch.full((4,), 6.0))
    made.local_step(replica, Progress(3))
    (exchange,) = made.due(replica, Progress(4))
    assert exchange.weight == steps
    assert torch.allclose(exchange.tensors["a"], torch.full((4,), 3.0 if mode == "carry" else 6.0))


@pytest.mark.parametrize("name", TALKING)
def test_a_restored_method_asks_for_the_snapshots_round(quick, vectors, name):
    teacher, source = trained(quick, vectors, name, steps=6)
    state = teacher.snapshot(source)
    joiner, replica = trained(quick, vectors, name, steps=0)
    joiner.restore(replica, state, "adopt")
    for step in range(2):
        replica.add_gradient(a=torch.ones(4))
        joiner.local_step(replica, Progress(step))
        asked = joiner.due(replica, Progress(step + 1))
        if asked:
            break
    rounds = [int(number) for what, number in state.items() if what.partition(".")[0] == "round"]
    assert asked[0].key.round in rounds
    assert min(rounds) > 0


@pytest.mark.parametrize(("mode", "left"), [("adopt", 0), ("carry", 4)])
def test_what_is_adopted_has_no_old_state_beside_it(quick, vectors, monkeypatch, mode, left):
    made, replica = trained(quick, vectors, "diloco")
    state = trained(quick, vectors, "diloco", steps=4)[0].snapshot(replica)
    old = [weakref.ref(x) for x in made.live(replica).shared.values() if x.dim()]
    counts = []

    def allocate(shape):
        counts.append(sum(one() is not None for one in old))
        return torch.zeros(shape)

    monkeypatch.setattr(type(replica), "allocate", lambda replica, shape: allocate(shape))
    made.restore(replica, state, mode)
    assert counts == [left] * 4


@each_method
def test_a_method_that_begins_after_rounds_that_it_has_not_seen_goes_on_with_the_next(
    quick, vectors, name
):
    """A stage that nobody serves any more begins anew at the number that it had: to its method the
    rounds before have failed."""
    made, replica = quick(name), vectors(a=torch.arange(4.0), b=torch.ones(2, 3))
    templates = made.streams(replica)
    lasts = {each.key.stream: each.key.round + 5 * each.stride for each in templates}
    made.snapshot(replica)
    for each in templates:
        key = replace(each.key, round=lasts[each.key.stream])
        failed = Result("failed", key.round + each.stride)
        assert not made.apply(replica, Exchange(key, "mean", All(), {}), failed)
    firsts = {}
    for step in range(20):
        replica.add_gradient(a=torch.ones(4), b=torch.ones(2, 3))
        made.local_step(replica, Progress(step))
        for exchange in made.due(replica, Progress(step + 1)):
            firsts.setdefault(exchange.key.stream, exchange.key.round)
    strides = {each.key.stream: each.stride for each in templates}
    assert firsts or not templates
    assert all(number == lasts[stream] + strides[stream] for stream, number in firsts.items())
