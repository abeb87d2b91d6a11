"""A record is its owner's statement, whole and within limits, or it is refused."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.identity import SIGNATURE_BYTES, Identity
from farflock.swarm.messages import MAX_RECORD_BYTES
from farflock.swarm.record import MAX_DOORS, BadRecord, Record, newer, owner, seal, unseal

A, B = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))
RUN = "run"
PLAIN = Record(RUN, A.peer, 1, 1, bytes(32))

names = st.text(max_size=20)
numbers = st.integers(0, 2**63 - 1)
records = st.builds(
    Record,
    run=names,
    peer=st.just(A.peer),
    incarnation=numbers,
    sequence=numbers,
    curve=st.binary(min_size=32, max_size=32),
    endpoints=st.lists(names, max_size=8).map(tuple),
    relays=st.lists(names, max_size=4).map(tuple),
    doors=st.lists(names, max_size=MAX_DOORS).map(tuple),
    role=names,
    speed=st.floats(0, 1e12),
    lifetime_s=st.floats(0, MAX_RECORD_AGE_S, exclude_min=True),
)


def changed(**fields):
    return msgspec.structs.replace(PLAIN, **fields)


def signed(body, signer=A, domain=b"record"):
    """A record that a hostile owner can publish: any bytes, truly signed."""
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return signer.sign(domain, raw) + raw


@given(records)
def test_what_was_sealed_is_unsealed(record):
    blob = seal(A, record)
    assert unseal(blob, record.run) == record
    assert owner(blob, record.run) == A.peer
    assert len(blob) <= MAX_RECORD_BYTES


@settings(max_examples=200)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(signed))
def test_any_bytes_signed_or_not_are_a_record_or_a_bad_record(blob):
    with pytest.raises(BadRecord):
        unseal(blob, RUN)


@given(st.integers(0), st.integers(1, 255))
def test_no_byte_can_be_altered(place, by):
    blob = bytearray(seal(A, PLAIN))
    blob[place % len(blob)] ^= by
    with pytest.raises(BadRecord):
        unseal(bytes(blob), RUN)


@given(st.integers(0))
def test_a_truncated_record_is_refused(size):
    blob = seal(A, PLAIN)
    with pytest.raises(BadRecord):
        unseal(blob[: size % len(blob)], RUN)


def test_a_record_of_another_run_is_refused():
    with pytest.raises(BadRecord, match="of run run, not of other"):
        unseal(seal(A, PLAIN), "other")


def test_a_record_is_signed_by_the_peer_in_it_and_for_this_purpose():
    with pytest.raises(BadRecord, match=f"not signed by {A.peer}"):
        unseal(signed(PLAIN, signer=B), RUN)
    with pytest.raises(BadRecord, match="not signed by"):
        unseal(signed(PLAIN, domain=b"view"), RUN)
    with pytest.raises(BadRecord, match=f"{B.peer} cannot sign a record of {A.peer}"):
        seal(B, PLAIN)


def test_one_key_cannot_speak_under_two_names():
    with pytest.raises(BadRecord, match="not signed by"):
        unseal(signed(changed(peer=A.peer + " ")), RUN)


@pytest.mark.parametrize(
    "fields",
    [
        {"run": "r" * 65},
        {"incarnation": -1},
        {"incarnation": 2**63},
        {"sequence": -1},
        {"curve": bytes(31)},
        {"curve": bytes(33)},
        {"endpoints": ("/ip4/192.0.2.7/tcp/4001",) * 9},
        {"endpoints": ("e" * 129,)},
        {"relays": ("peer",) * 5},
        {"doors": ("/ip4/192.0.2.7/tcp/4001",) * (MAX_DOORS + 1)},
        {"role": "r" * 129},
        {"speed": -1.0},
        {"speed": math.nan},
        {"speed": math.inf},
        {"lifetime_s": 0.0},
        {"lifetime_s": math.nan},
        {"lifetime_s": MAX_RECORD_AGE_S + 1},
    ],
    ids=str,
)
def test_a_field_beyond_its_limit_is_refused_when_read_and_when_sealed(fields):
    record = changed(**fields)
    with pytest.raises(BadRecord, match="not a record"):
        unseal(signed(record), RUN)
    with pytest.raises(BadRecord):
        seal(A, record)


def test_fields_that_are_unknown_or_missing_are_refused():
    fields = msgspec.structs.asdict(PLAIN)
    assert unseal(signed(fields), RUN) == PLAIN
    with pytest.raises(BadRecord, match="not a record"):
        unseal(signed({**fields, "more": 1}), RUN)
    del fields["curve"]
    with pytest.raises(BadRecord, match="not a record"):
        unseal(signed(fields), RUN)


@pytest.mark.parametrize("size", [0, SIGNATURE_BYTES, MAX_RECORD_BYTES + 1])
def test_the_size_is_checked_before_anything_else(size):
    with pytest.raises(
        BadRecord, match=f"{SIGNATURE_BYTES + 1} to {MAX_RECORD_BYTES} bytes, got {size}"
    ):
        unseal(bytes(size), RUN)


def test_the_largest_record_that_fits_is_taken_and_a_larger_one_cannot_be_sealed():
    largest = changed(endpoints=("e" * 128,) * 8, relays=("r" * 128,) * 4, role="r" * 128)
    assert unseal(seal(A, largest), RUN) == largest
    wide = changed(endpoints=("\U00010000" * 128,) * 8)  # characters of four bytes each
    with pytest.raises(BadRecord, match="4096 bytes, got"):
        seal(A, wide)


@pytest.mark.parametrize(
    ("known", "is_newer"),
    [
        (None, True),
        (changed(sequence=0), True),
        (PLAIN, False),
        (changed(sequence=2), False),
        (changed(sequence=0, incarnation=9), True),
        (changed(sequence=0, peer=B.peer), False),
    ],
)
def test_only_a_higher_sequence_number_of_the_same_owner_is_newer(known, is_newer):
    assert newer(PLAIN, known) is is_newer
