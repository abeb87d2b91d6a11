"""The log of statements is the same everywhere, in whatever order they come."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.identity import SIGNATURE_BYTES, Identity
from farflock.swarm.messages import MAX_MEMBERS, MAX_STATEMENT_BYTES
from farflock.swarm.statements import (
    MAX_RIVALS,
    MAX_STATEMENTS,
    NO_ORDERS,
    NONE,
    BadStatement,
    Statement,
    StatementLog,
    seal,
    unseal,
)

RUN = "run"
FOUNDER, OTHER, BAD, GOOD = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 5))


def log_of(*blobs):
    log = StatementLog(RUN, (FOUNDER.peer,))
    for blob in blobs:
        log.add(blob)
    return log


def anchor(number, byte=9):
    return ("anchor", "", 0, (number, bytes([byte]) * 32))


def said(*orders, log=None):
    """Sealed statements, each after the one before."""
    log, blobs = log or log_of(), []
    for kind, *rest in orders:
        blobs.append(seal(FOUNDER, log.next(FOUNDER.peer, kind, *rest)))
        log.add(blobs[-1])
    return blobs


def test_statements_sum_up_in_their_order():
    blobs = said(("ban", BAD.peer), ("close",), ("promote", GOOD.peer, 2), ("open",), ("close",))
    orders = log_of(*blobs).orders
    assert orders.banned == {BAD.peer}
    assert orders.closed
    assert orders.promoted == ((GOOD.peer, 2),)
    assert orders.newest == (5, unseal(blobs[-1], RUN).hash)
    assert not log_of(*blobs[:4]).orders.closed
    assert log_of().orders == NO_ORDERS


def test_the_newest_anchor_holds_whatever_view_it_names_and_whatever_is_stated_after():
    blobs = said(anchor(7), anchor(3, 1), ("close",))
    log = log_of(*blobs[:1])
    assert log.orders.anchor == (7, bytes([9]) * 32)
    for blob in blobs[1:]:
        log.add(blob)
    assert log.orders.anchor == (3, bytes([1]) * 32)
    assert not log.add(blobs[0]), "the older one again"
    assert log.orders.anchor == (3, bytes([1]) * 32)
    assert log.said[:2] == ("1: anchor view 7 (09090909)", "2: anchor view 3 (01010101)")
    assert log_of().orders.anchor is None


def test_what_is_known_is_not_verified_again(monkeypatch):
    """Many peers tell a newcomer the same."""
    blobs = said(("close",), anchor(7))
    log = log_of(*blobs)
    monkeypatch.delattr("farflock.swarm.statements.verify")
    assert [log.add(blob) for blob in blobs] == [False, False]


def test_a_statement_whose_predecessor_is_missing_waits_for_it():
    first, second = said(("close",), ("ban", BAD.peer))
    log = log_of()
    assert not log.add(second)
    assert (log.add(first), log.add(first), log.add(second)) == (True, False, True)
    assert list(log.since(1)) == [first, second]
    assert list(log.since(2)) == [second]


@pytest.mark.parametrize(
    ("one", "two", "banned", "closed"),
    [
        (("ban", BAD.peer), ("open",), {BAD.peer}, False),
        (("open",), ("close",), set(), True),
        (("ban", BAD.peer), ("close",), {BAD.peer}, False),
        (("promote", GOOD.peer, 3), ("promote", GOOD.peer, 1), set(), False),
        (anchor(7), ("close",), set(), True),
        (anchor(7), ("ban", BAD.peer), {BAD.peer}, False),
        (anchor(7), anchor(7, 1), set(), False),
    ],
)
def test_of_two_with_one_number_the_stricter_holds_in_either_order_and_both_are_shown(
    one, two, banned, closed
):
    blobs = [*said(one), *said(two)]
    logs = [log_of(*order) for order in itertools.permutations(blobs)]
    assert logs[0].orders == logs[1].orders
    assert (logs[0].orders.banned, logs[0].orders.closed) == (banned, closed)
    assert logs[0].orders.promoted in ((), ((GOOD.peer, 1),))
    assert len(logs[0].said) == 2
    assert sum("replaced" in words for words in logs[0].said) == 1
    for blob in blobs:
        assert logs[0].knows((1, unseal(blob, RUN).hash))
    assert not logs[0].knows((1, bytes([7]) * 32))
    assert not logs[0].knows((2, NONE))


def test_a_statement_may_follow_the_one_that_a_stricter_one_replaced():
    ban, opens = said(("ban", BAD.peer)), said(("open",))
    after = said(("ban", OTHER.peer), log=log_of(*opens))
    assert log_of(*ban, *opens, *after).orders.banned == {BAD.peer, OTHER.peer}


def test_too_many_of_one_number_are_not_kept():
    log = log_of()
    kept = [
        log.add(seal(FOUNDER, log_of().next(FOUNDER.peer, "promote", GOOD.peer, votes)))
        for votes in range(MAX_RIVALS + 2)
    ]
    assert kept == [True] * MAX_RIVALS + [False] * 2


def test_only_those_that_may_make_statements_do():
    foreign = Statement(RUN, OTHER.peer, 1, NONE, "ban", BAD.peer)
    blob = seal(OTHER, foreign)
    with pytest.raises(BadStatement, match="may make no statements"):
        log_of().add(blob)
    assert StatementLog(RUN, (FOUNDER.peer, OTHER.peer)).add(blob)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"kind": "promote"},
        {"key": OTHER.peer},
        {"author": OTHER.peer},
        {"run": "x"},
        {"previous": bytes([1]) * 32},
        {"votes": 4},
        {"view": (1, NONE)},
    ],
)
def test_every_field_is_signed(change):
    blob = said(("ban", BAD.peer))[0]
    altered = msgspec.structs.replace(unseal(blob, RUN), **change)
    with pytest.raises(BadStatement):
        unseal(blob[:SIGNATURE_BYTES] + msgspec.msgpack.encode(altered), RUN)


@pytest.mark.parametrize(
    "fields",
    [("ban", ""), ("ban", "nobody"), ("close", BAD.peer), ("open", BAD.peer), ("promote", "")],
)
def test_a_kind_has_the_key_that_it_needs_and_no_other(fields):
    with pytest.raises(BadStatement, match="a statement on no key"):
        seal(FOUNDER, Statement(RUN, FOUNDER.peer, 1, NONE, *fields))


@pytest.mark.parametrize(
    ("kind", "key", "view"),
    [("anchor", "", None), ("close", "", (1, NONE)), ("ban", BAD.peer, (1, NONE))],
)
def test_an_anchor_and_nothing_else_names_a_view(kind, key, view):
    with pytest.raises(BadStatement, match="an anchor of no view, or a view that is not anchored"):
        seal(FOUNDER, Statement(RUN, FOUNDER.peer, 1, NONE, kind, key, view=view))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=MAX_STATEMENT_BYTES + 2))
def test_any_bytes_are_refused_with_a_reason(blob):
    with pytest.raises(BadStatement) as error:
        unseal(blob, RUN)
    assert str(error.value).isprintable()


def test_the_longest_statement_fits_its_bound():
    longest = Statement(
        "r" * 64, FOUNDER.peer, MAX_STATEMENTS, NONE, "promote", BAD.peer, MAX_MEMBERS
    )
    anchored = Statement(
        "r" * 64, FOUNDER.peer, MAX_STATEMENTS, NONE, "anchor", "", 0, (2**62, NONE)
    )
    for statement in (longest, anchored):
        assert len(seal(FOUNDER, statement)) <= MAX_STATEMENT_BYTES
