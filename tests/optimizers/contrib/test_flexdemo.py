"""FlexDeMo by the class alone: which blocks are sent in which round, and what leaves the
momentum."""

from collections import Counter

import pytest
import torch

from farflock.optimizers.contrib.flexdemo import BLOCK, FlexDeMo
from farflock.optimizers.method import Progress, Result

SIZES = {"a": (70, 10), "b": (333,), "c": (5, 3, 2), "d": ()}
VALUES = 700 + 333 + 30 + 1


def dyadic(count, seed=0):
    """Multiples of 1/64 that bf16 carries unchanged."""
    return (
        torch.randint(-120, 121, (count,), generator=torch.Generator().manual_seed(seed)).float()
        / 64
    )


def replica_of(vectors, seed=9, **options):
    values = torch.split(
        dyadic(VALUES, seed), [torch.Size(shape).numel() for shape in SIZES.values()]
    )
    return vectors(
        **options,
        **{name: x.reshape(shape) for (name, shape), x in zip(SIZES.items(), values, strict=True)},
    )


def gradient(seed):
    values = torch.split(
        dyadic(VALUES, seed), [torch.Size(shape).numel() for shape in SIZES.values()]
    )
    return {name: x.reshape(shape) for (name, shape), x in zip(SIZES.items(), values, strict=True)}


def row(tensors):
    return torch.cat([tensors[name].reshape(-1) for name in SIZES])


def delta(made, replica):
    held = made.personal(replica)
    return row({name: held[f"delta.{name}"] for name in SIZES})


def step(made, replica, seed):
    replica.add_gradient(**gradient(seed))
    made.local_step(replica, Progress(seed))
    (exchange,) = made.due(replica, Progress(seed + 1))
    return exchange


def answer(exchange, mean=None, ranges=None, **more):
    """Return a group's answer: unless given, the mean is this peer's own part. Codecs lose
    nothing."""
    count = exchange.tensors["blocks"].numel()
    taken = {"blocks": [(0, count)] if ranges is None else ranges}
    mean = exchange.tensors if mean is None else {"blocks": mean}
    number = exchange.key.round + 1
    return Result("ok", number, ("a", "b"), (1.0, 1.0), mean, None, exchange.tensors, taken, **more)


def travelled(made, replica, rounds):
    """The flat positions of the values that each round sends, found by giving every value its
    position as its number."""
    found = []
    for number in range(rounds):
        made._book.number = number
        places = torch.arange(1.0, VALUES + 1)
        parts = torch.split(places, [torch.Size(shape).numel() for shape in SIZES.values()])
        marked = {
            name: x.reshape(shape) for (name, shape), x in zip(SIZES.items(), parts, strict=True)
        }
        carried = made._extract(marked)["blocks"]
        found.append([int(place) - 1 for place in carried.tolist() if place])
    return found


@pytest.mark.parametrize("replicator", ["striding", "slicing"])
@pytest.mark.parametrize("rate", [1.0, 0.5, 0.3, 1 / 5, 1 / 16, 1 / 40])
@pytest.mark.parametrize("first", [0, 7])
def test_every_value_travels_exactly_once_in_any_q_rounds(vectors, replicator, rate, first):
    """This holds for any size: 1064 values are 16 blocks and 40 values, fewer than the 40 turns of
    the last rate."""
    made = FlexDeMo(replicator=replicator, rate=rate)
    found = travelled(made, replica_of(vectors), first + made.turns)[first:]
    assert made.turns == round(1 / rate)
    assert sorted(place for places in found for place in places) == list(range(VALUES))


def test_striding_takes_the_blocks_whose_number_and_round_add_up_to_a_multiple_of_q(vectors):
    found = travelled(FlexDeMo(replicator="striding", rate=0.25), replica_of(vectors), 6)
    for number, places in enumerate(found):
        assert {place // BLOCK for place in places} == {
            b for b in range(-(-VALUES // BLOCK)) if (b + number) % 4 == 0
        }


def test_slicing_takes_contiguous_slices_in_turn(vectors):
    found = travelled(FlexDeMo(replicator="slicing", rate=0.25), replica_of(vectors), 5)
    assert [places == list(range(places[0], places[-1] + 1)) for places in found] == [True] * 5
    assert [places[0] for places in found] == [0, 5 * BLOCK, 10 * BLOCK, 15 * BLOCK, 0]


def test_random_draws_every_block_as_often_as_every_other():
    """Chi-square: 32 blocks, 8 drawn in each of 2,000 rounds; the statistic's mean is 23.25,
    its 99.99 % quantile 58."""
    made, rounds, blocks = FlexDeMo(replicator="random", rate=0.25), 2000, 32
    counts = Counter()
    for number in range(rounds):
        drawn = made.chosen(blocks, number).tolist()
        assert len(drawn) == len(set(drawn)) == 8
        counts.update(drawn)
    assert set(counts) == set(range(blocks))
    expected = rounds / 4
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 58


def test_random_draws_differ_by_round_and_seed_and_are_alike_where_both_are():
    one, same, other = (
        FlexDeMo(replicator="random"),
        FlexDeMo(replicator="random"),
        FlexDeMo(replicator="random", seed=7),
    )
    draws = [one.chosen(160, number).tolist() for number in range(20)]
    assert draws == [same.chosen(160, number).tolist() for number in range(20)]
    assert len({tuple(sorted(draw)) for draw in draws}) == 20
    assert draws != [other.chosen(160, number).tolist() for number in range(20)]


def test_the_places_of_every_replicator_are_those_of_the_golden_file(golden):
    """Peers of different versions must choose alike."""
    now = {
        kind: [
            FlexDeMo(replicator=kind, rate=0.25).chosen(12, number).tolist()
            for number in (0, 1, 6, 2**40)
        ]
        for kind in ("striding", "slicing", "random", "full")
    }
    assert golden("flexdemo", now) == now


def test_random_at_rate_one_is_full(vectors):
    ends = []
    for options in ({"replicator": "random", "rate": 1.0}, {"replicator": "full"}):
        made, replica = FlexDeMo(**options), replica_of(vectors, lr=0.125)
        for seed in range(4):
            exchange = step(made, replica, seed)
            made.apply(replica, exchange, answer(exchange))
        ends.append((row(replica.read(replica.names, "param")), delta(made, replica)))
    assert torch.equal(ends[0][0], ends[1][0])
    assert torch.equal(ends[0][1], ends[1][1])
    assert not ends[0][1].any()


@pytest.mark.parametrize("replicator", ["striding", "slicing", "random", "full"])
def test_what_leaves_the_momentum_is_what_was_delivered_bit_by_bit(vectors, replicator):
    made, replica = FlexDeMo(replicator=replicator, rate=0.3, decay=0.5), replica_of(vectors)
    for seed in range(5):
        exchange = step(made, replica, seed)
        before = delta(made, replica)
        made.apply(replica, exchange, answer(exchange))
        after, sent = delta(made, replica), before - delta(made, replica)
        assert torch.equal(after + sent, before)
        assert sorted(sent[sent != 0].tolist()) == sorted(
            x for x in exchange.tensors["blocks"].tolist() if x
        )
        assert bool(sent.any())


def test_steps_without_an_exchange_are_added_to_the_momentum_and_change_no_parameter(vectors):
    made, replica = FlexDeMo(replicator="full", period=3, decay=0.5), replica_of(vectors)
    start = row(replica.read(replica.names, "param"))
    expected = torch.zeros(VALUES)
    for seed in range(3):
        replica.add_gradient(**gradient(seed))
        assert made.due(replica, Progress(seed)) == []
        made.local_step(replica, Progress(seed))
        expected = 0.5 * expected + row(gradient(seed))
    assert torch.equal(delta(made, replica), expected)
    assert torch.equal(row(replica.read(replica.names, "param")), start)
    assert not any(x.any() for x in replica.read(replica.names, "grad").values())
    (exchange,) = made.due(replica, Progress(3))
    assert torch.equal(exchange.tensors["blocks"][:VALUES], expected)


def test_the_step_is_the_sign_of_the_mean_where_a_part_travelled_and_nothing_elsewhere(vectors):
    made, replica = FlexDeMo(replicator="slicing", rate=0.5), replica_of(vectors, lr=0.25)
    start = row(replica.read(replica.names, "param"))
    exchange = step(made, replica, 1)
    mean = dyadic(exchange.tensors["blocks"].numel(), 4)
    made.apply(replica, exchange, answer(exchange, mean))
    moved = row(replica.read(replica.names, "param")) - start
    assert torch.equal(moved[: len(mean)], -0.25 * torch.sign(mean)[: len(moved)])
    assert not moved[len(mean) :].any()


def test_without_sign_the_step_is_the_mean(vectors):
    made, replica = FlexDeMo(replicator="full", sign=False), replica_of(vectors, lr=0.5)
    start = row(replica.read(replica.names, "param"))
    exchange = step(made, replica, 1)
    made.apply(replica, exchange, answer(exchange))
    assert torch.equal(row(replica.read(replica.names, "param")), start - 0.5 * row(gradient(1)))


def test_shards_that_came_too_late_stay_in_the_momentum(vectors):
    made, replica = FlexDeMo(replicator="full"), replica_of(vectors)
    exchange = step(made, replica, 1)
    before = delta(made, replica)
    made.apply(replica, exchange, answer(exchange, ranges=[(0, 300), (500, 600)]))
    after = delta(made, replica)
    assert not after[:300].any()
    assert torch.equal(after[300:500], before[300:500])
    assert not after[500:600].any()
    assert torch.equal(after[600:], before[600:])


def test_a_late_result_leaves_the_momentum_it_would_have_left_in_time(vectors):
    ends = []
    for late in (0, 3):
        made, replica = FlexDeMo(replicator="striding", rate=0.5, decay=0.5), replica_of(vectors)
        exchange = step(made, replica, 1)
        for seed in range(10, 10 + late):
            replica.add_gradient(**gradient(seed))
            made.local_step(replica, Progress(seed))
            assert made.due(replica, Progress(seed)) == []
        made.apply(replica, exchange, answer(exchange, steps_since=late))
        for seed in range(10 + late, 13):
            replica.add_gradient(**gradient(seed))
            made.local_step(replica, Progress(seed))
        ends.append(delta(made, replica))
    assert torch.equal(*ends)


def test_a_gradient_that_waits_for_its_local_step_survives_a_replayed_round(vectors):
    """In a training loop of the user's own, a missed round is replayed between the backward pass
    and the step."""
    made, replica = FlexDeMo(replicator="full"), replica_of(vectors)
    exchange = step(made, replica, 1)
    made.apply(replica, exchange, answer(exchange))
    start = row(replica.read(replica.names, "param"))
    replica.add_gradient(**gradient(2))
    mean = {"blocks": torch.ones_like(exchange.tensors["blocks"])}
    key = type(exchange.key)(exchange.key.stream, 1)
    made.apply(
        replica,
        type(exchange)(key, "mean", exchange.group, {}),
        Result("ok", 2, ("b",), (1.0,), mean),
    )
    assert torch.equal(row(replica.read(replica.names, "grad")), row(gradient(2)))
    assert torch.equal(row(replica.read(replica.names, "param")), start - 1.0)
    assert not delta(made, replica).any()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"replicator": "demo"},
            r"replicator 'demo' is not known; choose from striding, .* or method demo",
        ),
        ({"rate": 0.0}, r"a rate of 0.0 is not allowed; choose one in \[1/65536, 1\]"),
        ({"rate": 1.5}, "a rate of 1.5 is not allowed"),
        ({"rate": float("nan")}, "a rate of nan is not allowed"),
        ({"seed": -1}, "a seed of -1 does not fit into 64 bits"),
        ({"return_codec": "topk:64/4096"}, "return codec topk:64/4096 is biased"),
        ({"decay": 1.0}, r"a decay of 1.0 is out of range; choose one in \[0, 1\)"),
        ({"period": 0}, "a period of 0 steps is out of range"),
        ({"deadline_s": 0}, "a deadline of 0 s is out of range"),
    ],
)
def test_options_that_cannot_work_are_refused(options, reason):
    with pytest.raises(ValueError, match=reason):
        FlexDeMo(**options)
