"""The server's leases: what it computes, sets aside, merges and drops. With trainers:
test_exactly_once.py."""

import pytest

from farflock.swarm.protocol import gradient_leases
from farflock.swarm.protocol.gradient_leases import GradientLeases

KEY, OTHER = ("t", 4), ("t", 5)


@pytest.fixture
def book():
    return GradientLeases(places=2, lease_s=5.0)


def put_aside(book, key=KEY, attempt=1, now_s=0.0):
    assert book.begin(key, attempt) == "run"
    assert book.staged(key, now_s) == attempt


def test_a_gradient_goes_from_running_to_committed(book):
    put_aside(book)
    assert book.kept == {KEY}
    assert book.confirm(KEY, 1) == "merge"
    assert book.confirm(KEY, 1) == "merged"
    assert book.kept == set()
    assert book.offer(7) == [KEY]
    assert book.close(7, [KEY]) == []
    assert book.confirm(KEY, 1) == "merged"
    assert book.begin(KEY, 1) == "nothing"


def test_a_repeated_request_gets_the_same_answer_under_the_newer_attempt(book):
    assert book.begin(KEY, 1) == "run"
    assert book.begin(KEY, 2) == "nothing"
    assert book.staged(KEY, 0.0) == 2
    assert book.begin(KEY, 3) == "again"
    assert book.confirm(KEY, 2) == "unknown"
    assert book.confirm(KEY, 3) == "merge"


def test_places_are_few_and_what_is_merged_takes_none(book):
    put_aside(book)
    assert book.begin(OTHER, 1) == "run"
    assert book.begin(("u", 1), 1) == "busy"
    book.confirm(KEY, 1)
    assert book.taken == 1
    assert book.begin(("u", 1), 1) == "run"


def test_a_lease_that_runs_out_drops_what_was_not_confirmed(book):
    put_aside(book, now_s=1.0)
    book.expire(5.9)
    assert book.kept == {KEY}
    book.expire(6.0)
    assert book.kept == set()
    assert book.confirm(KEY, 1) == "unknown"
    assert book.begin(KEY, 2) == "run"


def test_a_lease_does_not_end_what_is_merged(book):
    put_aside(book)
    book.confirm(KEY, 1)
    book.expire(100.0)
    assert book.offer(0) == [KEY]


def test_what_is_revoked_is_dropped_also_while_it_runs(book):
    put_aside(book)
    book.revoke(KEY, 1)
    assert book.kept == set()
    book.begin(OTHER, 1)
    book.revoke(OTHER, 1)
    assert book.staged(OTHER, 0.0) is None


def test_an_old_revocation_or_one_of_what_counts_changes_nothing(book):
    put_aside(book, attempt=2)
    book.revoke(KEY, 1)
    assert book.kept == {KEY}
    book.confirm(KEY, 2)
    book.revoke(KEY, 2)
    assert book.offer(0) == [KEY]


def test_what_a_round_left_out_is_offered_to_the_next_one(book):
    put_aside(book)
    put_aside(book, OTHER)
    book.confirm(KEY, 1)
    assert book.offer(0) == [KEY]
    book.confirm(OTHER, 1)
    assert book.offer(0) == [OTHER]
    assert book.close(0, []) == [KEY, OTHER]
    assert book.offer(1) == [KEY, OTHER]
    assert book.close(1, [KEY]) == [OTHER]


def test_what_another_server_brought_in_is_dropped_here(book):
    put_aside(book)
    book.close(3, [KEY, OTHER])
    assert book.kept == set()
    assert book.begin(KEY, 2) == "nothing"  # it counts already
    assert book.begin(OTHER, 2) == "run"  # never seen here


def test_a_server_that_left_its_group_has_nothing(book):
    put_aside(book)
    book.confirm(KEY, 1)
    own = ("me", 4)
    book.own(own)
    assert book.reset() == [own], "nobody else is asked for that"
    assert book.offer(0) == []
    assert book.confirm(KEY, 1) == "unknown"


def test_what_is_remembered_is_bounded(book, monkeypatch):
    monkeypatch.setattr(gradient_leases, "REMEMBERED", 3)
    for number in range(9):
        key = ("t", number)
        put_aside(book, key)
        book.confirm(key, 1)
        book.close(number, [book.offer(number)[0]])
    assert book.remembered == 3


def test_what_was_refused_is_never_merged_also_if_its_request_comes_once_more(book):
    assert book.confirm(KEY, 3) == "unknown"
    assert book.begin(KEY, 3) == "nothing"
    assert book.begin(KEY, 4) == "run"
    assert book.confirm(KEY, 3) == "unknown"
    assert book.staged(KEY, 0.0) == 4
    assert book.confirm(KEY, 4) == "merge"


def test_a_confirmation_that_comes_while_it_runs_is_refused_and_ends_it(book):
    assert book.begin(KEY, 1) == "run"
    assert book.confirm(KEY, 1) == "unknown"
    assert book.staged(KEY, 0.0) is None


def test_a_microbatch_of_ones_own_takes_no_place_and_is_merged_until_a_round_names_it(book):
    for number in range(10):
        book.own(("me", number))
    assert (book.taken, book.kept) == (0, set())
    put_aside(book)
    assert book.offer(3, [("me", 0), ("me", 1), KEY]) == [("me", 0), ("me", 1)]
    assert book.close(3, [("me", 0)]) == [("me", 1)]
    book.expire(1e9)
    assert book.offer(4) == [("me", number) for number in range(1, 10)]
    assert book.confirm(("me", 0), 1) == "merged"  # as a peer that asks what counts is told
