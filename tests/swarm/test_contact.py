"""A contact is the part of a record by which a stranger finds a peer, in 74 or 86 bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.contact import PACKED_BYTES, PACKED_IP6_BYTES, Contact, contacts_of, unpack
from farflock.swarm.identity import peer_id
from farflock.swarm.record import Record

PEER = peer_id(bytes(range(32)))
CURVE = bytes(range(32, 64))
PLACES = ("/ip4/192.0.2.7/tcp/4001", "/ip4/192.0.2.7/tcp/4002")
DOOR = f"/ip4/192.0.2.7/tcp/4003/p2p/{PEER}"
SIX = ("/ip6/2001:db8::7/tcp/1", "/ip6/2001:db8::7/tcp/2")
SIX_DOOR = f"/ip6/2001:db8::7/tcp/3/p2p/{PEER}"


def record(endpoints=PLACES, doors=()):
    return Record("run", PEER, 1, 1, CURVE, endpoints, doors=doors)


def test_a_contact_has_what_a_record_says():
    (found,) = contacts_of(record(doors=(DOOR,)))
    assert found == Contact(PEER, CURVE, "192.0.2.7", 4001, 4002, 4003)
    assert found.endpoints == PLACES
    assert found.doors == (DOOR,)
    assert unpack(found.pack()) == found
    assert len(found.pack()) == PACKED_BYTES


def test_a_contact_may_have_an_ip6_address():
    (found,) = contacts_of(record(SIX, (SIX_DOOR,)))
    assert found == Contact(PEER, CURVE, "2001:db8::7", 1, 2, 3)
    assert found.endpoints == SIX
    assert found.doors == (SIX_DOOR,)
    assert unpack(found.pack()) == found
    assert len(found.pack()) == PACKED_IP6_BYTES


def test_a_door_that_has_just_opened_goes_before_those_of_the_record():
    assert contacts_of(record(doors=(DOOR,)), [DOOR.replace("4003", "5")])[0].door == 5
    assert contacts_of(record())[0].doors == ()


@pytest.mark.parametrize(
    "door",
    [
        DOOR.replace("192.0.2.7", "192.0.2.8"),
        DOOR.replace(PEER, peer_id(bytes(32))),
        DOOR.replace("/tcp/", "/udp/"),
        "/dns4/example.org/tcp/4003/p2p/" + PEER,
        "\x1b[2J",
    ],
)
def test_a_door_elsewhere_is_left_out(door):
    assert contacts_of(record(doors=(door,)))[0].door == 0


@pytest.mark.parametrize(
    "endpoints",
    [
        (),
        PLACES[:1],
        ("/ip6/2001:::7/tcp/4001", "/ip6/2001:::7/tcp/4002"),
        ("/ip6/::/tcp/4001", "/ip6/::/tcp/4002"),
        (PLACES[0], "/ip4/192.0.2.8/tcp/4002"),
        ("/ip4/999.0.2.7/tcp/4001", "/ip4/999.0.2.7/tcp/4002"),
        ("/ip4/192.0.2.7/tcp/0", "/ip4/192.0.2.7/tcp/4002"),
        ("/ip4/192.0.2.7/tcp/99999", "/ip4/192.0.2.7/tcp/4002"),
        ("\x1b[2J", "/ip4/192.0.2.7/tcp/4002"),
    ],
)
def test_a_peer_that_cannot_be_dialled_has_none(endpoints):
    assert contacts_of(record(endpoints)) == []


def test_an_address_of_each_ip_version_in_the_scope_of_the_first_is_taken():
    others = [f"/ip4/192.0.2.8/tcp/{port}" for port in (1, 2)]
    home = [f"/ip4/192.168.0.2/tcp/{port}" for port in (1, 2)]
    both = contacts_of(record((*SIX, *PLACES, *others, *home)))
    assert [found.endpoints for found in both] == [SIX, PLACES]
    assert [found.endpoints for found in contacts_of(record((*home, *SIX)))] == [tuple(home)]


@given(st.binary(max_size=2 * PACKED_BYTES))
def test_any_bytes_are_a_contact_or_refused(raw):
    try:
        found = unpack(raw)
    except ValueError:
        return
    assert found.pack() == raw


@given(
    st.binary(min_size=PACKED_BYTES, max_size=PACKED_BYTES)
    | st.binary(min_size=PACKED_IP6_BYTES, max_size=PACKED_IP6_BYTES)
)
def test_bytes_of_the_right_number_come_back_as_they_were(raw):
    try:
        found = unpack(raw)
    except ValueError:
        assert b"\0\0" in (raw[-6:-4], raw[-4:-2])
        return
    assert found.pack() == raw
