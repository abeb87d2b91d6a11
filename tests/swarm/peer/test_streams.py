"""The outcome of a decided round for a peer, from its close list and the chunks alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.collective import one_shard_each

from farflock.swarm.bundle_store import BundleStore
from farflock.swarm.chunk_store import Store
from farflock.swarm.compute import inline
from farflock.swarm.messages import Decided, Key
from farflock.swarm.peer.round_log import LoggedRound, outcome, work_pin
from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.bundles import (
    MAX_BUNDLE_SHARDS,
    MAX_GATHER_BUNDLES,
    MAX_MEAN_BUNDLES,
)
from farflock.swarm.protocol.exchange.close_list import CloseList, RoundTerms
from farflock.swarm.protocol.exchange.streams import Cadence, Reduction, Stream


def outcome_of(stream, number, entry, store):
    return outcome(stream, number, entry, BundleStore(store, None, inline))


GROUP = ("p3", "p1", "p2")  # in seeded order, as views give it


def stream(kind="mean", shards=2, first=0, stride=1, **options):
    terms, cadence = RoundTerms(kind, shards, **options), Cadence(first, stride)
    if shards <= 2:
        one_shard_each(terms)
    return Stream("weights", terms, 1000, lambda *_: Reduction(b""), lambda *_: True, cadence)


@given(st.integers(0, 50), st.integers(1, 12), st.integers(-200, 200))
def test_a_streams_rounds_are_its_first_and_every_strideth_after_it(first, stride, number):
    last = stream(first=first, stride=stride).cadence.upto(number)
    assert (last - first) % stride == 0
    assert last == first - stride if number < first else last <= number < last + stride
    following = stream(first=first, stride=stride).cadence.since(number)
    assert following == max(first, number + -(number - first) % stride)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 0},
        {"first": -1},
        {"enough": 2},
        {"kind": "gather", "group": 2, "enough": 1},
    ],
    ids=str,
)
def test_rounds_that_no_stream_can_have_are_refused(options):
    with pytest.raises(ValueError, match="stream weights"):
        stream(**options)


def logged(store, members, contents, *, group=GROUP, taken=(True, True), tokens=70, state=b"s"):
    """A round that was decided on these contents, by item index."""
    items = tuple(
        RoundItem(index, store.put(data, "test"), len(data), bytes(8))
        for index, data in sorted(contents.items())
    )
    close = CloseList(members=tuple(members.items()), items=items, tokens=tokens, state=state)
    return LoggedRound(close, group, len(group), Decided(Key("weights", 4), bytes(32), b""), taken)


def test_a_mean_of_everybody_gives_the_reduced_shards_and_all_in_sorted_order():
    store = Store(10**6)
    entry = logged(store, {0: 1.0, 1: 2.0, 2: 3.0}, {0: b"first", 1: b"second"})
    result = outcome_of(stream(), 4, entry, store)
    assert (result.key, result.status, result.next_round) == (Key("weights", 4), "ok", 5)
    assert result.reduced == (b"first", b"second")
    assert result.gathered is None
    assert dict(zip(result.participants, result.weights, strict=True)) == {
        "p1": 2.0,
        "p2": 3.0,
        "p3": 1.0,
    }
    assert result.participants == ("p1", "p2", "p3")
    assert (result.taken, result.tokens, result.state) == ((True, True), 70, b"s")


def test_the_next_round_is_a_stride_further():
    store = Store(10**6)
    entry = logged(store, {0: 1.0}, {0: b"first", 1: b"second"})
    assert outcome_of(stream(first=1, stride=3), 4, entry, store).next_round == 7


def test_without_a_member_or_without_a_shard_of_mine_it_is_partial():
    store = Store(10**6)
    contents = {0: b"first", 1: b"second"}
    missing = outcome_of(stream(), 4, logged(store, {1: 2.0, 2: 3.0}, contents), store)
    assert (missing.status, missing.participants) == ("partial", ("p1", "p2"))
    left_out = outcome_of(
        stream(), 4, logged(store, {0: 1.0, 1: 2.0, 2: 3.0}, contents, taken=(True, False)), store
    )
    assert (left_out.status, left_out.taken) == ("partial", (True, False))


def test_a_peer_that_is_the_whole_group_is_alone():
    store = Store(10**6)
    entry = logged(store, {0: 1.0}, {0: b"first", 1: b"second"}, group=("p1",))
    assert outcome_of(stream(), 4, entry, store).status == "alone"


def test_a_round_that_was_decided_empty_failed_for_everybody_and_moves_nothing():
    store = Store(10**6)
    result = outcome_of(stream(), 4, logged(store, {}, {}, taken=(False, False)), store)
    assert (result.status, result.reduced, result.gathered, result.participants) == (
        "failed",
        None,
        None,
        (),
    )
    assert (result.next_round, result.tokens) == (5, 70)


def test_a_gather_gives_everybodys_own_shards():
    store = Store(10**6)
    # items are numbered member by member
    contents = {
        0: b"p3 a",
        1: b"p3 b",
        4: b"p2 a",
        5: b"p2 b",
    }
    result = outcome_of(stream("gather"), 4, logged(store, {0: 1.0, 2: 1.0}, contents), store)
    assert result.gathered == {"p3": (b"p3 a", b"p3 b"), "p2": (b"p2 a", b"p2 b")}
    assert result.reduced is None
    assert result.status == "partial"


@pytest.mark.parametrize(
    ("kind", "group", "most"),
    [
        ("mean", 0, MAX_MEAN_BUNDLES * MAX_BUNDLE_SHARDS),
        ("gather", 0, MAX_GATHER_BUNDLES * MAX_BUNDLE_SHARDS),
        ("gather", 2, MAX_GATHER_BUNDLES * MAX_BUNDLE_SHARDS),
    ],
)
def test_a_stream_has_as_many_shards_as_a_close_list_can_name(kind, group, most):
    assert stream(kind, shards=1, group=group).terms.shards == 1
    assert stream(kind, shards=most, group=group).terms.shards == most
    for shards in (0, most + 1):
        with pytest.raises(ValueError, match=f"1 to {most} shards, got {shards}; cut larger ones"):
            stream(kind, shards=shards, group=group)


def test_what_is_pinned_for_work_is_not_what_is_pinned_as_result():
    key = Key("weights", 4)
    assert work_pin(key) == work_pin(Key("weights", 4)) != key
    assert work_pin(Key("weights", 5)) != work_pin(key)
