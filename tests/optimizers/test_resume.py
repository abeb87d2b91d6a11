"""A peer that stopped resumes as if it never had, between any two calls, even while an exchange is
pending."""

from dataclasses import replace

import pytest
import torch

from farflock.optimizers.catalog import METHODS
from farflock.optimizers.method import Progress, Result
from farflock.optimizers.parts.state import WrongState, state_hash

each_method = pytest.mark.parametrize("name", METHODS)
OPTIONS = {
    "diloco": [{}, {"feedback": 0.9, "codec": "int4"}],
    "noloco": [{}, {"gamma": 0.6}],
    "streaming": [{}, {"feedback": 0.9, "codec": "int4"}],
    "delayed": [{}, {"mode": "naive"}, {"mode": "keep_pending"}, {"eager_mix": 0.5}, {"delay": 0}],
    "co2": [{}, {"delay": 0}],
}
CASES = [(name, options) for name in METHODS for options in OPTIONS.get(name, [{}])]
STEPS = 9
LAG = 2  # a result comes this many steps after it was asked for


def fresh(quick, vectors, name, options):
    return quick(name, **options), vectors(a=torch.arange(4.0), b=torch.ones(2, 3))


def result_of(exchange, failed):
    """A possible answer of a group of two; `sent` is rounded, so that a residual remains."""
    number = exchange.key.round + exchange.stride
    if failed:
        return Result("failed", number)
    sent = {what: (tensor * 8).round() / 8 for what, tensor in exchange.tensors.items()}
    mean = {what: tensor * 0.75 for what, tensor in sent.items()}
    everything = {what: [(0, tensor.numel())] for what, tensor in sent.items()}
    gathered = {"me": sent, "you": mean} if exchange.kind == "gather" else None
    return Result("ok", number, ("me", "you"), (1.0, 1.0), mean, gathered, sent, everything)


def play(quick, vectors, name, options, stop_at=None):
    """Train; after step `stop_at` copy everything into a new method and a new replica, which
    continue."""
    made, replica = fresh(quick, vectors, name, options)
    pending = []
    for step in range(STEPS):
        replica.add_gradient(a=torch.full((4,), 0.1 * step), b=torch.full((2, 3), 0.3))
        made.local_step(replica, Progress(step))
        pending += [(step, exchange) for exchange in made.due(replica, Progress(step + 1))]
        if pending and step >= pending[0][0] + LAG:
            since, exchange = pending.pop(0)
            result = replace(result_of(exchange, failed=step == 4), steps_since=step - since)
            pending += [(step, second) for second in made.apply(replica, exchange, result)]
        if step == stop_at:
            state = {**made.snapshot(replica), **made.personal(replica)}
            old, (made, replica) = replica, fresh(quick, vectors, name, options)
            for what in old.tensors:
                replica.write(old.read(old.names, what), what)
            made.resume(replica, state)
    return {
        **made.snapshot(replica),
        **made.personal(replica),
        **replica.read(replica.names, "param"),
    }


@pytest.mark.parametrize(("name", "options"), CASES)
def test_stopping_after_any_step_changes_no_bit(quick, vectors, name, options):
    whole = state_hash(play(quick, vectors, name, options))
    for step in range(STEPS):
        assert state_hash(play(quick, vectors, name, options, stop_at=step)) == whole, (
            f"stopped after step {step}"
        )


@pytest.mark.parametrize(("name", "options"), CASES)
def test_snapshot_and_personal_share_no_name(quick, vectors, name, options):
    made, replica = fresh(quick, vectors, name, options)
    assert not made.snapshot(replica).keys() & made.personal(replica).keys()


@pytest.mark.parametrize("name", [name for name in METHODS if name != "local"])
def test_a_personal_state_without_its_counters_is_refused(quick, vectors, name):
    made, replica = fresh(quick, vectors, name, {})
    with pytest.raises(WrongState, match="int64"):
        made.resume(replica, made.snapshot(replica))


@each_method
def test_personal_is_a_copy(quick, vectors, name):
    made, replica = fresh(quick, vectors, name, {})
    replica.add_gradient(a=torch.ones(4), b=torch.ones(2, 3))
    made.local_step(replica, Progress(0))
    before = state_hash(made.personal(replica))
    for tensor in made.personal(replica).values():
        tensor.zero_()
    assert state_hash(made.personal(replica)) == before
