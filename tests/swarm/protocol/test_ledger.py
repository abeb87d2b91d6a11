"""The trainer's ledger: what it asks, whose answer counts, when it asks another server. With
servers: test_exactly_once.py."""

import pytest

from farflock.swarm.protocol.ledger import Ledger

PLACE = (4, 1)


@pytest.fixture
def ledger():
    made = Ledger(stages=2)
    made.begin(4)
    return made


def test_a_gradient_goes_from_open_to_committed(ledger):
    assert ledger.open() == [(4, 0), (4, 1)]
    attempt = ledger.send(PLACE, "a")
    assert ledger.phase(PLACE) == "sent"
    assert ledger.replied(PLACE, "a", attempt)
    assert list(ledger.confirms()) == [(PLACE, "a", attempt)]
    ledger.merged(PLACE, attempt)
    assert list(ledger.confirms()) == []
    ledger.committed(1, [4])
    assert ledger.phase(PLACE) == "committed"
    assert ledger.finish() == []
    ledger.committed(0, [4])
    assert ledger.finish() == [4]
    assert ledger.phase(PLACE) == "committed"
    assert ledger.open() == []


def test_after_silence_another_server_is_asked_and_the_late_answer_counts_for_nothing(ledger):
    first = ledger.send(PLACE, "a")
    ledger.silent(PLACE, first)
    second = ledger.send(PLACE, "b")
    assert not ledger.replied(PLACE, "a", first)
    assert ledger.replied(PLACE, "b", second)
    assert [peer for _, peer, _ in ledger.confirms()] == ["b"]


def test_a_late_answer_is_welcome_while_no_other_server_was_asked(ledger):
    attempt = ledger.send(PLACE, "a")
    ledger.silent(PLACE, attempt)
    assert ledger.replied(PLACE, "a", attempt)
    assert ledger.phase(PLACE) == "bound"


def test_the_same_answer_twice_is_one(ledger):
    attempt = ledger.send(PLACE, "a")
    assert ledger.replied(PLACE, "a", attempt)
    assert ledger.replied(PLACE, "a", attempt)
    ledger.merged(PLACE, attempt)
    assert ledger.replied(PLACE, "a", attempt)
    assert ledger.phase(PLACE) == "merged"


def test_what_is_bound_waits_for_its_server_and_is_not_asked_of_another(ledger):
    attempt = ledger.send(PLACE, "a")
    ledger.replied(PLACE, "a", attempt)
    ledger.silent(PLACE, attempt)
    assert PLACE not in ledger.open()
    with pytest.raises(AssertionError, match="is bound at a"):
        ledger.send(PLACE, "b")


@pytest.mark.parametrize("merged", [False, True])
def test_a_lost_server_opens_what_it_had_and_nothing_else(ledger, merged):
    for place, peer in (((4, 0), "a"), (PLACE, "a")):
        attempt = ledger.send(place, peer)
        ledger.replied(place, peer, attempt)
        if merged:
            ledger.merged(place, attempt)
    ledger.lost(1, "a")
    assert ledger.open() == [PLACE]
    ledger.lost(0, "b")
    assert ledger.open() == [PLACE]


def test_a_lost_server_s_answer_on_its_way_counts_for_nothing(ledger):
    attempt = ledger.send(PLACE, "a")
    ledger.silent(PLACE, attempt)
    ledger.lost(1, "a")
    assert not ledger.replied(PLACE, "a", attempt)


def test_what_its_server_has_dropped_is_asked_again_and_an_old_refusal_is_not_heard(ledger):
    first = ledger.send(PLACE, "a")
    ledger.replied(PLACE, "a", first)
    ledger.refused(PLACE, first)
    second = ledger.send(PLACE, "a")
    ledger.replied(PLACE, "a", second)
    ledger.refused(PLACE, first)
    assert ledger.phase(PLACE) == "bound"


def test_what_is_committed_stays_so(ledger):
    attempt = ledger.send(PLACE, "a")
    ledger.replied(PLACE, "a", attempt)
    ledger.committed(1, [4, 99])
    ledger.lost(1, "a")
    ledger.refused(PLACE, attempt)
    assert ledger.phase(PLACE) == "committed"


def test_a_microbatch_begins_once(ledger):
    with pytest.raises(AssertionError, match="microbatch 4 is under way"):
        ledger.begin(4)


def test_what_no_round_of_a_stage_names_is_counted_where_it_is_most(ledger):
    before = ledger.uncommitted
    ledger.begin(5)
    ledger.begin(6, (0,))
    assert ledger.uncommitted == before + 2
    ledger.committed(0, [5, 5, 6, 99])
    assert ledger.uncommitted == before + 1, "5 at stage 1"
    ledger.committed(1, [5])
    assert ledger.uncommitted == before
    ledger.finish()
    assert ledger.uncommitted == before
