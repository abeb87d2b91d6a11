"""Turns: each ballot has one owner and opens in its turn."""

import itertools
import random

import pytest

from farflock.swarm.protocol.agreement.turns import (
    MAX_DOUBLINGS,
    TAKEOVER_S,
    BallotTurns,
    next_ballot,
    owner,
)


def slow_latest(start, elapsed_s, turn_s, order, suspects):
    """The obvious twin: turn after turn."""
    opens_s, latest = 0.0, start
    for number in itertools.count(start):
        if opens_s > elapsed_s:
            return latest
        latest = number
        opens_s += 0.0 if owner(number, order) in suspects else turn_s


@pytest.mark.parametrize("seed", range(200))
def test_it_equals_turn_after_turn(seed):
    chance = random.Random(seed)
    order = list(range(chance.randint(1, 9)))
    chance.shuffle(order)
    suspects = set(chance.sample(order, chance.randint(0, len(order) - 1)))
    elapsed_s = chance.choice([0.0, 0.5, 1.0, 3.0, 17.25, 100.0, 1000.0])
    assert BallotTurns(order, 5.0).latest(0, 5.0 + elapsed_s, suspects) == slow_latest(
        1, elapsed_s, TAKEOVER_S, order, suspects
    )
    turns, number = BallotTurns(order, 0.0), chance.randint(1, 20)
    assert turns.latest(number, 9.0, suspects) >= number
    turn_s = TAKEOVER_S * 2 ** (1 // len(order))
    expected = slow_latest(number, elapsed_s, turn_s, order, suspects)
    assert turns.latest(number, 9.0 + elapsed_s, suspects) == expected


def test_at_first_only_the_first_owners_ballot_is_open_and_suspects_are_skipped():
    order = (2, 0, 1)
    assert BallotTurns(order, 0.0).latest(0, 0.0, set()) == 1
    assert owner(1, order) == 2
    assert BallotTurns(order, 0.0).latest(0, 0.0, {2}) == 2
    assert owner(2, order) == 0
    assert BallotTurns(order, 0.0).latest(0, 0.9, {2, 0}) == 3


def test_a_promise_begins_a_whole_turn_however_many_had_come_before():
    """So nobody is outbid at once, and nobody that takes its turn early bars the next one."""
    order = (0, 1, 2, 3)
    turns = BallotTurns(order, 0.0)
    reached = turns.latest(0, 600.0, ())
    assert reached > 100
    for promised in (2, reached):
        assert turns.latest(promised, 600.0, ()) == promised
        assert turns.latest(promised, 600.0 + 0.9 * TAKEOVER_S, ()) == promised
        assert turns.latest(promised, 600.0 + TAKEOVER_S, ()) == promised + 1


def test_turns_get_longer_only_with_promises_and_only_so_long():
    order, now_s, number, lengths = (0, 1, 2), 0.0, 0, []
    turns = BallotTurns(order, now_s)
    for _ in range(len(order) * (MAX_DOUBLINGS + 3)):
        now_s += 1000.0
        number = turns.latest(number, now_s, ()) + 1
        begun_s = now_s
        while turns.latest(number, now_s, ()) == number:
            now_s += TAKEOVER_S / 2
        lengths.append(now_s - begun_s)
    doublings = [min(promises // 3, MAX_DOUBLINGS) for promises in range(1, len(lengths) + 1)]
    assert lengths == [TAKEOVER_S * 2**each for each in doublings]


def test_a_suspect_that_is_heard_again_closes_no_turn_that_has_come():
    turns = BallotTurns((0, 1, 2), 0.0)
    assert turns.latest(0, 1.0, {0, 1}) == 6
    assert turns.latest(0, 1.1, ()) == 6


def reached_together(hears, lag_s, lasts_s):
    """The turns of two members, one of which began to count later, after this time."""
    both = [BallotTurns((0, 1, 2), begun_s) for begun_s in (0.0, lag_s)]
    latest, now_s = [1, 1], 0.0
    while now_s < lag_s + lasts_s:
        now_s += 0.1
        latest = [turns.latest(0, now_s, ()) for turns in both]
        if hears:
            both[1].hear(latest[0])
    return latest


@pytest.mark.parametrize("lag_s", [3.0, 11.0, 60.0])
def test_members_that_have_counted_other_turns_come_together(lag_s):
    early, late = reached_together(False, lag_s, 10 * lag_s)
    assert early - late == pytest.approx(lag_s, abs=1), "each would admit no ballot of the other's"
    early, late = reached_together(True, lag_s, lag_s + 2 * TAKEOVER_S)
    assert early - late in (0, 1)


def test_whoever_names_far_ballots_has_turns_pass_twice_as_fast_and_no_faster():
    turns, latest = BallotTurns((0, 1, 2), 0.0), 1
    for tenth in range(1, 601):
        turns.hear(2**32)
        latest = turns.latest(0, tenth / 10, ())
    assert latest == pytest.approx(1 + 2 * 60, abs=1)


@pytest.mark.parametrize("above", [0, 1, 5, 6, 7, 30, 2**62 - 20])
def test_a_members_next_ballot_is_its_own_and_the_lowest(above):
    order = (3, 1, 0, 2)
    for me in order:
        number = next_ballot(above, order, me)
        assert above < number <= above + len(order)
        assert owner(number, order) == me
    assert owner(0, order) == 3
