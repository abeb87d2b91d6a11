"""A member that becomes slow is named after three rounds, with what is slow about it."""

import collections
import random

import pytest

from farflock.swarm.messages import Key
from farflock.swarm.protocol.slowness import (
    ENOUGH_ROUNDS,
    KEPT_ROUNDS,
    MAX_TIMES,
    SLOW_ROUNDS,
    Slowness,
)

ORDINARY = (1.0, 0.95, 1.05, 1.1, 0.9)


class Watch:
    """Notes times of members, a round after the other."""

    def __init__(self):
        self.slowness, self.round = Slowness(), collections.Counter()

    def note(self, peer, *times, cause="machine"):
        """Note these times; return who is named once the next round has begun for this peer."""
        for seconds in times:
            key = Key("delta", self.round[peer, cause])
            self.round[peer, cause] += 1
            self.slowness.note(peer, cause, key, seconds)
            self.slowness.note(peer, cause, key, seconds / 2)  # a round's longest time counts
        # that of the next round so far, by which the last one counts
        self.slowness.note(peer, cause, Key("delta", self.round[peer, cause]), 0.0)
        return self.slowness.named("abcd")


@pytest.fixture
def watch():
    """What is known after some rounds with three members."""
    known, draw = Watch(), random.Random(1)
    for peer in "abc":
        for cause in ("machine", "line"):
            known.note(peer, *(draw.choice(ORDINARY) for _ in range(KEPT_ROUNDS)), cause=cause)
    return known


@pytest.mark.parametrize("cause", ["machine", "line"])
def test_it_takes_three_rounds_in_a_row_and_one_ordinary_one_ends_it(watch, cause):
    assert watch.note("b", *[4.0] * (SLOW_ROUNDS - 1), cause=cause) == {}
    assert watch.note("b", 4.0, cause=cause) == {"b": cause}
    assert watch.note("b", 1.0, cause=cause) == {}


def test_a_slow_line_is_named_before_the_machine_that_it_holds_up(watch):
    watch.note("b", *[4.0] * SLOW_ROUNDS, cause="line")
    assert watch.note("b", *[4.0] * SLOW_ROUNDS) == {"b": "line"}


def test_what_is_within_three_deviations_is_ordinary_also_where_times_never_vary():
    watch = Watch()
    assert watch.note("a", *[1.0] * ENOUGH_ROUNDS, *[1.29] * SLOW_ROUNDS) == {}
    assert watch.note("a", *[2.0] * SLOW_ROUNDS) == {"a": "machine"}


def test_one_that_always_was_slow_or_stays_so_is_not_named(watch):
    assert watch.note("d", *[9.0] * KEPT_ROUNDS) == {}
    assert watch.note("b", *[4.0] * KEPT_ROUNDS) == {}
    assert watch.note("b", *[4.0] * SLOW_ROUNDS) == {}


def test_what_most_do_at_once_is_this_peers_own_doing(watch):
    assert watch.note("a", *[4.0] * SLOW_ROUNDS, cause="line") == {"a": "line"}
    assert watch.note("b", *[4.0] * SLOW_ROUNDS, cause="line") == {}
    assert watch.note("a", 1.0, cause="line") == {"b": "line"}


def test_before_there_is_anything_to_compare_with_nobody_is_named():
    watch = Watch()
    assert watch.note("a", *[0.1] * 2, *[9.0] * SLOW_ROUNDS) == {}


def test_one_that_left_is_forgotten(watch):
    assert watch.note("b", *[4.0] * SLOW_ROUNDS) == {"b": "machine"}
    assert watch.slowness.named("ac") == {}
    assert watch.slowness.named("abc") == {}


def test_times_of_members_that_come_and_go_are_bounded_although_nobody_asks():
    for others, known in ((10, {"b": "machine"}), (MAX_TIMES, {})):
        watch = Watch()
        for peer in "abc":
            watch.note(peer, *ORDINARY)
        assert watch.note("b", *[4.0] * SLOW_ROUNDS) == {"b": "machine"}
        for number in range(others):
            watch.slowness.note(f"gone {number}", "machine", Key("delta", 0), 1.0)
        assert watch.slowness.named("abcd") == known
