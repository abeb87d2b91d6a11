"""A trainer's allowance of microbatches that no round has named adapts to the size of rounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.protocol.allowance import (
    CAREFUL,
    LARGE_FACTOR,
    LATE_FACTOR,
    ROUND_TIMEOUT_S,
    TIMEOUT_ROUNDS,
    TOLERANCE,
    Allowance,
)

BATCH = 8


def rounds_of(trainers, rounds):
    """Return the size of each round where all trainers are always held back and each round names
    all that there is."""
    allowances = [Allowance(BATCH, 2 * BATCH) for _ in range(trainers)]
    sizes = []
    for number in range(rounds):
        size = 0
        for each in allowances:
            begun = 0
            while each.has_room(begun, float(number)):
                begun += 1
            size += begun
        for each in allowances:
            each.named(size, number + 0.5)
        sizes.append(size)
    return sizes


def test_at_first_there_is_room_up_to_the_limit():
    allowance = Allowance(BATCH, 2.5)
    assert [allowance.has_room(unnamed, 0.0) for unnamed in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.parametrize("trainers", [1, 2, 6])
def test_rounds_of_several_trainers_shrink_to_little_more_than_their_batch(trainers):
    sizes = rounds_of(trainers, 40)
    assert sizes[0] == trainers * 2 * BATCH
    assert max(sizes[20:]) <= TOLERANCE * BATCH + trainers, "each grows by one at most"
    assert min(sizes[20:]) >= BATCH - trainers


def test_unequal_trainers_come_to_equal_shares():
    """As additive increase and multiplicative decrease do."""
    one, other = Allowance(BATCH, 2 * BATCH), Allowance(BATCH, 1)
    for number in range(100):
        sizes = [int(each.limit) for each in (one, other)]
        for each in (one, other):
            each.has_room(10**6, float(number))
            each.named(sum(sizes), number + 0.5)
    assert one.limit == pytest.approx(other.limit, abs=1.0)


def test_rounds_of_the_right_size_leave_alone_what_nobody_is_short_of():
    allowance = Allowance(BATCH, 2 * BATCH)
    for number in range(10):
        assert allowance.has_room(BATCH, float(number))
        allowance.named(BATCH, number + 0.5)
    assert allowance.limit == 2 * BATCH


def test_one_that_held_microbatches_back_grows_by_one_with_a_round_of_the_right_size():
    allowance = Allowance(BATCH, 3)
    assert not allowance.has_room(3, 0.0)
    allowance.named(int(TOLERANCE * BATCH), 1.0)
    assert allowance.limit == 4
    allowance.named(BATCH, 2.0)
    assert allowance.limit == 4, "it held nothing back since"


def test_a_round_that_is_too_large_shrinks_it_to_less_than_would_fit_but_never_below_one():
    allowance = Allowance(BATCH, 6)
    allowance.named(3 * BATCH, 0.0)
    assert allowance.limit == pytest.approx(6 * TOLERANCE / 3 * LARGE_FACTOR)
    allowance.named(1000 * BATCH, 1.0)
    assert allowance.limit == 1


def test_without_rounds_it_doubles_as_the_trainers_that_had_the_other_shares_may_be_gone():
    allowance = Allowance(BATCH, 2)
    assert not allowance.has_room(2, 10.0)
    assert not allowance.has_room(2, 10.0 + ROUND_TIMEOUT_S - 0.1)
    assert allowance.has_room(2, 10.0 + ROUND_TIMEOUT_S)
    assert allowance.limit == 4


def test_long_rounds_are_waited_for_longer():
    allowance, apart_s = Allowance(BATCH, 2), 10 * ROUND_TIMEOUT_S
    allowance.named(BATCH, 0.0)
    allowance.named(BATCH, apart_s)
    assert not allowance.has_room(2, apart_s)
    assert not allowance.has_room(2, (1 + TIMEOUT_ROUNDS) * apart_s - 0.1)
    assert allowance.has_room(2, (1 + TIMEOUT_ROUNDS) * apart_s)


def test_a_late_microbatch_shrinks_it_once_for_all_that_set_out_before_and_slows_its_growth():
    allowance = Allowance(BATCH, 10)
    for begun_s in (0.0, 3.0, 1.0):
        allowance.late(begun_s, 5.0)
    assert allowance.limit == 10 * LATE_FACTOR
    allowance.late(5.0, 9.0)
    assert allowance.limit == pytest.approx(10 * LATE_FACTOR**2)
    assert not allowance.has_room(100, 10.0)
    allowance.named(BATCH, 11.0)
    assert allowance.limit == pytest.approx(10 * LATE_FACTOR**2 + CAREFUL)
    for again_s in range(20, 60):
        allowance.late(again_s, again_s + 0.5)
    assert allowance.limit == 1


@given(st.lists(st.one_of(st.none(), st.integers(0, 100)), max_size=50))
def test_whatever_rounds_come_a_trainer_that_asks_long_enough_may_begin(sizes):
    allowance, now_s, unnamed = Allowance(BATCH, 2 * BATCH), 0.0, 0
    for size in sizes:
        now_s += 1.0
        if size is None:
            unnamed += allowance.has_room(unnamed, now_s)
        else:
            allowance.named(size, now_s)
            unnamed = max(unnamed - size, 0)
    for _ in range(3):
        now_s += TIMEOUT_ROUNDS * 60.0 + ROUND_TIMEOUT_S
        if allowance.has_room(unnamed, now_s):
            return
    pytest.fail("held back for ever")


@pytest.mark.parametrize(("batch", "limit"), [(0, 1), (1, 0)])
def test_an_allowance_of_nothing_is_refused(batch, limit):
    with pytest.raises(ValueError, match="at least 1"):
        Allowance(batch, limit)
