"""Asynchronous local SGD by hand: delayed Nesterov compared with a slow twin, staleness, local
steps by speed, and messages that wait. Whole swarms are in
tests/optimizers/swarm/test_asynchronous.py."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.optimizers.contrib.asynchronous import FASTEST, HEARD_ROUNDS, STREAM, Async
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Result
from farflock.optimizers.parts.blocks import BlocksOfWhole
from farflock.optimizers.parts.outer import OuterNesterov
from farflock.optimizers.parts.state import WrongState, state_hash

SIZE = 5


class Still(BlocksOfWhole):
    """A replica of one vector; each step subtracts a given amount."""

    def __init__(self, size=SIZE, step=1.0):
        self.shapes, self.names = {"x": (size,)}, ("x",)
        self.held, self.step = {"x": torch.zeros(size)}, step

    def read(self, names, what):
        return {name: self.held[name].clone() for name in names}

    def write(self, tensors, what, mix=1.0):
        self.held.update({name: x.clone() for name, x in tensors.items()})

    def inner_step(self, lr=None):
        self.held = {"x": self.held["x"] - self.step}


def values(count, label=0):
    """Made by integer arithmetic and one division, the same on every machine."""
    return (torch.arange(label, label + count, dtype=torch.int64) * 7919 % 2003 - 1001).to(
        torch.float32
    ) / 4096


def payload(g, staleness=0.0, speed=1.0):
    return {
        "staleness": torch.tensor([float(staleness)]),
        "speed": torch.tensor([float(speed)]),
        "delta.x": g,
    }


def arrive(made, replica, **payloads):
    """Hand over a round that other peers closed, with each peer's payload."""
    number = made._book.number
    found = dict(sorted(payloads.items()))
    result = Result("ok", number + 1, tuple(found), (1.0,) * len(found), {}, found)
    assert (
        made.apply(replica, Exchange(ExchangeKey(STREAM, number), "gather", All(), {}), result)
        == []
    )


def answer(made, replica, asked, taken=True, **others):
    """Hand over the result of this peer's exchange; `others` are the other peers' payloads."""
    sent = dict(asked.tensors)
    found = dict(sorted({**others, **({"me": sent} if taken else {})}.items()))
    ranges = {name: [(0, x.numel())] for name, x in sent.items()} if taken else {}
    result = Result(
        "ok", asked.key.round + 1, tuple(found), (1.0,) * len(found), {}, found, sent, ranges
    )
    return made.apply(replica, asked, result)


def failed(made, replica, asked):
    return made.apply(replica, asked, Result("failed", asked.key.round + 1))


def phi(made, replica):
    return made.eval_params(replica)["x"]


def train(made, replica, steps, start_s=0.0, seconds=1.0):
    """Take local steps of equal length; return the exchanges that are due after the last one."""
    asked = []
    for step in range(steps):
        assert not asked
        made.local_step(replica, Progress(step, run_time_s=start_s + step * seconds))
        asked = made.due(replica, Progress(step + 1, run_time_s=start_s + (step + 1) * seconds))
    return asked


# delayed Nesterov


def twin(phi, arrivals, size, lr, beta, c):
    """Section 17.2 in float64, one arrival after the other."""
    m, buffered, n = np.zeros_like(phi), np.zeros_like(phi), 0
    for g in arrivals:
        buffered, n = buffered + g, n + 1
        if n % size == 0:
            m = beta * m + buffered / size
            phi = phi - lr * ((1 - c * size + c) * beta * m + g / size)
            buffered = np.zeros_like(phi)
        else:
            phi = phi - lr * (c * beta * m + g / size)
    return phi, m


@pytest.mark.parametrize(("size", "c"), [(1, 0.0), (1, 1.0), (3, 0.0), (4, 0.25), (4, 0.1)])
def test_thirteen_arrivals_follow_the_slow_twin(size, c):
    made, replica = Async(buffer=size, c=c, lr=0.3), Still()
    arrivals = [values(SIZE, 7 * number) for number in range(13)]
    for at, g in enumerate(arrivals):
        arrive(made, replica, **{f"p{at % 3}": payload(g)})
    expected, m = twin(np.zeros(SIZE), [g.double().numpy() for g in arrivals], size, 0.3, 0.9, c)
    np.testing.assert_allclose(phi(made, replica).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(made.snapshot(replica)["momentum.x"].numpy(), m, atol=1e-6)
    assert int(made.snapshot(replica)["arrived"]) == 13 % size


def test_with_a_buffer_of_one_each_arrival_is_a_nesterov_step_bit_for_bit():
    made, replica, outer = Async(buffer=1, lr=0.7, momentum=0.9), Still(), OuterNesterov(0.7, 0.9)
    after, u = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(6):
        g = values(SIZE, 3 * number)
        arrive(made, replica, a=payload(g))
        after, u = outer.step(after, g, u)
        assert torch.equal(phi(made, replica), after)


@settings(max_examples=25, deadline=None)
@given(workers=st.integers(1, 8), rounds=st.integers(1, 4))
def test_a_full_buffer_of_equal_pulls_is_one_synchronous_nesterov_step_of_their_mean(
    workers, rounds
):
    made, replica, outer = Async(buffer=workers), Still(), OuterNesterov(0.7, 0.9)
    after, u = torch.zeros(SIZE), torch.zeros(SIZE)
    for number in range(rounds):
        arrivals = [values(SIZE, 11 * number + 5 * peer) for peer in range(workers)]
        for peer, g in enumerate(arrivals):
            arrive(made, replica, **{f"p{peer}": payload(g)})
        after, u = outer.step(after, sum(arrivals) / workers, u)
    torch.testing.assert_close(phi(made, replica), after, rtol=0, atol=2e-6)


def test_with_momentum_between_the_full_buffers_it_is_another_method():
    ways = [Async(buffer=4, c=c) for c in (0.0, 0.25)]
    replicas = [Still(), Still()]
    for made, replica in zip(ways, replicas, strict=True):
        for _ in range(8):
            arrive(made, replica, a=payload(torch.ones(SIZE)))
    assert not torch.allclose(phi(ways[0], replicas[0]), phi(ways[1], replicas[1]))


def test_nesterov_at_each_arrival_counts_momentum_too_often_and_delayed_does_not():
    b, k = 0.9, 4
    moved = []
    for size in (1, k):
        made, replica = Async(buffer=size, lr=1.0, momentum=b), Still()
        for _ in range(k):
            arrive(made, replica, a=payload(torch.ones(SIZE)))
        moved.append(-float(phi(made, replica)[0]))
    assert moved[0] == pytest.approx(4 + 4 * b + 3 * b**2 + 2 * b**3 + b**4, rel=1e-6)
    assert moved[1] == pytest.approx(1 + b, rel=1e-6)


@settings(deadline=None)
@given(order=st.permutations(range(4)), together=st.booleans())
def test_permuting_arrivals_of_one_buffer_leaves_phi_equal(order, together):
    arrivals = [torch.tensor([1.0, -2.0, 0.5, 3.0, 0.25]) * (peer + 1) for peer in range(4)]
    ends = []
    for permuted in (range(4), order):
        made, replica = Async(buffer=4, lr=0.5, momentum=0.5, staleness="polynomial"), Still()
        rounds = [{f"p{place}": payload(arrivals[at]) for place, at in enumerate(permuted)}]
        for payloads in rounds if together else [{who: said} for who, said in rounds[0].items()]:
            arrive(made, replica, **payloads)
        ends.append(phi(made, replica))
    assert torch.equal(*ends)


# staleness


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"staleness": "polynomial"}, [1, 2**-0.5, 0.5, 11**-0.5, 12**-0.5]),
        (
            {"staleness": "hinge", "hinge_slope": 0.5, "hinge_free": 2},
            [1, 1, 1 / 1.5, 1 / 5, 1 / 5.5],
        ),
        ({"staleness": "drop"}, [1, 1, 1, 1, 0]),
        ({"staleness": "drop", "drop_above": 0}, [1, 0, 0, 0, 0]),
    ],
)
def test_the_weight_of_an_arrival_falls_with_its_staleness(options, expected):
    for staleness, weight in zip([0, 1, 3, 10, 11], expected, strict=True):
        made, replica = Async(buffer=1, lr=1.0, momentum=0.0, **options), Still()
        arrive(made, replica, a=payload(torch.ones(SIZE), staleness))
        assert phi(made, replica).tolist() == pytest.approx([-weight] * SIZE, rel=1e-6)
        assert int(made.snapshot(replica)["version"]) == (1 if weight else 0)


def test_a_dropped_arrival_counts_for_nothing_but_its_sender_pulls():
    made, replica = Async(period=2, buffer=2, staleness="drop", drop_above=0), Still()
    (asked,) = train(made, replica, 2)
    arrive_others = {"a": payload(torch.ones(SIZE)), "b": payload(torch.ones(SIZE))}
    (again,) = answer(made, replica, asked, taken=False, **arrive_others)
    assert again.tensors["staleness"].tolist() == [1.0]
    before = made.snapshot(replica)
    answer(made, replica, again)
    after = made.snapshot(replica)
    assert all(
        torch.equal(before[name], after[name])
        for name in ("phi.x", "momentum.x", "buffer.x", "arrived", "version")
    )
    assert torch.equal(replica.held["x"], after["phi.x"])


def test_a_peer_that_pulled_after_the_last_update_is_not_stale_whatever_failed_since():
    made, replica = Async(period=1), Still()
    (asked,) = train(made, replica, 1)
    answer(made, replica, asked)
    for _ in range(3):
        asked = (made.due(replica, Progress(9)) or train(made, replica, 1))[0]
        assert asked.tensors["staleness"].tolist() == [0.0]
        failed(made, replica, asked)


def test_staleness_counts_the_rounds_of_others_since_the_pull():
    made, replica = Async(period=2), Still()
    made.local_step(replica, Progress(0))
    for number in range(3):
        arrive(made, replica, a=payload(torch.ones(SIZE) * number), b=payload(torch.ones(SIZE)))
    made.local_step(replica, Progress(1))
    (asked,) = made.due(replica, Progress(2))
    assert asked.key == ExchangeKey(STREAM, 3)
    assert asked.tensors["staleness"].tolist() == [3.0]


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "int4"])
def test_staleness_and_speed_survive_the_codec(codec):
    from farflock.compression.catalog import codec as named_codec
    from farflock.compression.codec import Context

    for number in (0.0, 1.0, 7.0, 11.0, 100.0):
        payload_bytes, back = bytearray(), torch.empty(1)
        named_codec(codec).encode(torch.tensor([number]), Context(), payload_bytes)
        named_codec(codec).decode(payload_bytes, Context(), back)
        assert round(float(back)) == number


@pytest.mark.parametrize(("said", "read"), [(-5.0, 1.0), (0.4, 1.0), (2.0**99, 0.0)])
def test_an_impossible_staleness_is_read_as_the_nearest_possible(said, read):
    made, replica = Async(buffer=1, lr=1.0, momentum=0.0, staleness="drop"), Still()
    arrive(made, replica, a=payload(torch.ones(SIZE), said))
    assert phi(made, replica).tolist() == [-read] * SIZE


# local rounds


def test_equal_speeds_give_everybody_the_whole_period():
    made, replica = Async(period=50), Still()
    (asked,) = train(made, replica, 50, seconds=0.3)
    answer(made, replica, asked, you=payload(torch.ones(SIZE), speed=float(asked.tensors["speed"])))
    assert len(train(made, replica, 50, start_s=20.0, seconds=0.3)) == 1


@settings(max_examples=50, deadline=None)
@given(speed=st.floats(2**-10, 1024, width=32), period=st.integers(1, 700))
def test_the_fastest_always_gets_the_whole_period(speed, period):
    made, replica = Async(period=period), Still()
    made._book.since, made._speed = period, speed
    made.begin(replica)
    made._message = {"x": torch.zeros(SIZE)}
    answer(made, replica, made._ask(), you=payload(torch.ones(SIZE), speed=speed / 2))
    assert made._quota == period


@pytest.mark.parametrize(("others", "steps"), [(2.0, 5), (3.0, 3), (4.0, 2), (1000.0, 1)])
def test_a_slower_peer_makes_as_many_steps_as_fit_into_the_time_of_the_fastest(others, steps):
    made, replica = Async(period=10), Still()
    (asked,) = train(made, replica, 10)
    assert asked.tensors["speed"].tolist() == [1.0]
    answer(made, replica, asked, you=payload(torch.ones(SIZE), speed=others))
    assert len(train(made, replica, steps, start_s=10.0)) == 1


def test_waiting_for_an_answer_is_no_slowness():
    made, replica = Async(period=4), Still()
    (asked,) = train(made, replica, 4, start_s=0.0, seconds=0.5)
    answer(made, replica, asked)
    (asked,) = train(made, replica, 4, start_s=1000.0, seconds=0.5)
    assert asked.tensors["speed"].tolist() == [2.0]


@pytest.mark.parametrize("claim", [FASTEST * 2, -3.0, 2.0**99])
def test_an_absurd_speed_makes_no_peer_slow(claim):
    made, replica = Async(period=10), Still()
    (asked,) = train(made, replica, 10)
    answer(made, replica, asked, liar=payload(torch.ones(SIZE), speed=claim))
    assert len(train(made, replica, 10, start_s=10.0)) == 1


def test_without_dynamic_steps_everybody_makes_the_period():
    made, replica = Async(period=10, dylu=False), Still()
    (asked,) = train(made, replica, 10)
    answer(made, replica, asked, you=payload(torch.ones(SIZE), speed=100.0))
    assert len(train(made, replica, 10, start_s=10.0)) == 1


def test_a_peer_that_left_is_the_fastest_no_longer():
    made, replica = Async(period=10, buffer=None), Still()
    arrive(made, replica, gone=payload(torch.ones(SIZE), speed=100.0))
    for _ in range(HEARD_ROUNDS - 1):
        arrive(made, replica, here=payload(torch.ones(SIZE), speed=2.0))
    assert set(made._speeds) == {"gone", "here"}
    arrive(made, replica, here=payload(torch.ones(SIZE), speed=2.0))
    assert set(made._speeds) == {"here"}


def test_the_buffer_follows_the_workers_but_only_when_it_is_empty():
    made, replica = Async(), Still()
    g = torch.ones(SIZE)
    sizes = []
    for peers in ("ab", "c", "abc", "abcd", "ab", "abcd"):
        arrive(made, replica, **{peer: payload(g) for peer in peers})
        sizes.append((made._size, made._arrived))
    assert sizes == [(2, 0), (3, 1), (3, 1), (4, 2), (4, 0), (4, 0)]


# messages


def test_a_message_that_was_not_taken_is_asked_for_again_at_the_next_round_as_it_was():
    made, replica = Async(period=3, lr=1.0, momentum=0.0, buffer=1), Still()
    (asked,) = train(made, replica, 3)
    (again,) = answer(made, replica, asked, taken=False, you=payload(torch.ones(SIZE)))
    assert again.key == ExchangeKey(STREAM, 1)
    assert torch.equal(again.tensors["delta.x"], asked.tensors["delta.x"])
    assert replica.held["x"].tolist() == [-3.0] * SIZE
    assert answer(made, replica, again) == []
    assert replica.held["x"].tolist() == phi(made, replica).tolist() == [-4.0] * SIZE


def test_after_a_failed_round_the_message_waits_for_the_next_local_step():
    made, replica = Async(period=3), Still()
    (asked,) = train(made, replica, 3)
    assert failed(made, replica, asked) == []
    assert phi(made, replica).tolist() == [0.0] * SIZE
    made.local_step(replica, Progress(3))
    (again,) = made.due(replica, Progress(4))
    assert again.key == ExchangeKey(STREAM, 1)
    assert torch.equal(again.tensors["delta.x"], asked.tensors["delta.x"])
    assert made.due(replica, Progress(4)) == []


def test_a_peer_that_pulls_keeps_the_steps_made_since_its_message():
    made, replica = Async(period=3, lr=1.0, momentum=0.0, buffer=1), Still()
    (asked,) = train(made, replica, 3)
    for step in range(2):
        made.local_step(replica, Progress(3 + step))
    answer(made, replica, asked, you=payload(torch.ones(SIZE)))
    assert phi(made, replica).tolist() == [-4.0] * SIZE
    assert replica.held["x"].tolist() == [-6.0] * SIZE
    made.local_step(replica, Progress(5))
    (asked,) = made.due(replica, Progress(6))
    assert asked.tensors["delta.x"].tolist() == [3.0] * SIZE


def test_rounds_of_others_move_phi_under_a_local_round_and_not_the_local_parameters():
    made, replica = Async(period=3, lr=1.0, momentum=0.0, buffer=1), Still()
    made.local_step(replica, Progress(0))
    arrive(made, replica, a=payload(torch.ones(SIZE) * 8))
    assert replica.held["x"].tolist() == [-1.0] * SIZE
    (asked,) = train(made, replica, 2)
    assert asked.tensors["delta.x"].tolist() == [3.0] * SIZE
    answer(made, replica, asked)
    assert replica.held["x"].tolist() == [-11.0] * SIZE


def test_carrying_a_snapshot_puts_the_work_since_the_pull_on_top():
    teacher, source = Async(lr=1.0, momentum=0.0, buffer=1), Still()
    arrive(teacher, source, a=payload(torch.ones(SIZE) * 8))
    for mode, expected in (("carry", -10.0), ("adopt", -8.0)):
        made, replica = Async(period=2), Still()
        train(made, replica, 2)
        made.restore(replica, teacher.snapshot(source), mode)
        assert replica.held["x"].tolist() == [expected] * SIZE
        assert state_hash(made.snapshot(replica)) == state_hash(teacher.snapshot(source))
        assert len(train(made, replica, 2)) == 1


# states from other peers


def some_state():
    made, replica = Async(buffer=3), Still()
    arrive(made, replica, a=payload(values(SIZE)), b=payload(values(SIZE, 1), speed=2.5))
    return made.snapshot(replica)


def broken(state):
    for name, x in state.items():
        yield {other: kept for other, kept in state.items() if other != name}
        yield {**state, name: torch.zeros((*x.shape, 2), dtype=x.dtype)}
        yield {**state, name: -x - 1 if x.dtype == torch.int64 else x * math.nan}
    yield {**state, "speed.a": torch.tensor(-1.0)}
    yield {**state, "speed.a": torch.tensor(FASTEST * 4)}
    yield {**state, "size": torch.tensor(2)}


def test_a_state_with_one_wrong_entry_is_refused_and_changes_nothing():
    made, replica = Async(buffer=3), Still()
    made.restore(replica, some_state(), "adopt")
    before = state_hash(made.snapshot(replica))
    assert before == state_hash(some_state())
    count = 0
    for state in broken(some_state()):
        with pytest.raises(WrongState):
            made.restore(replica, state, "adopt")
        count += 1
        assert state_hash(made.snapshot(replica)) == before
    assert count > 30


# portable bits


def digest():
    """The bits of ten rounds with every kind of weight; run by a subprocess too."""
    found = hashlib.sha256()
    for staleness in ("none", "polynomial", "hinge"):
        made, replica = Async(buffer=3, c=0.2, staleness=staleness), Still(4099)
        for number in range(10):
            said = {
                f"p{i}": payload(values(4099, 7 * number + i), number + i, 1 + i)
                for i in range(1 + number % 3)
            }
            arrive(made, replica, **said)
        found.update(state_hash(made.snapshot(replica)))
    return found.hexdigest()


@pytest.mark.net
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_processors_of_any_kind_make_the_same_bits(capability, same_bits):
    same_bits(capability, __file__, digest)


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period of 0 steps"),
        ({"lr": 0.0}, r"lr=0.0 lies in \(0, 10\]"),
        ({"momentum": 1.0}, r"momentum=1.0 in \[0, 1\)"),
        ({"buffer": 0}, "buffer of 0 is out of range"),
        ({"buffer": 4, "c": 0.3}, r"c=0.3 lies in \[0, 1/buffer\]"),
        ({"c": 0.1}, "c=0.1 needs a buffer of known size"),
        (
            {"staleness": "poly"},
            "staleness 'poly' is not known; choose from none, polynomial, hinge, drop",
        ),
        ({"hinge_slope": -1.0}, "hinge_slope=-1.0"),
        ({"drop_above": -1}, "drop_above=-1: all are 0 or more"),
        ({"enough": -1}, "enough=-1 arrivals"),
        ({"codec": "topk:2/8"}, "codec topk:2/8 is biased"),
        ({"deadline_s": math.inf}, "deadline of inf s"),
    ],
)
def test_options_that_cannot_train_are_refused_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        Async(**options)


def test_an_exchange_that_is_pending_is_not_asked_for_again():
    made, replica = Async(period=1), Still()
    (asked,) = train(made, replica, 1)
    for step in range(3):
        made.local_step(replica, Progress(1 + step))
        assert made.due(replica, Progress(2 + step)) == []
    answer(made, replica, replace(asked))
    assert len(made.due(replica, Progress(4))) == 1
