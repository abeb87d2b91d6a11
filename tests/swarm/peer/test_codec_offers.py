"""Servers' announcements of the codecs that they can read: their receivers, their frequency, and
the incarnation that they belong to."""

from types import SimpleNamespace

import pytest

from farflock.swarm.messages import CodecId, Reads
from farflock.swarm.peer.codec_offers import REPEAT_S, CodecOffers
from farflock.swarm.protocol.views import Member, View

A, B, T = Member("a", 1, 0), Member("b", 2, 1), Member("t", 3, -2)
INT8, INT4 = CodecId("int8,int8", 1), CodecId("int4,int8", 1)


class Port:
    me = "a"

    def __init__(self):
        self.view, self.sent, self.dropped, self.now_s = (
            View(1, bytes(32), 0, (A, B, T)),
            [],
            [],
            100.0,
        )

    @property
    def views(self):
        return SimpleNamespace(newest=self.view)

    def now(self):
        return self.now_s

    def send(self, peer, message):
        self.sent.append((peer, message.codecs))

    def drop(self, why):
        self.dropped.append(why)

    def taken(self):
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
def port():
    return Port()


@pytest.fixture
def offers(port):
    made = CodecOffers(port)
    made.reads = lambda: (INT4, INT8)
    return made


def test_what_is_read_is_told_to_all_others_at_once_and_again_after_a_while(port, offers):
    offers.tick()
    assert port.taken() == [("b", (INT4, INT8)), ("t", (INT4, INT8))]
    port.now_s += REPEAT_S / 2
    offers.tick()
    assert port.taken() == []
    port.now_s += REPEAT_S / 2
    offers.tick()
    assert len(port.taken()) == 2
    offers.tick()
    assert port.taken() == []


def test_a_change_is_told_at_once(port, offers):
    offers.tick()
    port.taken()
    offers.reads = lambda: (INT8,)
    offers.tick()
    assert port.taken() == [("b", (INT8,)), ("t", (INT8,))]


def test_newcomers_are_told_at_once(port, offers):
    offers.tick()
    port.taken()
    port.view = View(2, bytes([1] * 32), 0, (A, B, T, Member("n", 9, 1)))
    offers.tick()
    assert ("n", (INT4, INT8)) in port.taken()


def test_a_peer_that_serves_nothing_tells_nothing(port):
    CodecOffers(port).tick()
    assert port.sent == []


def test_what_a_member_told_is_known_of_that_life_alone(port, offers):
    assert offers.of("b", 2) is None
    offers.receive("b", 2, Reads((INT8,)))
    assert offers.of("b", 2) == (INT8,)
    assert offers.of("b", 5) is None
    offers.receive("b", 2, Reads((INT4,)))
    assert offers.of("b", 2) == (INT4,)


def test_what_i_read_is_known_without_a_word(offers):
    assert offers.of("a", 1) == (INT4, INT8)
    offers.reads = tuple
    assert offers.of("a", 1) is None


def test_strangers_and_former_lives_are_not_heard(port, offers):
    offers.receive("x", 1, Reads((INT8,)))
    offers.receive("b", 99, Reads((INT8,)))
    assert port.dropped == ["codecs of a stranger"] * 2
    assert offers.of("x", 1) is None
    assert offers.of("b", 99) is None


def test_a_peer_that_left_is_forgotten(port, offers):
    offers.receive("b", 2, Reads((INT8,)))
    port.view = View(2, bytes([1] * 32), 0, (A, T))
    offers.receive("t", 3, Reads((INT8,)))
    assert offers.of("b", 2) is None
