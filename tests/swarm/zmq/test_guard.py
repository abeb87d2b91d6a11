"""The bound on unread bytes: what is counted, and a flood while the event loop is blocked."""

import contextlib
import sys
import time

import pytest
import zmq
from worlds.fleet import FRAME, got, rss_bytes, run, until
from worlds.waiting import LIMIT_S, until_real

from farflock.swarm.zmq import guard as zmq_guard
from farflock.swarm.zmq.connection import UNREAD_BYTES, wire_bytes
from farflock.swarm.zmq.guard import Guard
from farflock.swarm.zmq.outbox import BULK

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="needs the kernel's byte counter"
    ),
]


def connections_of(links, lane=BULK):
    return [each for each in links.sockets.guard.watched if each.limit_bytes == UNREAD_BYTES[lane]]


def test_the_bytes_on_the_wire_are_counted_as_libzmq_takes_them():
    async def main(fleet):
        a, b = await fleet.pair()
        await until(lambda: any(each.owner for each in connections_of(b)))
        (connection,) = [each for each in connections_of(b) if each.owner == a.me][:1]
        begun_s, before, expected = time.monotonic(), connection.taken(), 0
        for size in [0, 1, 220, 221, 222, 255, 256, 1000, 100_000] * 20:
            assert await a.send_bulk(b.me, FRAME[:size], LIMIT_S)
            await got(b)
            expected += wire_bytes(1 + size)
        taken = max(each.taken() for each in connections_of(b)) - before
        # heartbeats and pings
        assert 0 <= taken - expected < 4000 + 1000 * (time.monotonic() - begun_s)

    run(main)


@pytest.mark.parametrize("parts", [True, False])
def test_a_flood_while_the_loop_is_blocked_is_cut_off_before_it_fills_the_memory(parts):
    async def main(fleet):
        a = await fleet.peer(1)
        guest = fleet.stranger(a, lane=BULK)
        await guest.introduce()
        before = rss_bytes()
        if parts:  # 500 MB in one message; the sender's parts share one buffer
            await guest.say(*[FRAME[:250_000]] * 2000)
        else:
            message = b"\x02" + FRAME  # not copied, so that only what is received takes memory
            with contextlib.suppress(zmq.Again):
                for _ in range(900):
                    guest.socket.send(message, zmq.NOBLOCK, copy=False)
        time.sleep(2.0)  # noqa: ASYNC251 - this is the blocked loop
        assert rss_bytes() - before < 150 * 2**20
        await until(lambda: a.counters["flood while this node was busy"] == 1)

    run(main)


class Fake:
    """A connection with a given backlog."""

    def __init__(self, unread_bytes: int, limit_bytes: int = 100) -> None:
        self.backlog_bytes, self.limit_bytes = unread_bytes, limit_bytes
        self.kicked = self.guarded = self.closed = False

    def unread(self) -> int:
        return self.backlog_bytes

    def kick(self) -> None:
        self.kicked = True

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(
    ("backlogs", "cut"),
    [
        ([0, 100, 40], []),
        ([0, 101, 40], [1]),
        ([100, 100, 60], []),  # 260: just full
        ([100, 100, 61], [0, 1]),  # more than a third of 260
    ],
)
def test_each_connection_has_its_limit_and_all_together_have_theirs(monkeypatch, backlogs, cut):
    monkeypatch.setattr(zmq_guard, "MAX_UNREAD_BYTES", 260)
    monkeypatch.setattr(zmq_guard, "BLOCKED_S", 1e9)
    guard, fakes = Guard(), [Fake(backlog) for backlog in backlogs]
    try:
        for fake in fakes:
            guard.watch(fake)
        guard.enforce()
        assert [index for index, fake in enumerate(fakes) if fake.kicked] == cut
        assert [fake.guarded for fake in fakes] == [fake.kicked for fake in fakes]
        guard.forget(fakes[0])
        assert fakes[0].closed
        assert fakes[0] not in guard.watched
    finally:
        guard.close()


def test_the_loops_tick_bounds_the_sum_and_the_thread_acts_only_without_ticks(monkeypatch):
    monkeypatch.setattr(zmq_guard, "MAX_UNREAD_BYTES", 100)
    monkeypatch.setattr(zmq_guard, "BLOCKED_S", 1.0)  # a slow machine keeps this thread waiting
    guard, fake = Guard(), Fake(0, limit_bytes=50)
    try:
        guard.watch(fake)
        for _ in range(30):
            guard.tick()
            fake.backlog_bytes = 60
            time.sleep(0.05)
        assert not fake.kicked
        fake.backlog_bytes = 101
        guard.tick()
        assert fake.kicked
        late = Fake(60, limit_bytes=50)
        guard.watch(late)
        until_real(lambda: late.kicked, "the guard's kick")
    finally:
        guard.close()


class Counted:
    """Arrivals that the test makes."""

    def __init__(self):
        self.bytes = 0

    def begin(self):
        self.bytes = 0

    def since(self):
        return self.bytes

    def close(self):
        pass


def test_the_thread_wakes_a_resting_loop_once_bytes_arrive_and_acts_if_it_does_not_come(
    monkeypatch,
):
    arrivals, alarms = Counted(), []
    monkeypatch.setattr(zmq_guard, "Arrivals", lambda: arrivals)
    guard, fake = Guard(), Fake(60, limit_bytes=50)
    guard.alarm = lambda: alarms.append(fake.kicked)
    try:
        guard.tick(rest_s=60.0)
        guard.watch(fake)
        time.sleep(5 * zmq_guard.BLOCKED_S)
        assert not alarms
        assert not fake.kicked
        arrivals.bytes = zmq_guard.QUIET_BYTES
        until_real(lambda: fake.kicked, "the guard's kick")
        assert alarms == [False]
    finally:
        guard.close()
