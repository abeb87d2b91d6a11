"""Real sockets on loopback: the law of links."""

import asyncio
import os
import signal
import socket
import time
from dataclasses import replace

import msgspec
import pytest
from worlds.fleet import (
    FRAME,
    got,
    identity,
    meet,
    noticed,
    port_of,
    rss_bytes,
    run,
    silent,
    until,
)
from worlds.waiting import LIMIT_S, in_time

from farflock.swarm.contact import contacts_of
from farflock.swarm.links import MAX_FRAME_BYTES
from farflock.swarm.record import Record, seal, unseal
from farflock.swarm.zmq import outbox
from farflock.swarm.zmq import partner as zmq_partner
from farflock.swarm.zmq import sending as zmq_sending
from farflock.swarm.zmq.links import UNSIGNED, LinkOptions, ZmqLinks

pytestmark = pytest.mark.net

# The law.


def test_frames_of_all_sizes_arrive_whole_with_their_sender():
    async def main(fleet):
        a, b = await fleet.pair()
        for size in (0, 1, 100, 65_536, MAX_FRAME_BYTES):
            frame = (FRAME + FRAME)[:size]
            assert a.send(b.me, frame)
            assert await got(b) == (a.me, frame)
            assert await b.send_bulk(a.me, frame, LIMIT_S)
            assert await got(a) == (b.me, frame)

    run(main)


def test_an_unknown_peer_is_not_reached_and_no_frame_is_too_long():
    async def main(fleet):
        a, b = await fleet.pair()
        assert not a.send(identity(5).peer, b"x")
        assert not await a.send_bulk(identity(5).peer, b"x", 0.1)
        assert not a.send(a.me, b"x")
        assert (a.life(identity(5).peer), a.road(identity(5).peer), a.rtt_s(identity(5).peer)) == (
            "unknown",
            "none",
            None,
        )
        with pytest.raises(ValueError, match="cut it"):
            a.send(b.me, bytes(MAX_FRAME_BYTES + 1))

    run(main)


def test_a_peer_without_a_listener_is_answered_on_the_connection_it_dialled():
    async def main(fleet):
        home, public = await fleet.peer(1, listen=None), await fleet.peer(2)
        assert unseal(home.record(), "run").endpoints == ()
        home.learn(public.record())
        await meet(home, public)
        assert await public.send_bulk(home.me, FRAME, LIMIT_S)
        assert await got(home) == (public.me, FRAME)
        assert (public.road(home.me), public.life(home.me)) == ("direct", "alive")

    run(main)


def test_a_peer_is_reached_by_a_contact_and_tells_its_record_on_the_way():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2)
        a.expect(contacts_of(unseal(b.record(), "run"))[0])
        assert a.table.known[b.me][0].sequence == UNSIGNED
        assert a.send(b.me, b"first")
        dial = a.table.partners[b.me].dial
        assert await got(b) == (a.me, b"first")
        await meet(a, b)
        assert a.table.known[b.me][0].sequence > UNSIGNED
        assert a.table.partners[b.me].dial is dial is not None

    run(main)


def test_a_contact_with_anothers_place_leads_to_nobody():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2)
        other = identity(5).peer
        a.expect(replace(contacts_of(unseal(b.record(), "run"))[0], peer=other))
        assert a.send(other, b"not for you")
        await until(lambda: a.counters["stranger: another peer than dialled"])
        assert a.life(other) == "unknown"
        assert await silent(b)

    run(main)


def test_a_contact_does_not_replace_a_record():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2)
        assert a.learn(b.record())
        a.expect(replace(contacts_of(unseal(b.record(), "run"))[0], curve=bytes(32)))
        await meet(a, b)

    run(main)


def test_two_that_dial_each_other_at_once_agree():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2)
        a.learn(b.record())
        b.learn(a.record())
        for number in range(50):
            assert a.send(b.me, b"%d" % number)
            assert b.send(a.me, b"%d" % number)
        for links, other in ((a, b), (b, a)):
            frames = {await got(links) for _ in range(50)}
            assert frames == {(other.me, b"%d" % number) for number in range(50)}

    run(main)


def test_the_round_trip_is_measured_on_both_sides():
    async def main(fleet):
        a, b = await fleet.pair()
        await until(lambda: a.rtt_s(b.me) is not None and b.rtt_s(a.me) is not None)
        assert a.rtt_s(b.me) > 0

    run(main)


def test_bytes_are_counted_by_peer_and_road():
    async def main(fleet):
        a, b = await fleet.pair()
        sent, received = a.traffic(b.me)["direct"].sent, b.traffic(a.me)["direct"].received
        await a.send_bulk(b.me, FRAME, LIMIT_S)
        await got(b)
        assert (
            a.traffic(b.me)["direct"].sent - sent
            == b.traffic(a.me)["direct"].received - received
            == len(FRAME) + 1
        )
        assert "forwarded" not in a.traffic(b.me)

    run(main)


def test_a_partner_that_goes_is_suspect_at_once_and_dead_later(monkeypatch):
    monkeypatch.setattr(zmq_partner, "DEAD_S", 0.6)

    async def main(fleet):
        a, b = await fleet.pair()
        assert a.life(b.me) == b.life(a.me) == "alive"
        begun_s = time.monotonic()
        await b.close()
        await noticed(a, b.me)
        await until(lambda: a.life(b.me) == "dead")
        assert time.monotonic() - begun_s > 0.5
        assert not a.send(b.me, b"x")
        assert a.road(b.me) == "none"

    run(main)


def test_a_restarted_peer_on_the_same_port_is_heard_again_with_its_new_record():
    async def main(fleet):
        a, b = await fleet.pair()
        old = unseal(b.record(), "run")
        port = int(old.endpoints[0].rpartition("/")[2])
        bulk = int(old.endpoints[1].rpartition("/")[2])
        await b.close()
        await noticed(a, b.me)
        if bulk != port + 1:  # the pair that port 0 gave cannot be asked for again
            return await restart_elsewhere(fleet, a, b)
        again = await fleet.peer(2, listen=f"tcp://127.0.0.1:{port}", sequence=old.sequence + 1)
        await until(lambda: a.life(b.me) == "alive")
        assert a.send(again.me, b"again")
        assert await got(again) == (a.me, b"again")

    run(main)


async def restart_elsewhere(fleet, a, b):
    again = await fleet.peer(2, sequence=100)
    assert a.learn(again.record())
    assert a.send(again.me, b"again")
    assert await got(again) == (a.me, b"again")
    assert a.life(b.me) == "alive"


def test_a_peer_that_moved_is_found_by_its_newer_record():
    async def main(fleet):
        a, b = await fleet.pair()
        await b.close()
        await noticed(a, b.me)
        await restart_elsewhere(fleet, a, b)
        assert a.table.known[b.me][0].incarnation == 2

    run(main)


def test_all_endpoints_of_a_record_are_tried(monkeypatch):
    monkeypatch.setattr(zmq_partner, "DIAL_S", 0.3)

    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2, advertise=("127.0.0.3", "127.0.0.1"))
        assert len(unseal(b.record(), "run").endpoints) == 4
        a.learn(b.record())
        assert a.send(b.me, b"x")
        assert await got(b) == (a.me, b"x")

    run(main)


def test_it_works_over_ip6():
    async def main(fleet):
        try:
            a = await fleet.peer(1, listen="tcp://[::1]:0")
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        b = await fleet.peer(2, listen=None)
        assert unseal(a.record(), "run").endpoints[0].startswith("/ip6/::1/tcp/")
        b.learn(a.record())
        await meet(b, a)

    run(main)


# Records.


def test_forged_replayed_foreign_and_own_records_are_refused():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2)
        first, second = b.record(), b.record(role="reader", speed=5.0)
        assert a.learn(second)
        assert not a.learn(second)
        assert not a.learn(first)
        assert a.table.known[b.me][0].role == "reader"
        forged = bytearray(b.record())
        forged[-1] ^= 1
        stranger = Record("run", identity(3).peer, 1, 99, bytes(32))
        for bad in (
            bytes(forged),
            seal(identity(3), msgspec.structs.replace(stranger, run="other")),
            b"",
            bytes(5000),
        ):
            assert not a.learn(bad)
        assert a.counters["bad record"] == 4
        assert not a.learn(a.record())

    run(main)


# Limits.


def test_a_reader_that_does_not_read_costs_a_bounded_number_of_bytes_and_nothing_is_lost():
    async def main(fleet):
        a, b = await fleet.pair()
        before, sent = rss_bytes(), 0
        held = outbox.INBOX_BYTES[1] + outbox.MAX_BULK_BYTES
        has_room = True
        while has_room or sent * len(FRAME) < held * 0.9:  # a slow machine makes room later
            has_room = await a.send_bulk(b.me, sent.to_bytes(4, "big") + FRAME[4:], 0.5)
            sent += has_room
        # the rest lies in libzmq and the kernel
        assert sent * len(FRAME) < held + 32 * 2**20
        assert rss_bytes() - before < held + 48 * 2**20
        assert b.send(a.me, b"control still passes")
        assert await got(a) == (b.me, b"control still passes")
        for number in range(sent):
            assert (await got(b))[1][:4] == number.to_bytes(4, "big")
        assert not a.counters
        assert not b.counters

    run(main)


def test_control_frames_over_the_limit_are_refused_at_once():
    async def main(fleet):
        a = await fleet.peer(1)
        b = await fleet.peer(2)
        a.learn(b.record())
        accepted = 0
        while a.send(b.me, bytes(1000)):
            accepted += 1
        assert 500 * 1000 < accepted * 1000 <= outbox.MAX_CONTROL_BYTES
        assert a.counters["queue full"] == 1
        for _ in range(accepted):
            assert (await got(b))[1] == bytes(1000)

    run(main)


def test_frames_for_a_peer_that_cannot_be_reached_are_dropped_after_a_while(monkeypatch):
    monkeypatch.setattr(zmq_sending, "DEAD_S", 0.5)

    async def main(fleet):
        a = await fleet.peer(1)
        away = Record(
            "run",
            identity(5).peer,
            1,
            1,
            bytes(32),
            ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2"),
        )
        a.learn(seal(identity(5), away))
        assert a.send(identity(5).peer, b"x")
        waiting = asyncio.create_task(fill(a, identity(5).peer))
        await until(lambda: a.counters["no road"])
        assert await in_time(waiting, "an end of the wait for room") > 0
        assert a.life(identity(5).peer) == "unknown"
        assert not a.waiting

    run(main)


async def fill(links: ZmqLinks, peer: str) -> int:
    count = 0
    while await links.send_bulk(peer, FRAME, 5.0):
        count += 1
    return count


def test_64_mb_cross_in_order(record_property):
    async def main(fleet):
        a, b = await fleet.pair()
        count = 64 * 2**20 // len(FRAME)
        begun_s, cpu_s = time.monotonic(), time.process_time()
        sender = asyncio.create_task(feed(a, b.me, count))
        for number in range(count):
            assert (await got(b))[1][:4] == number.to_bytes(4, "big")
        await sender
        took_s = time.monotonic() - begun_s
        cost_s = (time.process_time() - cpu_s) / (count * len(FRAME) / 1e9)
        record_property(
            "rate",
            f"{count * len(FRAME) / took_s / 1e6:.0f} MB/s, {cost_s:.1f} CPU s/GB, both ends",
        )

    run(main)


async def feed(links: ZmqLinks, peer: str, count: int) -> None:
    for number in range(count):
        assert await links.send_bulk(peer, number.to_bytes(4, "big") + FRAME[4:], LIMIT_S)


# Refusing, closing, failing.


def test_a_refused_peer_is_cut_off_and_cannot_come_back():
    async def main(fleet):
        a, b = await fleet.pair()
        a.refuse(b.me)
        assert not a.send(b.me, b"x")
        assert not a.learn(b.record())
        begun_s = time.monotonic()
        await noticed(b, a.me)
        b.send(a.me, b"let me in")
        await until(lambda: b.counters["refused by partner"])
        assert await silent(a, 1.5)
        assert a.life(b.me) == "unknown"
        # each refusal doubles the wait, on each of the two connections
        took_s = time.monotonic() - begun_s
        assert b.counters["refused by partner"] <= 8 + 2 * took_s / zmq_partner.MAX_REDIAL_S

    run(main)


def test_a_peer_refused_from_the_start_gets_nothing_through():
    async def main(fleet):
        a, b = await fleet.peer(1, refuse=[identity(2).peer]), await fleet.peer(2)
        b.learn(a.record())
        b.send(a.me, b"x")
        await until(lambda: a.counters["stranger: bad record"])
        assert await silent(a)
        assert not a.learn(b.record())

    run(main)


def test_peers_of_different_runs_do_not_connect():
    async def main(fleet):
        a, b = await fleet.peer(1), await fleet.peer(2, run="other")
        place = unseal(a.record(), "run")
        b.learn(seal(identity(1), msgspec.structs.replace(place, run="other")))
        b.send(a.me, b"x")
        await until(lambda: a.counters["stranger: bad record"])
        assert await silent(a)

    run(main)


def test_closing_leaves_no_thread_no_descriptor_and_no_task():
    def census() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    async def main():
        before = census()
        a = await ZmqLinks.open(identity(1), "run", LinkOptions(incarnation=1))
        b = await ZmqLinks.open(identity(2), "run", LinkOptions(incarnation=1))
        a.learn(b.record())
        await meet(a, b)
        waiting = asyncio.create_task(a.receive())
        await asyncio.sleep(0)
        assert census() > before
        await a.close()
        await a.close()
        await b.close()
        with pytest.raises(ConnectionError):
            await waiting
        assert not a.send(b.me, b"x")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await until(lambda: census() == before)

    asyncio.run(main())


def test_cancelled_waits_lose_nothing():
    async def main(fleet):
        a, b = await fleet.pair()
        waiting = asyncio.create_task(b.receive())
        await asyncio.sleep(0)
        waiting.cancel()
        a.send(b.me, b"kept")
        assert await got(b) == (a.me, b"kept")
        while await a.send_bulk(b.me, FRAME, 0.2):
            pass
        stuck = asyncio.create_task(a.send_bulk(b.me, FRAME, 5.0))
        await asyncio.sleep(0)
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        assert not a.table.pool.waiters

    run(main)


def test_a_place_where_one_cannot_listen_is_reported_with_a_remedy_and_leaves_nothing():
    async def main(fleet):
        a = await fleet.peer(1)
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match="choose another port"):
            await fleet.peer(2, listen=f"tcp://127.0.0.1:{port_of(a)}")
        with pytest.raises(ValueError, match="`advertise`"):
            await fleet.peer(2, listen="tcp://0.0.0.0:0")
        with pytest.raises(ValueError, match="localhost"):
            await fleet.peer(2, listen="tcp://localhost:0")
        await until(lambda: len(os.listdir("/proc/self/fd")) == descriptors)

    run(main)


# Real processes.


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_ends_or_freezes_is_suspect_soon_and_dead_later(end, record_property):
    async def main(fleet):
        a, process = await fleet.peer(1), await fleet.process(2)
        process.tell("learn", a.record().hex())
        assert a.learn(process.record)
        assert a.send(process.peer, b"echo")
        assert await got(a) == (process.peer, b"echo")
        begun_s = time.monotonic()
        process.child.send_signal(end)
        suspect_s = await noticed(a, process.peer)
        await until(lambda: a.life(process.peer) == "dead")
        dead_s = time.monotonic() - begun_s
        record_property(
            "noticed", f"{end.name}: suspect after {suspect_s:.2f} s, dead after {dead_s:.2f} s"
        )
        # how long it takes on a quiet machine is what `farflock bench kill` measures
        assert dead_s > 4.5
        if end == signal.SIGSTOP:
            process.child.send_signal(signal.SIGCONT)
            await until(lambda: a.life(process.peer) == "alive")
            assert a.send(process.peer, b"echo again")
            assert await got(a) == (process.peer, b"echo again")

    run(main)


def test_a_frozen_process_that_dialled_us_is_noticed_too():
    async def main(fleet):
        a, process = await fleet.peer(1), await fleet.process(2)
        process.tell("learn", a.record().hex())
        assert a.learn(process.record)
        a.send(process.peer, b"echo")
        await got(a)
        # a link that is left, if any, was dialled by the other side
        a.table.partners[process.peer].hang_up(0.0)
        await asyncio.sleep(1.0)
        await echoed(a, process)
        process.child.send_signal(signal.SIGSTOP)
        await noticed(a, process.peer)

    run(main)


async def echoed(links, process):
    """Wait for an echo; a frame may be lost with a connection that is on its way out."""
    while True:
        links.send(process.peer, b"echo")
        if not await silent(links, 1.0):
            return


@pytest.mark.parametrize("dials", ["we", "they"])
def test_a_held_gil_on_either_side_raises_no_alarm(dials):
    async def main(fleet):
        # longer than by default: a slow machine alone may keep libzmq's threads for a second
        patient = {"suspect_after_s": 2.0}
        a, process = await fleet.peer(1, **patient), await fleet.process(2, **patient)
        process.tell("learn", a.record().hex())
        assert a.learn(process.record)
        if dials == "we":
            a.send(process.peer, b"echo")
        else:
            process.tell("send", a.me, b"hello".hex())
        assert (await got(a))[0] == process.peer
        assert (a.table.partners[process.peer].dial is not None) == (dials == "we")
        process.tell("hold", "2500000")
        held = asyncio.create_task(process.answer("held"))
        while not held.done():
            assert a.life(process.peer) == "alive"
            await asyncio.sleep(0.01)
        time.sleep(2.5)  # noqa: ASYNC251 - now we are busy
        assert a.life(process.peer) == "alive"
        await asyncio.sleep(0.3)
        assert a.life(process.peer) == "alive"
        process.tell("road", a.me)
        assert await process.answer("road") == ["direct", "alive"]

    run(main)


def test_a_killed_process_that_starts_again_is_alive_again():
    async def main(fleet):
        with socket.socket() as probe, socket.socket() as after:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            after.bind(("127.0.0.1", port + 1))
        a, process = await fleet.peer(1), await fleet.process(2, listen=f"tcp://127.0.0.1:{port}")
        process.tell("learn", a.record().hex())
        a.learn(process.record)
        a.send(process.peer, b"echo")
        await got(a)
        process.child.kill()
        await noticed(a, process.peer)
        again = await fleet.process(2, listen=f"tcp://127.0.0.1:{port}")
        again.tell("learn", a.record().hex())
        await until(lambda: a.life(again.peer) == "alive")
        assert a.send(again.peer, b"echo again")
        assert await got(a) == (again.peer, b"echo again")

    run(main)
