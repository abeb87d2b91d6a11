"""A peer hears at which address others have dialled its key; a lie that cannot be is refused."""

import asyncio
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
from worlds import fleet as fleets
from worlds.fleet import got, meet, port_of, run, until

from farflock.swarm.addresses import AddressScope, LinkAddress
from farflock.swarm.zmq import witness as zmq_witness
from farflock.swarm.zmq.message import OBSERVED
from farflock.swarm.zmq.outbox import Outbox, Pool
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route
from farflock.swarm.zmq.witness import Witness
from farflock.swarm.zmq.zap import Gate

OWN = LinkAddress("203.0.113.9", 4002, 4003)
NEW = LinkAddress("198.51.100.7", 4002, 4003)


class Told:
    """A witness that heard of two published ports, what it took for true, and its partners."""

    def __init__(self):
        self.found, self.table = [], PartnerTable("me", Gate("run", "me"))
        self.witness = Witness(self.table, SimpleNamespace(probes={}))
        self.witness.own, self.witness.ports = (OWN,), (4002, 4003)
        self.witness.confirmed = lambda address, by: self.found.append((address, by))
        self.partner = Partner("peer", Outbox(Pool()))
        self.partner.looks.waits = True

    def hear(self, address, seen):
        route = Route(None, b"route", 0, "peer", "", seen)
        port = SimpleNamespace(connections={0}, write=lambda to, said: self._take(route, said))
        route.port = port
        zmq_witness.tell(route, address)

    def _take(self, route, said):
        assert said[:1] == OBSERVED
        self.witness.hear(self.partner, route, memoryview(said[1:]))


@pytest.mark.parametrize(
    ("address", "seen", "counts"),
    [
        (NEW, "192.0.2.1", True),
        (OWN, "192.0.2.1", True),
        (OWN, "172.17.0.1", True),  # what a container sees of all that comes in
        (NEW, "172.17.0.1", False),
        (NEW, "198.51.100.8", False),  # of this very network
        (OWN, "203.0.113.10", False),
        (replace(NEW, host="10.0.0.5"), "192.0.2.1", False),
        (replace(NEW, host="127.0.0.1"), "192.0.2.1", False),
        (replace(NEW, bulk=0), "192.0.2.1", False),
        (replace(NEW, control=22), "192.0.2.1", False),  # where this peer does not listen
        (replace(NEW, host="2001:db8::1"), "192.0.2.1", True),
    ],
)
def test_only_another_network_confirms_and_only_what_it_can_know(address, seen, counts):
    told = Told()
    told.hear(address, seen)
    assert told.found == ([(address, "peer")] if counts else [])


def test_an_address_is_confirmed_once_for_each_question():
    told = Told()
    told.hear(NEW, "192.0.2.1")
    told.hear(OWN, "192.0.2.1")
    assert told.found == [(NEW, "peer")]
    route = Route(None, b"route", 0, "peer", "")
    route.port = SimpleNamespace(write=lambda to, said: True)
    told.partner.routes[0].append(route)
    told.witness.ask(told.partner, 1.0)
    told.hear(OWN, "192.0.2.1")
    assert told.found == [(NEW, "peer"), (OWN, "peer")]
    assert told.table.counters["answer that nobody has asked for"] == 1


def test_an_ipv4_address_counts_as_such_in_the_form_of_an_ipv6_one():
    told = Told()
    route = Route(None, b"route", 0, "peer", "", "192.0.2.1")
    mapped = bytes(10) + b"\xff\xff" + bytes([203, 0, 113, 9])
    told.witness.hear(told.partner, route, memoryview(mapped + struct.pack(">HH", 4002, 4003)))
    assert told.found == [(OWN, "peer")]


@pytest.mark.parametrize("body", [b"", bytes(4), bytes(7), bytes(9), bytes(500)])
def test_an_answer_that_is_none_is_counted(body):
    told = Told()
    route = Route(None, b"route", 0, "peer", "", "192.0.2.1")
    told.witness.hear(told.partner, route, memoryview(body))
    assert told.found == []
    assert told.table.counters["answer about an address"] == 1


@pytest.mark.net
def test_a_dial_tells_who_was_dialled_and_a_dial_back_tells_who_dialled(monkeypatch):
    monkeypatch.setattr(zmq_witness, "WORTH", AddressScope.MACHINE)
    monkeypatch.setattr(zmq_witness, "is_elsewhere", lambda one, other: True)

    async def main(fleet):
        found = []
        a, b = await fleet.peer(1), await fleet.peer(2)
        for links in (a, b):
            links.witness.confirmed = lambda address, by, me=links.me: found.append(
                (me, address.host, address.control, by)
            )
        a.learn(b.record())
        b.learn(a.record())
        await meet(b, a)
        await until(lambda: len(set(found)) == 2)
        assert set(found) == {
            (a.me, "127.0.0.1", port_of(a), b.me),  # by b's dial
            (b.me, "127.0.0.1", port_of(b), a.me),  # by a's dial back
        }
        await until(lambda: not a.sockets.probes)
        assert a.send(b.me, b"still here")
        assert await got(b) == (a.me, b"still here")

    run(main)


@pytest.mark.net
def test_a_dial_back_to_another_key_confirms_nothing(monkeypatch):
    monkeypatch.setattr(zmq_witness, "WORTH", AddressScope.MACHINE)
    monkeypatch.setattr(zmq_witness, "DIAL_S", 0.5)

    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2, listen=None)
        other = await fleet.peer(3)
        found = []
        b.witness.confirmed = lambda address, by: found.append(address)
        b.witness.ports = (port_of(other), port_of(other) + 1)
        b.learn(a.record())
        await meet_one_way(b, a)
        await until(lambda: a.sockets.probes)
        await until(lambda: not a.sockets.probes)
        await asyncio.sleep(0)
        assert found == []

    run(main)


async def meet_one_way(a, b):
    assert a.send(b.me, b"meet")
    assert await fleets.got(b) == (a.me, b"meet")
