"""Lists of microbatches: the same bytes for the same keys, their union, and what is no list."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.codec import CorruptPayload
from farflock.node.train.microbatch_ids import (
    LATE,
    MAX_BYTES,
    joined,
    joined_ages,
    read,
    read_ages,
    union,
    written,
)
from farflock.swarm.protocol.gradient_leases import MAX_KEYS

KEYS = st.sets(st.tuples(st.text(max_size=8), st.integers(0, 2**62)), max_size=30)
ODD = {
    "empty": b"",
    "nonsense": b"\xc1",
    "another type": msgspec.msgpack.encode([1, 2]),
    "a number below 0": msgspec.msgpack.encode({"t": [-1]}),
    "a number that is none": msgspec.msgpack.encode({"t": [1.5]}),
    "twice the same": msgspec.msgpack.encode({"t": [3, 0]}),
    "nobody's": msgspec.msgpack.encode({"t": []}),
    "trainers out of order": msgspec.msgpack.encode({"b": [1], "a": [1]}),
    "longer than needed": b"\x81\xd9\x01t\x91\x03",
    "a trainer twice": b"\x82\xa1t\x91\x03\xa1t\x91\x04",
    "more behind it": written([("t", 3)]) + b"\x00",
    "a long name": msgspec.msgpack.encode({"t" * 129: [1]}),
    "deep": b"\x91" * 5000,
    "too long": bytes(MAX_BYTES + 1),
    "fewer ages than numbers": msgspec.msgpack.encode([{"t": [3, 1]}, [1]]),
    "ages that are all 0": msgspec.msgpack.encode([{"t": [3]}, [0]]),
    "an age that is none": msgspec.msgpack.encode([{"t": [3]}, [-2]]),
    "ages of nothing": msgspec.msgpack.encode([{}, []]),
    "twice the same, aged": msgspec.msgpack.encode([{"t": [3, 0]}, [1, 1]]),
    "more than ages": msgspec.msgpack.encode([{"t": [3]}, [1], 1]),
    "too many": msgspec.msgpack.encode({"a": [1] * MAX_KEYS, "b": [1]}),
}


@given(KEYS, st.randoms())
def test_keys_are_read_in_order_as_they_were_written_in_any_order(keys, chance):
    listed = sorted(keys)
    shuffled = listed.copy()
    chance.shuffle(shuffled)
    assert written(shuffled) == written(listed)
    assert read(written(listed)) == listed


def test_neighbouring_numbers_take_a_byte_each():
    keys = [("t", number) for number in range(10**6, 10**6 + 1000)]
    assert len(written(keys)) < 1000 + 20


@pytest.mark.parametrize("payload", ODD.values(), ids=ODD.keys())
def test_what_no_encoder_writes_is_refused(payload):
    with pytest.raises(CorruptPayload):
        read(payload)
    assert joined([payload, written([("t", 1)])]) == [("t", 1)]
    assert union([("bad", 1.0, payload), ("good", 1.0, written([("t", 1)]))]).rejected == ("bad",)


@settings(max_examples=300)
@given(st.binary(max_size=60))
def test_any_bytes_are_what_an_encoder_writes_or_are_refused(payload):
    try:
        keys = read(payload)
    except CorruptPayload:
        return
    assert written(keys) == payload


@given(st.lists(KEYS, min_size=1, max_size=4))
def test_a_reduction_is_the_union_whatever_the_order(lists):
    inputs = [(f"p{number}", 1.0, written(keys)) for number, keys in enumerate(lists)]
    whole = sorted(set().union(*lists))
    assert union(inputs) == union(inputs[::-1])
    assert read(union(inputs).data) == whole
    assert joined(written(keys) for keys in lists) == whole


def test_unreadable_lists_have_no_union():
    reduction = union([("a", 1.0, b"\xc1"), ("b", 1.0, b"")])
    assert reduction.data is None
    assert reduction.rejected == ("a", "b")


def test_a_union_that_would_be_no_list_is_none():
    half = MAX_KEYS // 2 + 1
    lists = [written([(name, number) for number in range(half)]) for name in "ab"]
    assert union([(str(number), 1.0, listed) for number, listed in enumerate(lists)]).data is None


def test_more_than_fits_is_our_own_fault():
    with pytest.raises(AssertionError, match="microbatches in one contribution"):
        written([("t", number) for number in range(MAX_KEYS + 1)])


AGED = st.dictionaries(
    st.tuples(st.text(max_size=8), st.integers(0, 2**62)), st.integers(LATE, 64), max_size=30
)


@given(AGED, AGED)
def test_ages_are_read_as_they_were_written_and_joined_as_keys_are(mine, yours):
    yours = {key: age for key, age in yours.items() if key not in mine}
    assert read_ages(written(mine)) == mine
    assert read(written(mine)) == sorted(mine)
    both = union([("a", 1.0, written(mine)), ("b", 1.0, written(yours))])
    assert both.data == written(mine | yours)
    assert joined_ages([written(mine), b"\xc1", written(yours)]) == mine | yours


@given(KEYS)
def test_where_nothing_is_late_the_bytes_are_those_of_a_run_that_waits(keys):
    assert written(dict.fromkeys(keys, 0)) == written(keys)
