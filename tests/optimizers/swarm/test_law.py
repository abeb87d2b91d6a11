"""The law of `Method` (optimizers/method.py), point by point, for every method of the catalogue."""

import pytest
import torch

from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.method import Progress

OPTIONS = {
    "local": {},
    "ddp": {"codec": "fp32", "return_codec": "fp32"},
    "diloco": {"period": 3, "codec": "fp32", "return_codec": "fp32"},
    "noloco": {"period": 3, "codec": "fp32"},
}
VARIANTS = [
    *((name, {}) for name in METHODS),
    ("diloco", {"feedback": 0.5, "codec": "int4", "return_codec": "bf16"}),
    ("diloco", {"codec": "int8", "return_codec": "bf16"}),
    ("noloco", {"gamma": 0.6}),
    ("ddp", {"codec": "bf16", "return_codec": "bf16"}),
]


def each(keep=lambda name, more: True):
    variants = [variant for variant in VARIANTS if keep(*variant)]
    labels = ["-".join(map(str, (name, *more.values()))) for name, more in variants]
    return pytest.mark.parametrize(("name", "more"), variants, ids=labels)


each_method = each()
each_exact_method = each(lambda name, more: METHODS[name].equality == "exact")
each_without_residual = each(lambda name, more: "feedback" not in more)  # the residual is a peer's own, no joiner's
each_size = pytest.mark.parametrize("size", [1, 2, 4, 7])


def maker(name, more):
    return lambda: method(name, **{**OPTIONS[name], **more})


def talks(name):
    return name != "local"


def test_every_method_is_held_to_the_law():
    assert OPTIONS.keys() == METHODS.keys()


@each_method
@each_size
def test_it_runs_with_any_number_of_peers_and_all_values_stay_finite(loopback, name, more, size):
    swarm = loopback(maker(name, more), "abcdefg"[:size], inner="adamw", lr=0.01)
    swarm.steps(9)
    for peer in swarm.peers.values():
        assert [result.status for result in peer.results] == [r.status for r in peer.results if r.mean]
        assert bool(peer.results) == talks(name)
        state = [*peer.outer().values(), *peer.theta().values(), *peer.method.eval_params(peer.replica).values()]
        assert all(bool(torch.isfinite(x).all()) for x in state)
        assert any(
            not torch.equal(x, y)
            for x, y in zip(peer.theta().values(), swarm.build("new").theta().values(), strict=True)
        )


@each_exact_method
@each_size
def test_exact_methods_have_equal_snapshots_bit_for_bit(loopback, same, name, more, size):
    make = maker(name, more)
    swarm = loopback(make, "abcdefg"[:size], inner="adamw", lr=0.01)
    late_peer = "abcdefg"[size - 1]
    swarm.late = lambda peer, number: 1 if (peer, number) == (late_peer, 1) else 0
    swarm.taken = lambda peer, number: (
        (lambda what, n: [(2, n)]) if peer == "a" and number == 2 and size > 1 else (lambda what, n: [(0, n)])
    )
    swarm.steps(15)
    first, *others = [peer.outer() for peer in swarm.peers.values()]
    assert all(same(first, other) for other in others)
    if size > 1:
        assert "partial" in [result.status for result in swarm.peers["b"].results]


@each_method
def test_failed_leaves_outer_state_alone_and_keeps_local_work(loopback, same, name, more):
    failing, quiet = (loopback(maker(name, more), "ab") for _ in range(2))
    failing.fails = lambda number: number == 0
    period = OPTIONS[name].get("period", 1)
    failing.steps(period)
    quiet.steps(period - 1)
    for peer in failing.peers.values():
        state = peer.outer()
        counter = state.pop("round", torch.tensor(0))
        before = quiet.peers[peer.name].outer()
        before.pop("round", None)
        assert int(counter) == (1 if talks(name) else 0)
        if talks(name):
            assert same(state, before)
            assert [result.status for result in peer.results] == ["failed"]
        assert not peer.driver.pending


@each_method
def test_exchanged_tensors_do_not_change_with_later_local_steps(loopback, same, name, more):
    swarm = loopback(maker(name, more), "ab")
    swarm.late = lambda peer, number: 2
    swarm.steps(OPTIONS[name].get("period", 1))
    for peer in swarm.peers.values():
        offered = [exchange.tensors for _, exchange in peer.offered]
        copies = [{key: x.clone() for key, x in tensors.items()} for tensors in offered]
        swarm.steps(2)
        assert all(same(dict(now), then) for now, then in zip(offered, copies, strict=True))
        assert bool(copies) == talks(name)


@each_method
def test_no_key_is_asked_for_twice_nor_while_it_is_pending(loopback, name, more):
    swarm = loopback(maker(name, more), "ab")
    swarm.late = lambda peer, number: 4
    swarm.fails = lambda number: number % 3 == 1
    swarm.steps(30)
    for peer in swarm.peers.values():
        keys = [exchange.key for _, exchange in peer.offered]
        assert len(set(keys)) == len(keys)
        assert [key.round for key in keys] == list(range(len(keys)))
        assert len(keys) > 2 or not talks(name)


@each_without_residual
def test_adopting_ones_own_snapshot_after_a_round_changes_nothing_that_follows(loopback, same, name, more):
    through, stopped = (loopback(maker(name, more), "ab") for _ in range(2))
    for swarm in (through, stopped):
        swarm.steps(6)
    for peer in stopped.peers.values():
        old = peer.outer()
        peer.driver.method = maker(name, more)()
        peer.driver.method.restore(peer.replica, old, "adopt")
        assert same(peer.outer(), old)
    for swarm in (through, stopped):
        swarm.steps(6)
    for peer, other in zip(through.peers.values(), stopped.peers.values(), strict=True):
        assert same(peer.outer(), other.outer())
        assert same(peer.theta(), other.theta())


@each_method
def test_a_snapshot_is_a_copy(loopback, same, name, more):
    swarm = loopback(maker(name, more), "ab")
    swarm.steps(3)
    peer = swarm.peers["a"]
    state = peer.outer()
    kept = {key: x.clone() for key, x in state.items()}
    swarm.steps(3)
    assert same(state, kept)
    before = peer.outer()
    for x in state.values():
        x.zero_()
    for x in peer.method.eval_params(peer.replica).values():
        x.zero_()
    assert same(peer.outer(), before)


@each_method
def test_a_joiner_that_adopts_has_the_snapshot_and_evaluates_alike(loopback, same, name, more):
    swarm = loopback(maker(name, more), "ab")
    swarm.steps(6)
    veteran, joiner = swarm.peers["a"], swarm.build("c")
    joiner.method.restore(joiner.replica, veteran.outer(), "adopt")
    assert same(joiner.outer(), veteran.outer())
    ours, theirs = (dict(peer.method.eval_params(peer.replica)) for peer in (veteran, joiner))
    assert same(ours, theirs)


@each_method
def test_streams_are_specimens_of_what_it_asks_for(loopback, name, more):
    swarm = loopback(maker(name, more), "ab")
    peer = swarm.peers["a"]
    specimens = {one.key.stream: one for one in peer.method.streams(peer.replica)}
    swarm.steps(6)
    for _, exchange in peer.offered:
        one = specimens[exchange.key.stream]
        shapes = [{key: tuple(x.shape) for key, x in e.tensors.items()} for e in (one, exchange)]
        assert list(shapes[0].items()) == list(shapes[1].items())
        assert (one.kind, one.group, one.codec, one.return_codec, one.apply_after, one.deadline_s) == (
            exchange.kind,
            exchange.group,
            exchange.codec,
            exchange.return_codec,
            exchange.apply_after,
            exchange.deadline_s,
        )
        assert all(x.dtype == torch.float32 for x in exchange.tensors.values())
    assert bool(specimens) == talks(name)


@each_method
def test_nothing_is_due_before_the_first_step(loopback, name, more):
    peer = loopback(maker(name, more), "a").peers["a"]
    assert peer.method.due(peer.replica, Progress(0)) == []


@each_exact_method
def test_denominators_come_from_the_participants_alone(loopback, same, name, more):
    """A round in which c's work came too late equals the round of a swarm without c."""
    with_c, without_c = loopback(maker(name, more), "abc"), loopback(maker(name, more), "ab")
    with_c.taken = lambda peer, number: (lambda what, n: []) if peer == "c" else (lambda what, n: [(0, n)])
    for swarm in (with_c, without_c):
        swarm.steps(6)
    assert all(result.participants == ("a", "b") for result in with_c.peers["a"].results)
    assert same(with_c.peers["a"].outer(), without_c.peers["a"].outer())
