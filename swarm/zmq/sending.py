"""Output to the sockets: frames queued by partner, written as far as there is room."""

import asyncio

from farflock.swarm.links import Sendable, joined, size_of
from farflock.swarm.zmq.forward import pack_forward
from farflock.swarm.zmq.message import FORWARD, FRAME
from farflock.swarm.zmq.outbox import BULK, CONTROL, LANES
from farflock.swarm.zmq.partner import DEAD_S, Partner, PartnerTable
from farflock.swarm.zmq.rate_limit import RateLimit
from farflock.swarm.zmq.relay import Relays
from farflock.swarm.zmq.socket import ZmqSocket


class Sender:
    """Sends frames to partners, over a connection if there is one, else sealed through a relay."""

    def __init__(self, table: PartnerTable, detours: Relays, limit: RateLimit) -> None:
        """`limit` is that of this peer's uplink: bulk waits for it, and control counts in it."""
        self._table, self._detours, self._limit = table, detours, limit
        self._loop = asyncio.get_running_loop()
        # Partners whose queues are not empty, by peer; who has sent last is the last one.
        self._backlog: dict[str, Partner] = {}
        self._again: asyncio.TimerHandle | None = None  # once the limit lets more pass

    @property
    def waiting(self) -> int:
        """The number of partners with queued frames."""
        return len(self._backlog)

    def queued_bytes(self) -> int:
        """Return the bulk bytes that wait for this peer's own line: those for several partners, or
        all while its limit holds them back. What waits for one may wait for that one's line."""
        queued = [partner.outbox.bulk_bytes for partner in self._backlog.values()]
        own = self._limit.wait_s(self._loop.time()) > 0
        return sum(queued) - (0 if own else max(queued, default=0))

    def put(self, partner: Partner, frame: bytes) -> bool:
        """Send a control frame; return False if its queue is full."""
        if not partner.outbox.put(CONTROL, frame):
            self._table.counters["queue full"] += 1
            return False
        self.flush(partner)
        return True

    async def put_bulk(self, partner: Partner, frame: Sendable, timeout_s: float) -> bool:
        """Send a bulk frame, waiting for room in its queue; return False on timeout."""
        try:
            return await partner.outbox.put_bulk(frame, timeout_s)
        finally:
            self.flush(partner)

    def flush(self, partner: Partner, only: ZmqSocket | None = None) -> None:
        """Write a partner's queued frames (only on `only`, if given) as far as there is room."""
        for lane in LANES:
            while (frame := partner.outbox.head(lane)) is not None:
                if not self._write(partner, lane, frame, only):
                    break
                partner.stuck[lane] = None
                partner.outbox.pop(lane)
                self._backlog.pop(partner.peer, None)
        if partner.outbox:
            self._backlog[partner.peer] = partner
        elif self._backlog.get(partner.peer) is partner:
            del self._backlog[partner.peer]

    def flush_all(self, port: ZmqSocket) -> None:
        """Write the frames of all partners that can go on this port."""
        for waiting in list(self._backlog.values()):
            self.flush(waiting, port)

    def _has_leave(self) -> bool:
        """Return whether the limit lets a frame pass; else write again once it does."""
        wait_s = self._limit.wait_s(self._loop.time())
        if wait_s and self._again is None:
            self._again = self._loop.call_later(wait_s, self._go_on)
        return not wait_s

    def _go_on(self) -> None:
        self._again = None
        for waiting in list(self._backlog.values()):
            self.flush(waiting)

    def close(self) -> None:
        """Write no more by itself."""
        if self._again is not None:
            self._again.cancel()

    def _write(self, partner: Partner, lane: int, frame: Sendable, only: ZmqSocket | None) -> bool:
        if lane == BULK and not self._has_leave():
            return False
        route = partner.best(lane)
        if route is None:
            return self._write_forwarded(partner, lane, frame, only)
        if only not in (None, route.port):
            return False
        now_s = self._loop.time()
        if lane == BULK and not route.window.room(now_s):
            return False  # until the partner says what it has read
        if not route.write(joined(frame, FRAME)):
            return False
        if lane == BULK:
            route.window.send(size_of(frame), now_s)
        self._limit.spend(size_of(frame), now_s)
        partner.count("direct", sent=len(FRAME) + size_of(frame))
        return True

    def _write_forwarded(
        self, partner: Partner, lane: int, frame: Sendable, only: ZmqSocket | None
    ) -> bool:
        relay = self._detours.route(partner, lane)
        if relay is None or only not in (None, relay.port):
            return False
        if partner.best(CONTROL) or partner.tunnel is None:
            return False
        payload = partner.stuck[lane] or partner.tunnel.carry(
            lane, joined(frame), self._loop.time()
        )
        if payload is None:
            return False
        message = pack_forward(FORWARD, partner.peer, payload)
        if not relay.write(message):
            partner.stuck[lane] = payload  # keep it: sealing again would use another counter
            return False
        self._limit.spend(len(message), self._loop.time())
        partner.count("forwarded", sent=len(message))
        return True

    def drop_stale(self, partner: Partner, now_s: float) -> None:
        """Drop frames that have found no transport for `DEAD_S`."""
        if partner.road() != "none":
            partner.roadless_s = None
        elif partner.roadless_s is None:
            partner.roadless_s = now_s
        elif now_s - partner.roadless_s >= DEAD_S and partner.outbox:
            self._table.counters["no road"] += partner.forget_queue()
            self.flush(partner)

    def forget(self, partner: Partner) -> None:
        """Forget a dropped partner."""
        self._backlog.pop(partner.peer, None)
