"""EDiT by hand: two phases in any order, what is sent and with which weight, portable bits, and
what the constructor refuses. Whole swarms are in tests/optimizers/swarm/test_edit.py."""

import hashlib
import math
from dataclasses import replace

import pytest
import torch

from farflock.optimizers.contrib.anomaly import HUGE, UNIT
from farflock.optimizers.contrib.edit import DELTA, FAINTEST, NORMS, ONLOOKER, EDiT
from farflock.optimizers.method import All, Exchange, ExchangeKey, Progress, Result
from farflock.optimizers.parts.blocks import BlocksOfWhole
from farflock.optimizers.parts.outer import OuterSGD
from farflock.optimizers.parts.state import WrongState, state_hash

EXACT = {"codec": "fp32", "return_codec": "fp32"}


def plain(**options):
    """EDiT with everything off except what is asked for: parameter averaging."""
    off = {"temperature": None, "threshold": None, "clip": None, "warmup": 0}
    return EDiT(**{"period": 1, "outer": OuterSGD(1.0), **EXACT, **off, **options})


def everything(tensors):
    return {name: [(0, x.numel())] for name, x in tensors.items()}


def norms(a, b, steps=1.0):
    """A peer's message about the two layers of `replica`."""
    return {"norms": torch.tensor([a, b]), "steps": torch.tensor([steps])}


def gathered(exchange, taken=True, **others):
    """The result of a first phase with `me`, if taken, and others."""
    sent = dict(exchange.tensors)
    found = dict(sorted({**others, **({"me": sent} if taken else {})}.items()))
    ranges = everything(sent) if taken else {}
    return Result(
        "ok", exchange.key.round + 1, tuple(found), (1.0,) * len(found), {}, found, sent, ranges
    )


def mean_of(exchange, taken=True, **others):
    """The result of a second phase: others are (weight, tensors)."""
    parts = {**others, **({"me": (exchange.weight, dict(exchange.tensors))} if taken else {})}
    peers = tuple(sorted(parts))
    weights = tuple(parts[peer][0] for peer in peers)
    names = next(iter(parts.values()))[1]
    mean = {
        name: sum(parts[p][0] / sum(weights) * parts[p][1][name] for p in peers) for name in names
    }
    ranges = everything(names) if taken else {}
    return Result(
        "ok", exchange.key.round + 1, peers, weights, mean, None, dict(exchange.tensors), ranges
    )


def replayed(result):
    return replace(result, sent=None, taken={})


def replay(stream, number):
    return Exchange(ExchangeKey(stream, number), "mean", All(), {})


@pytest.fixture
def replica(vectors):
    return vectors(a=torch.zeros(4), b=torch.zeros(3))


def work(made, replica, a=1.0, b=1.0, steps=1, at=0):
    """Take local steps that move a and b by these amounts in total; return the exchange that is
    then due."""
    for step in range(steps):
        replica.add_gradient(a=torch.full((4,), a / steps), b=torch.full((3,), b / steps))
        made.local_step(replica, Progress(at + step, run_time_s=float(at + step)))
    return made.due(replica, Progress(at + steps, run_time_s=float(at + steps)))


def first_phase(made, replica, a=1.0, b=1.0):
    (asked,) = work(made, replica, a, b)
    return asked


def phi(made, replica):
    return {name: x.tolist() for name, x in made.eval_params(replica).items()}


# what is sent


def test_the_norm_of_each_layer_is_sent_and_how_many_steps_it_took(replica):
    (asked,) = work(plain(period=3), replica, a=2.0, b=3.0, steps=3)
    assert (asked.key, asked.kind, asked.codec) == (ExchangeKey(NORMS, 0), "gather", "fp32")
    torch.testing.assert_close(asked.tensors["norms"], torch.tensor([4.0, 3.0 * math.sqrt(3)]))
    assert asked.tensors["steps"].tolist() == [3.0]


def test_the_second_phase_sends_the_pseudo_gradient_times_weight_over_mean_weight(replica):
    made = plain(temperature=1.0)
    asked = first_phase(made, replica)
    mine = asked.tensors["norms"].tolist()
    (delta,) = made.apply(
        replica, asked, gathered(asked, you=norms(mine[0] + math.log(3), mine[1]))
    )
    assert (delta.key, delta.kind, delta.weight) == (ExchangeKey(DELTA, 0), "mean", 1.0)
    torch.testing.assert_close(delta.tensors["a"], torch.full((4,), 2 * 0.75))
    assert delta.tensors["b"].tolist() == [1.0] * 3


def test_a_peer_with_the_same_norms_is_not_taken_for_this_one(replica):
    made = plain(temperature=1.0)
    asked = first_phase(made, replica)
    (delta,) = made.apply(
        replica, asked, gathered(asked, aa=dict(asked.tensors), zz=norms(9.0, 9.0))
    )
    weight = made._weights[0]["me"][0] / sum(row[0] for row in made._weights[0].values())
    torch.testing.assert_close(delta.tensors["a"], torch.full((4,), 3 * weight))


def test_work_that_is_no_number_is_sent_as_zeros_and_phi_takes_its_place(replica):
    made = plain()
    asked = first_phase(made, replica, a=math.nan)
    assert asked.tensors["norms"][0] == HUGE
    (delta,) = made.apply(replica, asked, gathered(asked, you=norms(1.0, 1.0)))
    assert delta.tensors["a"].tolist() == [0.0] * 4
    # the other's: twice the weight in a
    zero = {
        "a": torch.full((4,), 2.0),
        "b": torch.full((3,), 1.0),
    }
    made.apply(replica, delta, mean_of(delta, you=(1.0, zero)))
    assert replica.read(["a"], "param")["a"].tolist() == [-1.0] * 4
    assert phi(made, replica) == {"a": [-1.0] * 4, "b": [-1.0] * 3}


@pytest.mark.parametrize("said", [-1.0, -1e30, 2.0**60, 2.0**99])
def test_an_impossible_norm_is_an_anomaly_even_in_the_warm_up(replica, said):
    made = plain(temperature=1.0, threshold=3.0, warmup=9)
    asked = first_phase(made, replica)
    made.apply(replica, asked, gathered(asked, liar=norms(said, said)))
    assert made._weights[0] == {"liar": [0, 0], "me": [UNIT, UNIT]}
    assert bool(torch.isfinite(made.snapshot(replica)["layers.stats"]).all())


# the mean


def test_a_peer_missing_from_the_second_phase_is_divided_out(replica):
    made = plain(temperature=1.0)
    asked = first_phase(made, replica)
    mine = asked.tensors["norms"].tolist()
    (delta,) = made.apply(replica, asked, gathered(asked, you=norms(mine[0] + 1, mine[1])))
    made.apply(replica, delta, mean_of(delta))
    torch.testing.assert_close(made.eval_params(replica)["a"], torch.full((4,), -1.0))
    assert phi(made, replica)["b"] == [-1.0] * 3


def test_onlookers_do_not_dilute_the_mean(replica):
    made = plain()
    asked = first_phase(made, replica)
    (delta,) = made.apply(replica, asked, gathered(asked, you=norms(1.0, 1.0)))
    zeros = {"a": torch.zeros(4), "b": torch.zeros(3)}
    others = {"you": (1.0, dict(delta.tensors)), "late": (ONLOOKER, zeros)}
    made.apply(replica, delta, mean_of(delta, **others))
    torch.testing.assert_close(made.eval_params(replica)["a"], torch.full((4,), -1.0))


def test_with_onlookers_alone_nothing_moves(replica):
    made = plain(outer=EDiT().outer)
    asked = first_phase(made, replica)
    (delta,) = made.apply(replica, asked, gathered(asked, you=norms(1.0, 1.0)))
    zeros = {"a": torch.zeros(4), "b": torch.zeros(3)}
    before = made.agreed(replica, DELTA)
    made.apply(replica, delta, mean_of(delta, taken=False, late=(ONLOOKER, zeros)))
    after = made.agreed(replica, DELTA)
    assert all(
        torch.equal(before[name], after[name])
        for name in before
        if name.startswith(("phi", "momentum"))
    )
    assert replica.read(["a"], "param")["a"].tolist() == [-1.0] * 4


def test_a_layer_of_which_too_little_arrived_stays_and_its_work_too(replica):
    made = plain(temperature=1.0)
    asked = first_phase(made, replica, a=10.0)
    mine = asked.tensors["norms"].tolist()
    winner = norms(mine[0] - 1.01 * math.log(FAINTEST), mine[1])
    (delta,) = made.apply(replica, asked, gathered(asked, winner=winner))
    made.apply(replica, delta, mean_of(delta))  # without the winner
    assert phi(made, replica) == {"a": [0.0] * 4, "b": [-1.0] * 3}
    assert replica.read(["a"], "param")["a"].tolist() == [-10.0] * 4


def test_the_step_is_clipped_layer_by_layer(replica):
    made = plain(clip=1.0)
    asked = first_phase(made, replica, a=10.0, b=0.1)
    (delta,) = made.apply(replica, asked, gathered(asked))
    made.apply(replica, delta, mean_of(delta))
    moved = made.eval_params(replica)
    assert float(moved["a"].norm()) == pytest.approx(1.0, rel=1e-6)
    assert moved["b"].tolist() == pytest.approx([-0.1] * 3)


def test_norms_that_failed_leave_a_plain_mean(replica):
    made = plain(temperature=1.0)
    asked = first_phase(made, replica)
    (delta,) = made.apply(replica, asked, Result("failed", 1))
    assert delta.tensors["a"].tolist() == [1.0] * 4
    other = {"a": torch.full((4,), 3.0), "b": torch.zeros(3)}
    made.apply(replica, delta, mean_of(delta, you=(1.0, other)))
    assert phi(made, replica) == {"a": [-2.0] * 4, "b": [-0.5] * 3}
    assert int(made.snapshot(replica)["seen"]) == 0


def test_a_mean_that_failed_leaves_everything_and_the_next_message_covers_all(replica):
    made = plain()
    asked = first_phase(made, replica)
    (delta,) = made.apply(replica, asked, gathered(asked))
    made.apply(replica, delta, Result("failed", 1))
    assert phi(made, replica)["a"] == [0.0] * 4
    (asked,) = work(made, replica, at=1)
    assert (asked.key.round, asked.tensors["steps"].tolist()) == (1, [2.0])
    assert asked.tensors["norms"][0] == 4.0


# phases out of order


def test_a_peer_missing_from_the_first_phase_offers_weightless_zeros_and_keeps_its_work(replica):
    made = plain()
    asked = first_phase(made, replica)
    (delta,) = made.apply(replica, asked, gathered(asked, taken=False, you=norms(1.0, 1.0)))
    assert delta.weight == ONLOOKER
    assert not any(bool(x.any()) for x in delta.tensors.values())
    theirs = {"a": torch.full((4,), 5.0), "b": torch.full((3,), 5.0)}
    made.apply(replica, delta, mean_of(delta, you=(1.0, theirs)))
    assert phi(made, replica)["a"] == pytest.approx([-5.0] * 4)
    assert replica.read(["a"], "param")["a"].tolist() == [-1.0] * 4


def teacher_and_pupil(vectors, **options):
    """Two equal peers, of which the second hears of rounds later, and the two rounds: norms and
    mean of each."""
    teacher, pupil = plain(temperature=1.0, **options), plain(temperature=1.0, **options)
    replicas = [vectors(a=torch.zeros(4), b=torch.zeros(3)) for _ in range(2)]
    rounds = []
    for number in range(2):
        (asked,) = work(teacher, replicas[0], a=1.0 + number, b=2.0)
        first = gathered(asked, you=norms(1.5, 2.5))
        (delta,) = teacher.apply(replicas[0], asked, first)
        theirs = {"a": torch.full((4,), 0.5), "b": torch.full((3,), 0.25)}
        second = mean_of(delta, you=(1.0, theirs))
        teacher.apply(replicas[0], delta, second)
        rounds += [(NORMS, number, first), (DELTA, number, second)]
    return teacher, pupil, replicas, rounds


ORDERS = [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (0, 2, 3, 1), (1, 3, 0, 2), (1, 0, 3, 2)]


@pytest.mark.parametrize("order", [order for order in ORDERS if order.index(1) < order.index(3)])
@pytest.mark.parametrize("stop", [None, 1, 2, 3])
def test_replayed_rounds_of_the_two_streams_may_come_in_any_order_that_each_stream_allows(
    vectors, order, stop
):
    teacher, pupil, (theirs, mine), rounds = teacher_and_pupil(vectors)
    for done, at in enumerate(order):
        if done == stop:
            state = {**pupil.snapshot(mine), **pupil.personal(mine)}
            pupil = plain(temperature=1.0)
            pupil.resume(mine, state)
        stream, number, result = rounds[at]
        pupil.apply(mine, replay(stream, number), replayed(result))
    assert state_hash(pupil.snapshot(mine)) == state_hash(teacher.snapshot(theirs))


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_a_joiner_can_begin_between_the_phases(vectors, known):
    teacher, pupil, (theirs, mine), rounds = teacher_and_pupil(vectors)
    for stream, number, result in rounds[:known]:
        pupil.apply(mine, replay(stream, number), replayed(result))
    joiner = plain(temperature=1.0)
    joiner.restore(mine, pupil.snapshot(mine), "adopt")
    for stream, number, result in rounds[known:]:
        joiner.apply(mine, replay(stream, number), replayed(result))
    assert state_hash(joiner.snapshot(mine)) == state_hash(teacher.snapshot(theirs))


def test_a_mean_that_came_before_its_norms_leaves_my_work_for_the_next_round(vectors, replica):
    _, pupil, _, rounds = teacher_and_pupil(vectors)
    asked = first_phase(pupil, replica, a=7.0)
    pupil.apply(replica, replay(DELTA, 0), replayed(rounds[1][2]))
    assert phi(pupil, replica)["a"] == [0.0] * 4
    assert pupil.apply(replica, asked, replace(rounds[0][2], sent=dict(asked.tensors))) == []
    assert replica.read(["a"], "param")["a"].tolist() == [-7.0] * 4
    (next_asked,) = work(pupil, replica, a=0.0)
    assert next_asked.key.round == 1


def test_an_old_round_that_is_replayed_while_another_mean_is_open_asks_for_nothing(vectors):
    _, pupil, (_, mine), rounds = teacher_and_pupil(vectors)
    (delta,) = pupil.apply(mine, replay(NORMS, 0), replayed(rounds[0][2]))
    assert (delta.key, delta.weight) == (ExchangeKey(DELTA, 0), ONLOOKER)
    assert pupil.apply(mine, replay(NORMS, 1), replayed(rounds[2][2])) == []


def test_nothing_is_due_while_a_mean_is_open(vectors):
    _, pupil, (_, mine), rounds = teacher_and_pupil(vectors)
    pupil.apply(mine, replay(NORMS, 0), replayed(rounds[0][2]))
    assert work(pupil, mine) == []
    pupil.apply(mine, replay(DELTA, 0), replayed(rounds[1][2]))
    assert len(work(pupil, mine)) == 1


def test_what_is_agreed_of_the_means_does_not_move_with_later_norms(vectors):
    """Offers are hashed when they are sent: by then, norms of the next round may have been
    replayed."""
    _, pupil, (_, mine), rounds = teacher_and_pupil(vectors)
    pupil.apply(mine, replay(NORMS, 0), replayed(rounds[0][2]))
    before = state_hash(pupil.agreed(mine, DELTA))
    pupil.apply(mine, replay(NORMS, 1), replayed(rounds[2][2]))
    assert state_hash(pupil.agreed(mine, DELTA)) == before


# states from other peers


def between_phases(vectors):
    """A state that holds weights of an open round and a mean that came too early."""
    _, pupil, (_, mine), rounds = teacher_and_pupil(vectors)
    pupil.apply(mine, replay(NORMS, 0), replayed(rounds[0][2]))
    early = replayed(rounds[3][2])
    pupil.apply(mine, replay(DELTA, 1), early)
    return pupil.snapshot(mine), mine


def broken(state):
    for name, x in state.items():
        yield {other: kept for other, kept in state.items() if other != name}
        yield {**state, name: torch.zeros((*x.shape, 2), dtype=x.dtype)}
        yield {**state, name: -x - 1 if x.dtype == torch.int64 else x * math.nan}
    yield {**state, "weights.0.me": torch.tensor([UNIT + 1, 0])}
    yield {**state, "delta_round": torch.tensor(2)}
    yield {**state, "early.x": torch.tensor(1), "early": torch.tensor(2)}
    yield {
        **state,
        "early.7": torch.tensor(1),
        "early.7.me": torch.tensor(1),
        "early": torch.tensor(2),
    }


def test_a_state_between_the_phases_with_one_wrong_entry_is_refused(vectors):
    state, mine = between_phases(vectors)
    assert {"weights.0.me", "early.1.you", "mean.1.a"} <= state.keys()
    made = plain(temperature=1.0)
    made.restore(mine, state, "adopt")
    before = state_hash(made.snapshot(mine))
    assert before == state_hash(state)
    for other in broken(state):
        with pytest.raises(WrongState):
            made.restore(mine, other, "adopt")
        assert state_hash(made.snapshot(mine)) == before


# timed rounds


def timed(**options):
    return plain(round_s=10.0, **options)


def steps_until_due(made, replica, start_s, seconds, count):
    """Take local steps of equal length from a time on; return the times at which an exchange was
    due."""
    due = []
    for step in range(count):
        now_s = start_s + step * seconds
        made.local_step(replica, Progress(step, run_time_s=now_s))
        asked = made.due(replica, Progress(step + 1, run_time_s=now_s + seconds))
        if asked:
            due.append(now_s + seconds)
            (delta,) = made.apply(replica, asked[0], gathered(asked[0]))
            made.apply(replica, delta, mean_of(delta))
    return due


@pytest.mark.parametrize("start_s", [0.0, 7.0, 9.9])
def test_a_timed_round_ends_when_run_time_crosses_a_multiple_whenever_it_began(replica, start_s):
    due = steps_until_due(timed(), replica, start_s, 1.5, 30)
    assert [int(at // 10) for at in due] == list(range(1, len(due) + 1))
    assert all(at % 10 < 1.5 for at in due)


def test_unequal_machines_are_due_in_the_same_intervals_with_the_steps_that_they_made(vectors):
    counts = []
    for seconds in (0.5, 1.0, 2.0):
        replica = vectors(a=torch.zeros(4), b=torch.zeros(3))
        due = steps_until_due(timed(), replica, 0.0, seconds, int(40 / seconds))
        assert due == [10.0, 20.0, 30.0, 40.0]
        counts.append(10 / seconds)
    assert counts == [20, 10, 5]


def test_a_timed_round_waits_for_the_least_number_of_steps(replica):
    assert steps_until_due(timed(min_steps=4), replica, 0.0, 4.0, 12) == [16.0, 32.0, 48.0]


def test_a_step_across_several_multiples_makes_one_round(replica):
    assert steps_until_due(timed(), replica, 0.0, 35.0, 3) == [35.0, 70.0, 105.0]


def test_a_timed_round_goes_on_after_a_restart_in_its_interval(replica):
    made = timed()
    made.local_step(replica, Progress(0, run_time_s=8.0))
    again = timed()
    again.resume(replica, {**made.snapshot(replica), **made.personal(replica)})
    again.local_step(replica, Progress(1, run_time_s=12.0))
    assert len(again.due(replica, Progress(2, run_time_s=13.0))) == 1


# portable bits


class Still(BlocksOfWhole):
    """A replica that only holds parameters."""

    def __init__(self):
        self.shapes = {"layers.0.w": (4099,), "layers.0.b": (7,), "head": (257,)}
        self.names = tuple(self.shapes)
        self.held = {name: values(count, 3) for name, (count,) in self.shapes.items()}

    def read(self, names, what):
        return {name: self.held[name].clone() for name in names}

    def write(self, tensors, what, mix=1.0):
        self.held.update(tensors)

    def inner_step(self, lr=None):
        self.held = {name: x - values(x.numel(), 5) for name, x in self.held.items()}


def values(count, label):
    """Made by integer arithmetic and one division, the same on every machine."""
    return (torch.arange(count, dtype=torch.int64) * 7919 % (2003 + label) - 1001).to(
        torch.float32
    ) / 40960


def digest():
    """The bits of six rounds with weights, rejection and clipping; run by a subprocess too."""
    made = EDiT(period=1, warmup=2, clip=0.5, step_ratio=0.5, **EXACT)
    replica = Still()
    for number in range(6):
        made.local_step(replica, Progress(number))
        (asked,) = made.due(replica, Progress(number + 1))
        mine = asked.tensors["norms"]
        others = {
            f"p{i}": {"norms": mine * (1 + i / 7), "steps": torch.tensor([float(i)])}
            for i in range(3)
        }
        (delta,) = made.apply(replica, asked, gathered(asked, **others))
        spike = 1000.0 if number == 4 else 1.0
        result = mean_of(delta, p0=(1.0, {name: x * spike for name, x in delta.tensors.items()}))
        made.apply(replica, delta, result)
    return hashlib.sha256(state_hash(made.snapshot(replica)) + state_hash(replica.held)).hexdigest()


@pytest.mark.net
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_processors_of_any_kind_make_the_same_bits(capability, same_bits):
    same_bits(capability, __file__, digest)


# options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period of 0 steps"),
        ({"temperature": 0.0}, r"temperature=0.0 must be .* usually 1"),
        ({"threshold": -1.0}, r"threshold=-1.0 must be .* usually 3"),
        ({"clip": math.nan}, "clip=nan must be"),
        ({"round_s": math.inf}, "round_s=inf is out of range"),
        ({"warmup": -1}, "warmup=-1 must be 0 or more"),
        ({"min_steps": 0}, "min_steps=0 1 or more"),
        ({"alpha": 1.0}, r"alpha=1.0 lies in \(0, 1\)"),
        ({"step_ratio": 1.5}, r"step_ratio=1.5 in \[0, 1\]"),
        ({"codec": "topk:2/8"}, "codec topk:2/8 is biased"),
        ({"return_codec": "topk:2/8"}, "return codec topk:2/8 is biased"),
        ({"deadline_s": 0.0}, "deadline of 0.0 s"),
    ],
)
def test_options_that_cannot_train_are_refused_with_their_value(options, message):
    with pytest.raises(ValueError, match=message):
        EDiT(**options)
