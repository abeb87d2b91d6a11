"""Input from the sockets: connections to be proven, and frames of proven ones."""

import asyncio
from collections.abc import Callable

import zmq

from farflock.swarm.links import MAX_FRAME_BYTES, PeerId
from farflock.swarm.messages import MAX_RECORD_BYTES
from farflock.swarm.zmq.handshake import Handshakes
from farflock.swarm.zmq.message import (
    ASK_VOUCH,
    FORWARD,
    FORWARDED,
    FRAME,
    LIFE_BYTES,
    OBSERVE,
    OBSERVED,
    PING,
    PONG,
    RECORD,
    TAKEN,
    TOKEN_BYTES,
    TWIN,
    VOUCH,
)
from farflock.swarm.zmq.outbox import BULK, CONTROL, Inbox
from farflock.swarm.zmq.partner import CONFIRM_EVERY_BYTES, Partner, PartnerTable, Route
from farflock.swarm.zmq.rate_limit import RateLimit
from farflock.swarm.zmq.relay import Relays
from farflock.swarm.zmq.sending import Sender
from farflock.swarm.zmq.socket import ZmqSocket
from farflock.swarm.zmq.witness import Witness

CONFIRM_EVERY_S = 0.1  # of a limited downlink
COPIED_BYTES = 16 * 1024  # a view of a short frame would keep libzmq's whole buffer


class Receiver:
    """The `Events` of all sockets: passes them on, and takes frames from proven connections."""

    def __init__(
        self,
        table: PartnerTable,
        handshakes: Handshakes,
        sender: Sender,
        detours: Relays,
        limit: RateLimit,
    ) -> None:
        """`limit` is that of this peer's downlink: bulk is read only as fast, and what its partners
        may send ahead fills up."""
        self._limit = limit
        # A limited line is shared evenly, also within ten seconds, if partners are told soon.
        self._confirm_bytes = int(min(CONFIRM_EVERY_BYTES, CONFIRM_EVERY_S * limit.bytes_per_s))
        self._again: asyncio.TimerHandle | None = None  # once the limit lets more be read
        self.wake: Callable[[int], None] = lambda lane: None  # read the sockets of a lane again
        self.inbox = Inbox()
        self.on_twin: Callable[[], None] = lambda: None  # another life of this peer is in the run
        self._table, self._handshakes = table, handshakes
        self._sender, self._detours = sender, detours
        self._loop = asyncio.get_running_loop()
        self.witness: Witness  # set once there are sockets
        self._unconfirmed: dict[Route, None] = {}  # whose confirmation has found no room
        self._stopped = [False, False]  # lanes not read until the inbox is half empty

    def paused(self, lane: int) -> bool:
        """Return whether this lane is not read for now; TCP passes the back-pressure to senders."""
        if self.inbox.full(lane):
            self._stopped[lane] = True
        return self._stopped[lane] or (lane == BULK and not self._has_leave())

    def _has_leave(self) -> bool:
        """Return whether the limit lets a frame be read; else read again once it does."""
        wait_s = self._limit.wait_s(self._loop.time())
        if wait_s and self._again is None:
            self._again = self._loop.call_later(wait_s, self._go_on)
        return not wait_s

    def _go_on(self) -> None:
        self._again = None
        self.wake(BULK)

    def close(self) -> None:
        """Hand out no more frames, and read nothing by itself."""
        self.inbox.close()
        if self._again is not None:
            self._again.cancel()

    def resumes(self, lane: int) -> bool:
        """Return whether reading of this lane resumes now, so that its sockets must be woken."""
        if not self._stopped[lane] or not self.inbox.half_empty(lane):
            return False
        self._stopped[lane] = False
        return True

    def on_drop(self, reason: str) -> None:
        """Count a refusal."""
        self._table.counters[reason] += 1

    def on_up(self, port: ZmqSocket) -> None:
        """Greet: a CURVE handshake succeeded."""
        self._handshakes.introduce(port)

    def on_refused(self, port: ZmqSocket) -> None:
        """Redial later: the other end's ZAP handler refused us."""
        self._handshakes.refused(port)

    def on_down(self, port: ZmqSocket, descriptor: int, owner: PeerId) -> None:
        """Remove the route of a proven connection that ended."""
        self._handshakes.lost(port, descriptor, owner)

    def on_room(self, port: ZmqSocket) -> None:
        """Write greetings and queued frames: this socket may have room."""
        self._handshakes.introduce_again(port)
        for route in list(self._unconfirmed):
            if route.port is port or route.port.socket.closed:
                self._confirm(route)
        self._sender.flush_all(port)

    def on_frame(self, port: ZmqSocket, route: bytes | None, frame: zmq.Frame) -> None:
        """Take a message of a proven connection; on others, only a record that proves the owner."""
        proven = self._handshakes.proven(port, route, frame)
        body = frame.buffer
        self._limit.spend(len(body), self._loop.time())
        kind = bytes(body[:1])
        if proven is not None:
            if kind != RECORD:
                self._take(proven, kind, body[1:])
            return
        port.watch()
        if kind == RECORD and len(body) <= len(RECORD) + MAX_RECORD_BYTES:
            partner = self._handshakes.prove(port, route, frame)
            if partner is not None:
                self._sender.flush(partner)
        elif kind == TWIN and port.owner:
            if self._handshakes.twins.told(bytes(body[1:])):
                self.on_twin()
        elif (held := self._handshakes.twins.waiting(port, route)) is not None:
            if kind == FRAME and port.lane == BULK:
                held.window.received += len(body) - len(FRAME)  # passed over, and room again
        else:
            port.kick(int(frame.get(zmq.SRCFD)), "stranger: no record first")

    def _take(self, route: Route, kind: bytes, body: memoryview) -> None:
        partner = self._table.partners.get(route.owner)
        if partner is None:
            self._table.counters["frame of a dropped partner"] += 1
        elif kind == FRAME and len(body) > MAX_FRAME_BYTES:
            self._table.counters["frame too long"] += 1
        elif kind == FRAME:
            partner.count("direct", received=len(FRAME) + len(body))
            frame = bytes(body) if len(body) <= COPIED_BYTES else body
            self.inbox.put(route.port.lane, partner.peer, frame)
            if route.port.lane == BULK:
                route.window.received += len(body)
                self._confirm(route)
        elif kind == TAKEN and len(body) == TOKEN_BYTES:
            route.window.heard(int.from_bytes(body, "big"), self._loop.time())
            self._sender.flush(partner)
        elif kind == PING and len(body) == TOKEN_BYTES:
            route.write(PONG + bytes(body))
        elif kind == PONG and len(body) == TOKEN_BYTES:
            if route.port.lane == CONTROL and int.from_bytes(body, "big") == partner.pings:
                partner.rtt_s = self._loop.time() - partner.ping_s
        elif kind == FORWARD:
            self._detours.forward(partner, route.port.lane, body, self._loop.time())
        elif kind == FORWARDED:
            self._take_forwarded(partner, body)
        elif kind == ASK_VOUCH and len(body) == LIFE_BYTES:
            self._handshakes.twins.asked(partner, route, bytes(body), self._loop.time())
        elif kind == VOUCH:
            self._handshakes.twins.hear(route, bytes(body))
        elif kind == OBSERVE and route.port.lane == CONTROL:
            self.witness.answer(partner, route, body, self._loop.time())
        elif kind == OBSERVED and route.port.lane == CONTROL:
            self.witness.hear(partner, route, body)
        else:
            self._table.counters["not a message"] += 1

    def _confirm(self, route: Route) -> None:
        is_open = route.descriptor in route.port.connections
        if is_open and not route.confirm(self._confirm_bytes):
            self._unconfirmed[route] = None
        else:
            self._unconfirmed.pop(route, None)

    def _take_forwarded(self, relay: Partner, body: memoryview) -> None:
        taken = self._detours.take(relay, body, self._loop.time())
        if taken is None:
            return
        sender, data = taken
        if data:
            self.inbox.put(data[0], sender.peer, data[1])
        self._sender.flush(sender)  # there may now be a session, or room in its window
