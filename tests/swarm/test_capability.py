"""A capability lets in what holds its secret, and nobody that only saw a request made with it."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.capability import (
    EXPIRY_GRACE_S,
    MAX_USES,
    BadCapability,
    Capability,
    Issuers,
    Ticket,
    encode,
    seal,
    shown,
    unseal,
)
from farflock.swarm.identity import SIGNATURE_BYTES, Identity
from farflock.swarm.messages import MAX_CAPABILITY_BYTES, MAX_MEMBERS, Join, Knock

RUN = "run"
FOUNDER, JOINER, THIEF = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2, 3))
SECRET = bytes(range(32))
TICKET = Ticket.issue(FOUNDER, RUN, SECRET, 1000, uses=3, votes=1)


def request(ticket=TICKET, joiner=JOINER, run=RUN):
    return ticket.request(run, joiner.peer, b"record")


def test_a_request_shows_what_the_issuer_signed():
    capability = shown(RUN, JOINER.peer, request())
    key = Identity.from_seed(SECRET).public
    assert capability == Capability(RUN, FOUNDER.peer, 1000, 3, 1, "trusted", key)
    assert request().record == b"record"


def test_a_request_without_a_capability_shows_none():
    assert shown(RUN, JOINER.peer, Join(b"record")) is None


def test_the_secret_is_in_no_request():
    assert SECRET not in msgspec.msgpack.encode(request())


def test_a_request_that_was_seen_lets_no_other_key_in():
    with pytest.raises(BadCapability, match="not made with"):
        shown(RUN, THIEF.peer, request())


def test_a_knock_shows_what_a_request_to_join_does():
    knocked = TICKET.knock(RUN, JOINER.peer)
    assert shown(RUN, JOINER.peer, knocked) == shown(RUN, JOINER.peer, request())


def test_a_knock_that_was_seen_serves_no_other_key_and_lets_nobody_in():
    knocked, asked = TICKET.knock(RUN, JOINER.peer), request()
    turned = Join(b"record", knocked.capability, knocked.proof)
    other_way = Knock(asked.capability, asked.proof)
    for joiner, each in ((THIEF, knocked), (JOINER, turned), (JOINER, other_way)):
        with pytest.raises(BadCapability, match="not made with"):
            shown(RUN, joiner.peer, each)


def test_a_proof_of_another_secret_is_refused():
    other = Ticket(TICKET.capability, bytes(32))
    with pytest.raises(BadCapability, match="not made with"):
        shown(RUN, JOINER.peer, request(other))


def test_a_capability_of_another_run_is_refused():
    elsewhere = Ticket.issue(FOUNDER, "other", SECRET, 1000, uses=3, votes=1)
    with pytest.raises(BadCapability, match="another run"):
        shown(RUN, JOINER.peer, request(elsewhere))


@pytest.mark.parametrize(
    "change", [{"uses": 4}, {"votes": 2}, {"expires": 9999}, {"issuer": JOINER.peer}, {"run": "x"}]
)
def test_every_field_is_under_the_issuers_signature(change):
    capability = msgspec.structs.replace(unseal(TICKET.capability, RUN), **change)
    forged = TICKET.capability[:SIGNATURE_BYTES] + encode(capability)
    with pytest.raises(BadCapability):
        unseal(forged, RUN)


def test_an_issuer_that_is_no_key_is_refused():
    capability = msgspec.structs.replace(unseal(TICKET.capability, RUN), issuer="12D3 nobody")
    with pytest.raises(BadCapability, match="not a peer id"):
        seal(FOUNDER, capability)


def test_a_second_encoding_of_one_capability_is_refused():
    body = TICKET.capability[SIGNATURE_BYTES:]
    longer = body.replace(b"\x03\x01", b"\xcc\x03\x01")  # the number 3, in two bytes
    assert longer != body
    forged = FOUNDER.sign(b"capability", longer) + longer
    with pytest.raises(BadCapability, match="canonical"):
        unseal(forged, RUN)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=MAX_CAPABILITY_BYTES + 2))
def test_any_bytes_are_refused_with_a_reason(blob):
    with pytest.raises(BadCapability) as error:
        unseal(blob, RUN)
    assert str(error.value).isprintable()


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(TICKET.capability) - 1), st.integers(1, 255))
def test_every_changed_byte_is_found(place, change):
    changed = bytearray(TICKET.capability)
    changed[place] ^= change
    with pytest.raises(BadCapability):
        unseal(bytes(changed), RUN)


def test_the_largest_capability_fits_its_bound():
    large = Ticket.issue(FOUNDER, "r" * 64, SECRET, 2**40, MAX_USES, MAX_MEMBERS)
    assert len(large.capability) <= MAX_CAPABILITY_BYTES


def test_two_capabilities_of_different_secrets_are_counted_apart():
    other = Ticket.issue(FOUNDER, RUN, bytes(32), 1000, uses=3, votes=1)
    assert unseal(other.capability, RUN).id != unseal(TICKET.capability, RUN).id
    again = Ticket.issue(FOUNDER, RUN, SECRET, 1000, uses=3, votes=1)
    assert unseal(again.capability, RUN).id == unseal(TICKET.capability, RUN).id


def test_it_expires_after_ten_minutes_of_grace():
    capability = unseal(TICKET.capability, RUN)
    assert not capability.is_over(1000 + EXPIRY_GRACE_S)
    assert capability.is_over(1000 + EXPIRY_GRACE_S + 1)
    assert EXPIRY_GRACE_S == 600


def test_the_room_of_a_capability_shrinks_with_each_use_and_that_of_one_without_number_does_not():
    capability = unseal(TICKET.capability, RUN)
    assert [capability.room(used) for used in (0, 2, 3, 9)] == [3, 1, 0, 0]
    assert msgspec.structs.replace(capability, uses=0).room(10**6) > MAX_MEMBERS


def test_the_founder_authorities_and_if_allowed_members_may_issue():
    admitted = {JOINER.peer}.__contains__
    issuers = Issuers(FOUNDER.peer, (THIEF.peer,))
    assert [issuers.allows(key.peer, admitted) for key in (FOUNDER, THIEF, JOINER)] == [True] * 3
    closed = Issuers(FOUNDER.peer, (), members=False)
    assert [closed.allows(key.peer, admitted) for key in (FOUNDER, THIEF, JOINER)] == [
        True,
        False,
        False,
    ]
