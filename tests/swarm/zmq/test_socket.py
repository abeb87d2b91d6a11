"""Addresses from strangers, and what is known of a partner: pure parts of the ZMQ links."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from farflock.swarm.addresses import multiaddress_of, numeric
from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.record import Record
from farflock.swarm.zmq import partner as zmq_partner
from farflock.swarm.zmq.outbox import Outbox, Pool
from farflock.swarm.zmq.partner import (
    DEAD_S,
    MAX_REST_S,
    WANTED_S,
    Dial,
    Partner,
    PartnerTable,
    Rests,
    Route,
    Traffic,
    endpoint_pairs,
)
from farflock.swarm.zmq.socket import zmq_endpoint
from farflock.swarm.zmq.zap import Gate


@given(st.ip_addresses(), st.integers(1, 65535))
def test_addresses_round_trip(address, port):
    endpoint = zmq_endpoint(f"{multiaddress_of(str(address))}/tcp/{port}")
    host, _, number = endpoint.removeprefix("tcp://").rpartition(":")
    assert numeric(host) == numeric(str(address))
    assert int(number) == port


@given(st.text(max_size=60))
@example("/ip4/127.0.0.1/tcp/0")
@example("/ip4/127.0.0.1/tcp/65536")
@example("/ip4/127.0.0.1/tcp/1/p2p/x")
@example("/ip4/1.2.3/tcp/1")
@example("/ip6/127.0.0.1/tcp/1")
@example("/ip4/::1/tcp/1")
@example("/ip6/fe80::1%eth0/tcp/1")
@example("/dns4/localhost/tcp/1")
@example("/unix/tmp/x")
@example("ipc:///tmp/x")
def test_any_other_address_is_refused(text):
    with pytest.raises(ValueError, match=r".+"):
        zmq_endpoint(text)


def test_a_host_name_cannot_be_published():
    with pytest.raises(ValueError, match="localhost"):
        multiaddress_of("localhost")


def record(*endpoints: str, sequence: int = 1, lifetime_s: float = 60.0) -> Record:
    return Record("run", "peer", 1, sequence, bytes(32), endpoints, lifetime_s=lifetime_s)


def test_endpoints_come_in_twos_and_what_cannot_be_read_is_left_out():
    good = ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2")
    assert endpoint_pairs(record(*good)) == [("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")]
    assert endpoint_pairs(record("/quic/x", "/quic/y", *good, good[0])) == endpoint_pairs(
        record(*good)
    )
    assert endpoint_pairs(record()) == []


class Heard:
    """A stand-in for a tunnel, last heard at a given moment."""

    confirmed = True

    def __init__(self, heard_s: float) -> None:
        self.heard_s = heard_s


def test_life_follows_connections_first_then_the_tunnel_then_the_last_news():
    partner = Partner("peer", Outbox(Pool()))
    assert (partner.life(0.0, 1.0), partner.road()) == ("unknown", "none")
    partner.routes[0].append(Route(None, None, 0, "peer", ""))
    assert (partner.life(0.0, 1.0), partner.road()) == ("alive", "direct")
    partner.routes[0].clear()
    partner.lost_s = 10.0
    moments = (10.0, 10.0 + DEAD_S - 0.1, 10.0 + DEAD_S)
    assert [partner.life(now_s, 1.0) for now_s in moments] == ["suspect", "suspect", "dead"]
    partner.tunnel = Heard(20.0)
    moments = (20.8, 20.95, 20.0 + DEAD_S)
    assert [partner.life(now_s, 1.0) for now_s in moments] == ["alive", "suspect", "dead"]
    assert partner.life(21.5, 3.0) == "alive"
    assert partner.road() == "forwarded"


def test_traffic_adds_up_by_road():
    partner = Partner("peer", Outbox(Pool()))
    partner.count("direct", sent=2)
    partner.count("direct", sent=3, received=4)
    partner.count("forwarded", received=1)
    assert partner.traffic == {"direct": Traffic(5, 4), "forwarded": Traffic(0, 1)}


def test_traffic_with_a_partner_that_is_dropped_stays_counted():
    book = table()
    for sent in (2, 5):
        partner = book.begin("peer", 0.0)
        partner.count("direct", sent=sent, received=1)
        partner.count("forwarded", received=10)
        book.drop(partner, 1.0)
        book.drop(partner, 1.0)  # harmless when done twice
    assert book.past == Traffic(7, 22)


def table() -> PartnerTable:
    return PartnerTable("me", Gate("run", "me", refuse=["enemy"]))


def test_an_expired_record_is_not_used_but_keeps_older_ones_away():
    book = table()
    assert book.note(record(sequence=5, lifetime_s=10.0), 0.0)
    assert book.record("peer", 9.9)
    assert book.record("peer", 10.0) is None
    assert book.want("peer", 10.0) is None
    assert not book.note(record(sequence=4), 20.0)
    assert book.note(record(sequence=6), 20.0)
    assert book.want("peer", 20.0).record.sequence == 6


class Dialled:
    """A dial that waits for a connection to the place of a record."""

    ports, outdated = (), Dial.outdated

    def __init__(self, record):
        self.record, self.down_s, self.closed = record, 0.0, False

    def close(self):
        self.closed = True


@pytest.mark.parametrize("came", ["elsewhere", "over the dial"])
def test_a_dial_that_does_not_connect_ends_once_its_peer_is_elsewhere(came):
    """But not if the peer itself has told it over that dial."""
    book, there = table(), record("/ip4/127.0.0.1/tcp/1", sequence=2)
    assert book.note(record(sequence=1), 0.0)
    partner = book.begin("peer", 0.0)
    dial = partner.dial = Dialled(record(sequence=1))
    assert book.note(there, 1.0, dial if came == "over the dial" else None)
    assert partner.record == there
    assert dial.closed == (came == "elsewhere")
    assert partner.dial is (None if dial.closed else dial)


def test_the_address_book_is_bounded_and_what_has_expired_makes_room(monkeypatch):
    monkeypatch.setattr(zmq_partner, "MAX_KNOWN", 3)
    book = table()
    peers = [
        Record("run", f"peer{number}", 1, 1, bytes(32), lifetime_s=10.0) for number in range(4)
    ]
    assert [book.note(record, float(when)) for when, record in enumerate(peers)] == [True] * 3 + [
        False
    ]
    assert book.counters["address book full"] == 1
    assert book.note(peers[3], 10.5)
    assert sorted(book.known) == ["peer1", "peer2", "peer3"]


def test_a_partner_is_wanted_for_a_while_after_the_last_question():
    book = table()
    book.note(record(), 0.0)
    partner = book.want("peer", 0.0)
    assert partner.wanted(WANTED_S - 0.1)
    assert not partner.wanted(WANTED_S)
    assert not book.begin("stranger", 0.0).wanted(0.0)
    assert book.begin("enemy", 0.0) is None


def test_dropping_a_partner_forgets_its_queue_and_says_so():
    book = table()
    partner = book.begin("peer", 0.0)
    partner.outbox.put(0, b"x")
    book.drop(partner, 1.0)
    assert book.counters["dropped with partner"] == 1
    assert (book.pool.used, book.partners) == ([0, 0], {})


def test_an_address_rests_longer_after_each_failure_until_it_works():
    rests, now_s, waits = Rests(), 0.0, []
    for _ in range(6):
        rests.failed("tcp://192.0.2.7:1", now_s)
        start_s = now_s
        while not rests.is_due("tcp://192.0.2.7:1", now_s):
            now_s += 0.5
        waits.append(now_s - start_s)
    assert waits == [1.0, 2.0, 4.0, 8.0, MAX_REST_S, MAX_REST_S]
    assert rests.is_due("tcp://192.0.2.7:2", 0.0)
    rests.failed("tcp://192.0.2.7:1", now_s)
    rests.worked("tcp://192.0.2.7:1")
    assert rests.is_due("tcp://192.0.2.7:1", now_s)


def test_what_expired_long_ago_is_forgotten():
    book = table()
    book.note(record(lifetime_s=10.0), 0.0)
    book.forget_old(10.0)
    assert "peer" in book.known
    book.forget_old(10.0 + MAX_RECORD_AGE_S)
    assert not book.known
