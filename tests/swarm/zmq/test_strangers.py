"""Real sockets on loopback: clients that lie, flood, dawdle, or speak nonsense."""

import asyncio
import socket
import sys

import pytest
from worlds.fleet import FRAME, got, identity, port_of, rss_bytes, run, silent, until

from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.record import Record, seal, unseal
from farflock.swarm.zmq import connection as zmq_connection
from farflock.swarm.zmq import handshake as zmq_handshake
from farflock.swarm.zmq import partner as zmq_partner
from farflock.swarm.zmq import socket as zmq_port
from farflock.swarm.zmq import upkeep as zmq_upkeep

pytestmark = pytest.mark.net

# Strangers.


def test_a_stranger_that_brings_its_own_record_is_let_in_and_may_send():
    async def main(fleet):
        a = await fleet.peer(1)
        guest = fleet.stranger(a)
        await guest.introduce()
        await guest.say(b"\x02hello")
        assert await got(a) == (guest.owner.peer, b"hello")

    run(main)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("frame first", "stranger: no record first"),
        ("long first frame", "stranger: no record first"),
        ("another's record", "stranger: bad record"),
        ("another's key claimed", "stranger: bad record"),
        ("junk", "stranger: bad record"),
        ("my own record", "stranger: bad record"),
        ("parts", "several parts"),
    ],
)
def test_a_stranger_that_does_not_prove_itself_is_cut_off_and_unheard(case, reason):
    async def main(fleet):
        a, b = await fleet.pair()
        guest = fleet.stranger(a)
        first = {
            "frame first": [b"\x02x"],
            "long first frame": [b"\x01" + bytes(5000)],
            "another's record": [b"\x01" + b.record()],
            "another's key claimed": [b"\x01" + guest.record(curve=bytes(32))],
            "junk": [b"\x01junk"],
            "my own record": [b"\x01" + a.record()],
            "parts": [b"\x01" + guest.record(), b""],
        }[case]
        await guest.say(*first)
        await guest.say(b"\x02as somebody else")
        await until(lambda: a.counters[reason])
        assert await silent(a)
        assert a.send(b.me, b"undisturbed")
        assert await got(b) == (a.me, b"undisturbed")
        await until(
            lambda: all(
                connection.owner
                for port in a.sockets.routers
                for connection in port.connections.values()
            )
        )

    run(main)


def test_a_routing_id_of_ones_own_choice_gives_no_other_peers_name():
    async def main(fleet):
        a, b = await fleet.pair()
        victim = a.table.partners[b.me].best(0).address
        guest = fleet.stranger(a, routing_id=b"x" + (victim or b"")[1:])
        await guest.introduce()
        await guest.say(b"\x02mine")
        assert await got(a) == (guest.owner.peer, b"mine")

    run(main)


def test_a_dialled_peer_that_is_another_than_the_record_says_is_not_believed():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2)
        theirs = unseal(b.record(), "run")
        # b's key and place as its own
        lie = Record("run", identity(7).peer, 1, 1, theirs.curve, theirs.endpoints)
        assert a.learn(seal(identity(7), lie))
        assert a.send(identity(7).peer, b"for seven")
        await until(lambda: a.counters["stranger: another peer than dialled"])
        assert a.road(identity(7).peer) == "none"
        assert await silent(b)

    run(main)


def test_a_silent_stranger_is_cut_off_in_time(monkeypatch):
    monkeypatch.setattr(zmq_connection, "STRANGER_S", 0.3)

    async def main(fleet):
        a = await fleet.peer(1)
        with socket.create_connection(("127.0.0.1", port_of(a))) as raw:
            raw.setblocking(False)
            fleet.stranger(a)
            await until(lambda: a.counters["stranger: no record in time"] >= 2)
            greeting = await asyncio.get_running_loop().sock_recv(raw, 1000)
            assert greeting.startswith(b"\xff")
            assert await asyncio.get_running_loop().sock_recv(raw, 1000) == b""

    run(main)


def test_the_number_of_strangers_is_bounded_and_a_friend_still_gets_in():
    async def main(fleet):
        a = await fleet.peer(1)
        crowd = [
            socket.create_connection(("127.0.0.1", port_of(a)))
            for _ in range(3 * zmq_port.MAX_STRANGERS)
        ]
        try:
            await until(lambda: a.counters["stranger: too many"] >= 2 * zmq_port.MAX_STRANGERS)
            await until(lambda: len(a.sockets.routers[0].connections) <= zmq_port.MAX_STRANGERS)
            friend = await fleet.peer(2, listen=None)
            friend.learn(a.record())
            assert friend.send(a.me, b"x")
            assert await got(a) == (friend.me, b"x")
        finally:
            for raw in crowd:
                raw.close()

    run(main)


def test_one_identity_has_a_bounded_number_of_connections():
    async def main(fleet):
        a = await fleet.peer(1)
        guests = [fleet.stranger(a) for _ in range(5)]
        for guest in guests:
            await guest.introduce()
        await until(
            lambda: (
                len(a.table.partners[guests[0].owner.peer].routes[0])
                <= zmq_handshake.MAX_ROUTES_PER_PEER
            )
        )
        assert a.counters["too many connections of one peer"] >= 3
        await guests[-1].say(b"\x02newest")
        assert await got(a) == (guests[-1].owner.peer, b"newest")

    run(main)


def test_strangers_displace_strangers_only(monkeypatch):
    monkeypatch.setattr(zmq_partner, "MAX_PARTNERS", 3)

    async def main(fleet):
        a, b = await fleet.pair()
        assert a.life(b.me) == "alive"
        for seed in range(20, 26):
            await fleet.stranger(a, seed).introduce()
        assert len(a.table.partners) == 3
        assert a.life(b.me) == "alive"

    run(main)


# Frames that no correct peer sends.


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x00",
        b"\x07x",
        b"\x03short",
        b"\x04" + bytes(9),
        b"\x05",
        b"\x06" + bytes(40),
        b"\xff" * 500,
    ],
)
def test_a_senseless_message_is_dropped_and_counted(message):
    async def main(fleet):
        a = await fleet.peer(1)
        guest = fleet.stranger(a)
        await guest.introduce()
        await guest.say(message)
        await guest.say(b"\x02after")
        assert await got(a) == (guest.owner.peer, b"after")
        assert sum(a.counters.values()) == 1

    run(main)


def is_cut_off(links, guest):
    """True if the connection is cut off; the peer may have forgotten it already."""
    partner = links.table.partners.get(guest.owner.peer)
    return partner is None or not partner.routes[0]


def test_an_oversized_frame_is_never_received():
    async def main(fleet):
        a, b = await fleet.pair()
        guest = fleet.stranger(a)
        await guest.introduce()
        await guest.say(b"\x02" + bytes(MAX_FRAME_BYTES + 1))
        await until(lambda: a.counters["frame too long"])
        await guest.say(b"\x02" + bytes(zmq_port.MAX_WIRE_BYTES))
        await until(lambda: is_cut_off(a, guest))
        assert b.send(a.me, b"undisturbed")
        assert await got(a) == (b.me, b"undisturbed")

    run(main)


def test_a_message_of_several_parts_ends_the_connection():
    async def main(fleet):
        a = await fleet.peer(1)
        guest = fleet.stranger(a)
        await guest.introduce()
        await guest.say(b"\x02one", b"\x02two")
        await until(lambda: is_cut_off(a, guest))
        assert a.counters["several parts"] == 1
        assert await silent(a)

    run(main)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the kernel's byte counter")
@pytest.mark.parametrize("proven", [True, False])
def test_an_endless_message_is_cut_off_before_it_fills_the_memory(proven):
    async def main(fleet):
        a = await fleet.peer(1)
        guest = fleet.stranger(a)
        if proven:
            await guest.introduce()
        before = rss_bytes()
        await guest.say(*[FRAME[:250_000]] * 2000)  # 500 MB; the sender's parts share one buffer
        await until(lambda: a.counters["endless message" if proven else "stranger: too many bytes"])
        await asyncio.sleep(0.3)
        assert rss_bytes() - before < 150 * 2**20
        assert await silent(a)

    run(main)


def test_a_stranger_that_says_nothing_for_long_is_cut_off(monkeypatch):
    monkeypatch.setattr(zmq_connection, "SILENT_S", 1.0)
    monkeypatch.setattr(zmq_upkeep, "PING_EVERY_S", 0.1)

    async def main(fleet):
        a, b = await fleet.pair()
        guest = fleet.stranger(a)
        await guest.introduce()
        await until(lambda: is_cut_off(a, guest))
        assert a.counters["silent"] >= 1
        # a slow machine may have kept both from their pings for a second
        await until(lambda: a.life(b.me) == "alive")

    run(main)
