import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.dht import validator as dht_validator
from farflock.swarm.dht.item_store import MAX_ITEMS_PER_KEY, StoredItem
from farflock.swarm.dht.validator import (
    CLOCK_SLACK_S,
    MAX_CELLS,
    MAX_HEAD_BYTES,
    MAX_VALUE_BYTES,
    BadItem,
    Rules,
    cell_name,
    cell_of,
    head_name,
    key_hash,
    pack_items,
    pack_subkey,
    unpack_items,
    unwrap,
    wrap,
)
from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.identity import Identity
from farflock.swarm.record import Record, seal

RUN, NOW_S = "run-1", 1_000_000.0
ALICE, EVE = Identity.from_seed(b"a" * 32), Identity.from_seed(b"e" * 32)
CELL, HEAD = cell_name(RUN, 0), head_name(RUN)


def record(identity=ALICE, run=RUN, **fields):
    return seal(
        identity,
        Record(run=run, peer=identity.peer, incarnation=1, sequence=1, curve=bytes(32), **fields),
    )


def judged(name, item, now_s=NOW_S, rules=None):
    return (rules or Rules(RUN)).allows(key_hash(name), item, now_s)


FAIR = wrap(ALICE, CELL, record(), NOW_S + 60)


def test_a_fair_record_is_allowed_and_comes_out_as_it_went_in():
    assert judged(CELL, FAIR)
    assert unwrap(FAIR) == record()


def test_a_fair_head_is_allowed():
    assert judged(HEAD, wrap(ALICE, HEAD, b"head", NOW_S + 300))


@pytest.mark.parametrize(
    "item",
    [
        FAIR._replace(subkey=EVE.public),
        wrap(EVE, CELL, record(EVE), NOW_S + 60)._replace(subkey=ALICE.public),
        FAIR._replace(expires_s=NOW_S + 160),
        FAIR._replace(expires_s=NOW_S + 59),
        wrap(EVE, CELL, record(ALICE), NOW_S + 60),
        wrap(ALICE, CELL, record(run="run-2"), NOW_S + 60),
        wrap(ALICE, CELL, b"no record", NOW_S + 60),
        wrap(ALICE, CELL, b"", NOW_S + 60),
        FAIR._replace(subkey=ALICE.public[:31]),
        FAIR._replace(subkey=b""),
        FAIR._replace(value=FAIR.value + b"\x00"),
        FAIR._replace(value=b"\xc6" + struct.pack(">I", len(unwrap(FAIR)) + 64) + FAIR.value[3:]),
        FAIR._replace(value=msgspec.msgpack.encode("text")),
        FAIR._replace(value=b""),
    ],
    ids=[
        "stolen under another subkey",
        "forged under the victim's subkey",
        "replayed with a later expiry",
        "replayed with an earlier expiry",
        "another's record under my own subkey",
        "record of another run",
        "payload is no record",
        "empty payload",
        "short subkey",
        "empty subkey",
        "trailing byte",
        "longer form of the same msgpack",
        "text",
        "nothing",
    ],
)
def test_hostile_items_are_refused(item):
    assert not judged(CELL, item)


@pytest.mark.parametrize("expires_s", [NOW_S, NOW_S - 1, NOW_S + MAX_RECORD_AGE_S + 1, NOW_S + 1e9])
def test_expiries_that_are_past_or_too_far_are_refused(expires_s):
    assert not judged(CELL, wrap(ALICE, CELL, record(), expires_s))


@pytest.mark.parametrize("expires_s", [float("nan"), float("inf"), float("-inf")])
def test_expiries_that_are_no_time_are_refused(expires_s):
    assert not judged(CELL, wrap(ALICE, CELL, record(), expires_s))


def test_the_greatest_lifetime_is_allowed_by_readers_whose_clock_is_behind():
    item = wrap(ALICE, CELL, record(), NOW_S + MAX_RECORD_AGE_S - CLOCK_SLACK_S)
    assert judged(CELL, item, now_s=NOW_S - 3)


def test_an_item_is_bound_to_its_key():
    other = cell_name(RUN, 32 if ALICE.public[0] % 64 != 32 else 1)
    assert not judged(HEAD, FAIR)
    assert not judged(other, FAIR)
    assert not judged("anything else", wrap(ALICE, "anything else", record(), NOW_S + 60))
    assert not judged(CELL, FAIR, rules=Rules("run-2"))


def test_a_head_is_bound_in_size_and_to_its_publisher():
    assert judged(HEAD, wrap(ALICE, HEAD, b"h" * MAX_HEAD_BYTES, NOW_S + 60))
    assert not judged(HEAD, wrap(ALICE, HEAD, b"h" * (MAX_HEAD_BYTES + 1), NOW_S + 60))
    assert not judged(HEAD, wrap(ALICE, HEAD, b"", NOW_S + 60))
    assert not judged(HEAD, wrap(EVE, HEAD, b"head", NOW_S + 60)._replace(subkey=ALICE.public))


def test_size_is_checked_before_any_signature(monkeypatch):
    monkeypatch.setattr(dht_validator, "verify", lambda *_: pytest.fail("a signature was verified"))
    with pytest.raises(BadItem, match=f"at most {MAX_VALUE_BYTES} bytes"):
        Rules(RUN).check(key_hash(CELL), FAIR._replace(value=b"x" * (MAX_VALUE_BYTES + 1)), NOW_S)


def test_a_verified_item_is_not_verified_again_but_its_time_is(monkeypatch):
    rules = Rules(RUN)
    assert judged(CELL, FAIR, rules=rules)
    monkeypatch.setattr(dht_validator, "verify", lambda *_: pytest.fail("verified again"))
    assert judged(CELL, FAIR, rules=rules)
    assert not judged(CELL, FAIR, now_s=NOW_S + 61, rules=rules)


def test_the_memory_of_verified_items_is_bounded(monkeypatch):
    monkeypatch.setattr(dht_validator, "MAX_REMEMBERED", 2)
    rules = Rules(RUN)
    for more_s in (1, 2, 3, 4):
        assert judged(CELL, wrap(ALICE, CELL, record(), NOW_S + more_s), rules=rules)
    assert rules.remembered == 2


@given(
    st.binary(min_size=20, max_size=20),
    st.binary(max_size=40),
    st.binary(max_size=200),
    st.floats(),
)
def test_garbage_is_refused_without_an_error(key, subkey, value, expires_s):
    rules = Rules(RUN)
    assert not rules.allows(key, StoredItem(subkey, value, expires_s), NOW_S)
    assert not rules.allows(key_hash(CELL), StoredItem(subkey, value, expires_s), NOW_S)


@given(st.integers(0, len(FAIR.value) - 1), st.integers(1, 255))
def test_any_changed_byte_is_refused(at, change):
    value = bytearray(FAIR.value)
    value[at] ^= change
    assert not judged(CELL, FAIR._replace(value=bytes(value)))


@given(st.binary(min_size=32, max_size=32), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_doubling_the_cells_splits_each_into_two_that_its_readers_read(public, cells):
    assert cell_of(public, 2 * cells) in (cell_of(public, cells), cell_of(public, cells) + cells)


def test_storing_peers_accept_the_owners_cell_under_every_number_of_cells_and_no_other():
    own = {cell_of(ALICE.public, 2**bits) for bits in range(7)}
    for cell in range(MAX_CELLS):
        name = cell_name(RUN, cell)
        assert judged(name, wrap(ALICE, name, record(), NOW_S + 60)) == (cell in own)


@pytest.mark.parametrize("cells", [0, 3, 128, -1])
def test_a_number_of_cells_that_cannot_be_doubled_into_is_refused(cells):
    with pytest.raises(ValueError, match="power of two up to 64"):
        cell_of(ALICE.public, cells)


def test_the_largest_record_fits():
    body = record()
    largest = StoredItem(ALICE.public, msgspec.msgpack.encode(bytes(64 + 4096)), NOW_S + 1)
    assert len(largest.value) == MAX_VALUE_BYTES
    assert len(FAIR.value) == len(body) + 64 + (2 if len(body) + 64 < 256 else 3)


items = st.builds(
    StoredItem,
    st.binary(min_size=32, max_size=32),
    st.binary(max_size=100),
    st.floats(allow_nan=False, allow_infinity=False),
)


@given(st.lists(items, max_size=MAX_ITEMS_PER_KEY))
def test_a_dictionary_survives_the_wire(entries):
    assert unpack_items(pack_items(entries)) == entries


@given(st.binary(max_size=300))
def test_bytes_that_are_no_dictionary_are_refused_with_a_reason(raw):
    with pytest.raises(BadItem):
        unpack_items(raw)


@given(st.lists(items, min_size=1, max_size=3), st.data())
def test_any_truncation_of_a_dictionary_is_refused(entries, data):
    raw = pack_items(entries)
    with pytest.raises(BadItem):
        unpack_items(raw[: data.draw(st.integers(0, len(raw) - 1))])


def dictionary(entries):
    body = msgspec.msgpack.encode((float("inf"), float("inf"), entries))
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(0x50, body))


def test_entries_of_other_programs_are_left_out_one_by_one():
    good = (ALICE.public, b"value", 1.0)
    strange = [
        ("text", b"", 1.0),
        (ALICE.public, "text", 1.0),
        (ALICE.public, b""),
        7,
        None,
        (b"short", b"", 1.0),
    ]
    assert unpack_items(dictionary([*strange, good, *strange])) == [StoredItem(*good)]


def test_a_dictionary_with_too_many_entries_is_refused_before_they_are_read():
    entry = (ALICE.public, b"value", 1.0)
    assert len(unpack_items(dictionary([entry] * MAX_ITEMS_PER_KEY))) == MAX_ITEMS_PER_KEY
    with pytest.raises(BadItem, match="length <= 128"):
        unpack_items(dictionary([entry] * (MAX_ITEMS_PER_KEY + 1)))
    claimed = b"\x93\xcb" + bytes(8) + b"\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"
    with pytest.raises(BadItem):
        unpack_items(msgspec.msgpack.encode(msgspec.msgpack.Ext(0x50, claimed)))


def test_subkeys_and_keys_have_hivemind_s_form_to_the_byte():
    assert pack_subkey(ALICE.public) == msgspec.msgpack.encode(ALICE.public)
    assert key_hash("r/head").hex() == "3fb819218c1dc4ce78ed1fef3131f1a94e8f6825"
