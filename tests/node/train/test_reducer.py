"""The reducer: the mean of shards without corrupt ones, and what its return codec owes."""

import itertools
import math
import struct
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.catalog import codec
from farflock.compression.elementwise import weighted_mean
from farflock.node.train.shards import MAX_ABS, Reducer, ShardLayout
from farflock.optimizers.parts.state import WrongState

SHAPES = {"embed": (300, 2), "norm": (7,), "scalar": (), "empty": (0, 4), "head": (5, 3)}
EXACT = ShardLayout.of({"x": (4,)}, codec("fp32"))
reducer = partial(Reducer, compensate=False)
SIGNS = codec("sign")  # of 4 values: one magnitude, their mean


def packed(*values):
    """The payload of `EXACT`'s one shard."""
    return EXACT.pack(0, 0, [torch.tensor(values)])


def random_tensors(shapes, seed):
    chance = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def test_the_reducer_takes_the_mean_in_peer_order_whatever_the_order_of_arrival():
    shapes = {"x": (99,)}
    cut = ShardLayout.of(shapes, codec("fp16"))
    weights = {"a": 0.3, "b": 7.0, "c": 1.0, "d": 0.1}
    inputs = [
        (peer, weights[peer], cut.encode(0, 0, random_tensors(shapes, seed)))
        for seed, peer in enumerate("dacb")
    ]
    made = reducer(cut, codec("fp32"))
    (result,) = {made.reduce(0, 0, order) for order in itertools.permutations(inputs)}
    decoded = ShardLayout(cut.shards, codec("fp32"), 0).decode(0, 0, result.data)[0]
    values = {peer: (weight, cut.decode(0, 0, payload)) for peer, weight, payload in inputs}
    assert torch.equal(decoded, weighted_mean([values[peer] for peer in "abcd"])[0])
    assert not torch.equal(decoded, weighted_mean([values[peer] for peer in "dcba"])[0])
    assert result.rejected == ()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        struct.pack("<I4f", 15, 0, 0, 0, 0),
        struct.pack("<I4f", 16, math.nan, 0, 0, 0),
        b"x" * 21,
    ],
)
def test_corrupt_contributions_are_left_out_and_named(bad):
    good = [("a", 1.0, packed(1.0, 2.0, 3.0, 4.0)), ("c", 3.0, packed(5.0, 2.0, -1.0, 0.0))]
    result = reducer(EXACT, codec("fp32")).reduce(0, 0, [good[1], ("b", 100.0, bad), good[0]])
    assert result.rejected == ("b",)
    assert EXACT.decode(0, 0, result.data)[0].tolist() == [4.0, 2.0, 0.0, 1.0]


def test_with_nothing_usable_there_is_no_mean_and_everybody_is_named():
    result = reducer(EXACT, codec("fp32")).reduce(0, 0, [("a", 1.0, b"?"), ("b", 1.0, b"")])
    assert result.data is None
    assert result.rejected == ("a", "b")


@pytest.mark.parametrize("back", ["fp32", "bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("peers", [1, 2, 3, 7, 63])
def test_what_comes_back_of_the_largest_values_is_let_in_by_everybody(back, peers):
    """Rounding may lift a mean of values at the limit over it; the round would fail for all."""
    huge = [(f"{peer:02}", 1.0, packed(MAX_ABS, -MAX_ABS, 1.0, 0.0)) for peer in range(peers)]
    result = reducer(EXACT, codec(back)).reduce(0, 0, huge)
    decoded = ShardLayout(EXACT.shards, codec(back), 0).decode(0, 0, result.data)[0]
    assert decoded[:2].tolist() == pytest.approx(
        [65504, -65504] if back == "fp16" else [MAX_ABS / 2, -MAX_ABS / 2]
    )


def test_the_mean_travels_back_in_the_return_codec():
    result = reducer(EXACT, codec("bf16")).reduce(0, 0, [("a", 1.0, packed(1.0, 1.001, 2.0, 3.0))])
    assert len(result.data) == 4 + 2 * 4
    back = ShardLayout(EXACT.shards, codec("bf16"), 0)
    assert back.decode(0, 0, result.data)[0].tolist() == [1.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("weight", [0.0, 1e-300, 1e-40])
def test_weights_that_are_nothing_in_float32_make_no_mean(weight):
    result = reducer(EXACT, codec("fp32")).reduce(0, 0, [("a", weight, packed(1.0, 2.0, 3.0, 4.0))])
    assert result.data is None


@pytest.mark.parametrize("weight", [1e-300, 1e-20, 1e18])
def test_all_weights_that_a_message_can_hold_give_a_finite_mean(weight):
    inputs = [("a", 1.0, packed(1.0, 2.0, 3.0, 4.0)), ("b", weight, packed(5.0, 2.0, 3.0, -4.0))]
    result = reducer(EXACT, codec("fp32")).reduce(0, 0, inputs)
    expected = [1.0, 2.0, 3.0, 4.0] if weight < 1 else [5.0, 2.0, 3.0, -4.0]
    assert EXACT.decode(0, 0, result.data)[0].tolist() == pytest.approx(expected)


# what the return codec leaves out


def unpacked(payload, back=SIGNS):
    return ShardLayout(EXACT.shards, back, 0).decode(0, 0, payload)[0]


@pytest.fixture
def compensating():
    """A reducer of signs that remembers, and what it makes of one peer's values in a round."""
    made = Reducer(EXACT, SIGNS, compensate=True)

    def reduce(number, *values):
        return made.reduce(number, 0, [("a", 1.0, packed(*values))]).data

    return made, reduce


def feedback(made):
    return {name: x.tolist() for name, x in made.feedback().items()}


def test_what_is_left_out_comes_with_the_next_mean(compensating):
    made, reduce = compensating
    first = reduce(0, 4.0, 0.0, 0.0, 0.0)
    assert unpacked(first).tolist() == [1, 1, 1, 1]
    made.settle(0, [first])
    assert feedback(made) == {"0.0": [3, -1, -1, -1]}
    second = reduce(1, 1.0, 0.0, 0.0, 0.0)  # and so 4, -1, -1, -1
    assert unpacked(second).tolist() == [1.75, -1.75, -1.75, -1.75]
    made.settle(1, [second])
    assert feedback(made) == {"0.0": [2.25, 0.75, 0.75, 0.75]}


@given(st.lists(st.lists(st.integers(-99, 99), min_size=4, max_size=4), min_size=1, max_size=20))
def test_what_was_sent_and_what_is_owed_is_all_there_was(rounds):
    made, sent = Reducer(EXACT, codec("ecsq:50"), compensate=True), torch.zeros(4)
    for number, values in enumerate(rounds):
        payload = made.reduce(number, 0, [("a", 1.0, packed(*map(float, values)))]).data
        made.settle(number, [payload])
        sent += unpacked(payload, codec("ecsq:50"))
    left = made.feedback().get("0.0", torch.zeros(4))
    torch.testing.assert_close(
        sent + left, torch.tensor(rounds).float().sum(dim=0), atol=0.02, rtol=1e-4
    )


def test_without_it_every_mean_is_coded_alone():
    made = reducer(EXACT, SIGNS)
    for number in range(3):
        payload = made.reduce(number, 0, [("a", 1.0, packed(4.0, 0.0, 0.0, 0.0))]).data
        made.settle(number, [payload])
        assert unpacked(payload).tolist() == [1, 1, 1, 1]
    assert made.feedback() == {}


def test_of_a_round_that_failed_only_what_was_owed_before_is_owed_still(compensating):
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    reduce(1, 9.0, 9.0, 9.0, -9.0)
    made.settle(1, None)
    assert feedback(made) == {"0.0": [3, -1, -1, -1]}


def test_a_reducer_whose_result_was_not_chosen_owes_no_correction(compensating):
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    reduce(1, 1.0, 0.0, 0.0, 0.0)
    made.settle(1, [b"another's"])
    assert feedback(made) == {}


def test_a_member_that_did_not_reduce_owes_no_correction(compensating):
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    made.settle(1, [b"another's"])
    assert feedback(made) == {}


def test_a_second_reduction_of_a_round_replaces_the_first(compensating):
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    useless = reduce(1, 7.0, 0.0, 0.0, 0.0)
    payload = reduce(1, 1.0, 0.0, 0.0, 0.0)
    assert payload != useless
    made.settle(1, [payload])
    assert feedback(made) == {"0.0": [2.25, 0.75, 0.75, 0.75]}


def test_what_is_on_loan_is_not_lent_twice(compensating):
    """A member that still waits for one round's decision may reduce for the next one already."""
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    first, second = reduce(1, 1.0, 0.0, 0.0, 0.0), reduce(2, 4.0, 0.0, 0.0, 0.0)
    assert unpacked(second).tolist() == [1, 1, 1, 1]  # as if nothing had been owed
    made.settle(1, [first])
    made.settle(2, [second])
    assert feedback(made) == {"0.0": [2.25 + 3, 0.75 - 1, 0.75 - 1, 0.75 - 1]}


def test_rounds_that_were_passed_over_give_their_loans_back(compensating):
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    reduce(1, 1.0, 0.0, 0.0, 0.0)
    made.settle(2, None)
    assert feedback(made) == {"0.0": [3, -1, -1, -1]}


def test_an_exact_codec_leaves_nothing_out_and_keeps_the_sign_of_zero():
    made = Reducer(EXACT, codec("fp32"), compensate=True)
    for number in range(2):
        payload = made.reduce(number, 0, [("a", 1.0, packed(-0.0, 1.0, -2.0, 0.0))]).data
        assert payload == packed(-0.0, 1.0, -2.0, 0.0)
        made.settle(number, [payload])
    assert made.feedback() == {}


def test_the_residuals_go_into_another_reducer_and_a_loan_counts_as_not_given(compensating):
    made, reduce = compensating
    made.settle(0, [reduce(0, 4.0, 0.0, 0.0, 0.0)])
    reduce(1, 9.0, 9.0, 9.0, -9.0)
    other = Reducer(EXACT, SIGNS, compensate=True)
    other.load_state(made.feedback())
    assert feedback(other) == {"0.0": [3, -1, -1, -1]}
    assert other.reduce(1, 0, [("a", 1.0, packed(1.0, 0.0, 0.0, 0.0))]).data == reduce(
        1, 1.0, 0.0, 0.0, 0.0
    )


@pytest.mark.parametrize(
    "wrong", [{"1.0": torch.zeros(4)}, {"0.0": torch.zeros(3)}, {"x": torch.zeros(4)}]
)
def test_the_residuals_of_another_layout_is_refused(wrong):
    with pytest.raises(WrongState, match="another layout"):
        Reducer(EXACT, SIGNS, compensate=True).load_state(wrong)


def test_half_a_shards_residual_is_refused():
    two = ShardLayout.of({"x": (4,), "y": (2,)}, codec("fp32"))
    with pytest.raises(WrongState, match="shard 0 lacks 1 segments"):
        Reducer(two, SIGNS, compensate=True).load_state({"0.1": torch.ones(2)})
