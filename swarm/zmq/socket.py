"""One ZMQ socket on the running asyncio loop: frames and connection events in their true order.

Raw sockets with a reader on their descriptor make sending a plain call that never waits. ZMQ's
limits count messages, and a message of many parts passes them (measured: 190 MiB through a receive
mark of 4 messages of 0.3 MB, all unread). So libzmq reads without a limit, and the limit is ours:
each TCP connection is watched through a duplicate of its descriptor, the kernel's byte counter is
compared with what was read, and a sender too far ahead is cut off (Linux; other systems give no
such counter). `guard` does the same while the loop is blocked.
"""

import asyncio
import errno
import ipaddress
import re
import struct
from typing import Protocol

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from zmq.utils import z85

from farflock.swarm.links import PeerId
from farflock.swarm.zmq.connection import TELLS_SILENCE, Connection
from farflock.swarm.zmq.forward import MAX_FORWARD_BYTES
from farflock.swarm.zmq.guard import Guard
from farflock.swarm.zmq.outbox import BULK

MAX_WIRE_BYTES = 1 + MAX_FORWARD_BYTES  # kind byte and the longest body
SEND_MARKS = (16, 16)  # messages in libzmq for one connection: control, bulk
# None: at a mark libzmq stops reading, and if the connection ends meanwhile, the next heartbeat, of
# ours or of the partner, aborts the process (decision 024).
RECEIVE_MARK = 0
# The side that dialled asks, on control only; the other side hears it ask (`pulse`).
HEARTBEAT_S = 0.35
BULK_TIMEOUT_S = 3.4  # of sent bytes without TCP's receipt: a full queue in a home router takes 2
MAX_CONNECTIONS = 128  # per lane; each takes two descriptors
MAX_STRANGERS = 32  # connections whose first frame has not arrived
BATCH = 64  # frames read before others get their turn

_MULTIADDRESS = re.compile(r"/ip(4|6)/([0-9a-fA-F.:]{2,45})/tcp/([0-9]{1,5})")
_POLLIN = int(zmq.POLLIN)  # an operation on the enum takes longer than the look at the socket
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

ZmqContext = zmq.Context[zmq.Socket[bytes]]


def zmq_endpoint(multiaddress: str) -> str:
    """Convert a multiaddress `/ip4/A/tcp/P` or `/ip6/A/tcp/P`; raise `ValueError` for any other."""
    match = _MULTIADDRESS.fullmatch(multiaddress)
    if match is None or not 0 < int(match[3]) < 65536:
        raise ValueError(f"{multiaddress[:128]!r} is not of the form /ip4/A/tcp/P or /ip6/A/tcp/P")
    if match[1] == "4":
        return f"tcp://{ipaddress.IPv4Address(match[2])}:{match[3]}"
    return f"tcp://[{ipaddress.IPv6Address(match[2])}]:{match[3]}"


def configure(
    zmq_socket: zmq.Socket[bytes],
    lane: int,
    key: X25519PrivateKey,
    server: bytes | None,
    silent_after_s: float,
) -> None:
    """Set a socket's options before it binds (`server` None) or dials `server`, a CURVE key.

    Heartbeats come from libzmq's own thread, so a held GIL raises no false alarm. Without an answer
    for `silent_after_s`, libzmq closes the connection.
    """
    zmq_socket.linger = 0
    zmq_socket.ipv6 = True
    zmq_socket.immediate = True
    zmq_socket.sndhwm, zmq_socket.rcvhwm = SEND_MARKS[lane], RECEIVE_MARK
    zmq_socket.maxmsgsize = MAX_WIRE_BYTES
    if lane == BULK:
        zmq_socket.tcp_maxrt = int(BULK_TIMEOUT_S * 1000)
    elif server is not None or not TELLS_SILENCE:
        zmq_socket.heartbeat_ivl = int(HEARTBEAT_S * 1000)
        zmq_socket.heartbeat_timeout = int((silent_after_s - HEARTBEAT_S) * 1000)
    zmq_socket.handshake_ivl = 2000
    zmq_socket.reconnect_ivl = 100
    zmq_socket.reconnect_ivl_max = 2000
    zmq_socket.curve_secretkey = z85.encode(key.private_bytes_raw())
    if server is None:
        zmq_socket.router_mandatory = True
        zmq_socket.curve_server = True
    else:
        zmq_socket.curve_publickey = z85.encode(key.public_key().public_bytes_raw())
        zmq_socket.curve_serverkey = z85.encode(server)


class Events(Protocol):
    """Events that a socket reports to its owner."""

    def on_frame(self, port: "ZmqSocket", route: bytes | None, frame: zmq.Frame) -> None: ...

    def on_up(self, port: "ZmqSocket") -> None: ...

    def on_down(self, port: "ZmqSocket", descriptor: int, owner: PeerId) -> None: ...

    def on_refused(self, port: "ZmqSocket") -> None: ...

    def on_room(self, port: "ZmqSocket") -> None: ...

    def on_drop(self, reason: str) -> None: ...

    def paused(self, lane: int) -> bool: ...


class ZmqSocket:
    """A ROUTER that listens (`owner` None) or a DEALER that dials `owner`, for one lane."""

    def __init__(
        self,
        context: ZmqContext,
        lane: int,
        owner: PeerId | None,
        events: Events,
        guard: Guard,
    ) -> None:
        self.lane = lane
        self.owner = owner
        self.connections: dict[int, Connection] = {}
        self._events, self._guard = events, guard
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._pumping = False
        self.socket = context.socket(zmq.ROUTER if owner is None else zmq.DEALER)
        self._monitor = self.socket.get_monitor_socket(_EVENTS)
        self._loop.add_reader(self.socket, self.pump)
        self._loop.add_reader(self._monitor, self.pump)

    def write(self, route: bytes | None, payload: bytes) -> bool:
        """Hand one message to libzmq; return False if it has no room or the connection is gone."""
        try:
            if route is None:
                self.socket.send(payload, zmq.NOBLOCK)
            else:
                self.socket.send_multipart([route, payload], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        finally:
            if not self._pumping:
                self.wake()  # sending consumes the wake-up of messages that arrived
        return True

    def wake(self) -> None:
        """Pump again in the next iteration of the loop."""
        if self._again is None and not self.socket.closed:
            self._again = self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Read up to a batch of messages, and offer room to write."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._pumping = True
        try:
            if not self.socket.closed and int(self._monitor.get(zmq.EVENTS)) & _POLLIN:
                self.watch()
            for _ in range(BATCH):
                if not self._readable():
                    break
                self._read()
            self._events.on_room(self)
        finally:
            self._pumping = False
        if self._readable():
            self.wake()

    def _readable(self) -> bool:
        if self.socket.closed:
            return False
        events = int(self.socket.get(zmq.EVENTS))  # first: this also clears the wake-up
        return bool(events & _POLLIN) and not self._events.paused(self.lane)

    def _read(self) -> None:
        """Read one message.

        Whoever acts on its descriptor calls `watch` first: the descriptor may be in use again."""
        try:
            route = None if self.owner else self.socket.recv(zmq.NOBLOCK)
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return
        if frame.more:
            self._refuse_multipart(frame)
            return
        descriptor = frame.get(zmq.SRCFD)
        if descriptor not in self.connections:
            self.watch()
        connection = self.connections.get(descriptor)
        if connection:
            connection.read(len(frame.buffer), self._loop.time())
        self._events.on_frame(self, route, frame)

    def _refuse_multipart(self, frame: zmq.Frame) -> None:
        """Discard a message of several parts, one part at a time, and cut its sender off."""
        descriptor = frame.get(zmq.SRCFD)
        while frame.more:
            frame = self.socket.recv(zmq.NOBLOCK, copy=False)
        self.watch()
        self.kick(descriptor, "several parts")

    def kick(self, descriptor: int, reason: str) -> None:
        """Cut a connection off if it still exists."""
        connection = self.connections.get(descriptor)
        if connection and not connection.kicked:
            self._events.on_drop(reason)
            connection.kick()

    def watch(self) -> None:
        """Process the monitor's events."""
        while not self.socket.closed:
            try:
                head, _endpoint = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            event, value = struct.unpack("=HI", head)
            if event in (zmq.EVENT_ACCEPTED, zmq.EVENT_CONNECTED):
                self._begin(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._end(value)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._events.on_up(self)
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._events.on_refused(self)

    def _begin(self, descriptor: int) -> None:
        self._end(descriptor)
        try:
            connection = Connection(descriptor, self.lane, self._loop.time())
        except OSError:
            return  # gone before we looked
        self.connections[descriptor] = connection
        self._guard.watch(connection)

    def _end(self, descriptor: int) -> None:
        connection = self.connections.pop(descriptor, None)
        if connection:
            self._guard.forget(connection)
            if connection.guarded:
                self._events.on_drop("flood while this node was busy")
            if connection.owner:
                self._events.on_down(self, descriptor, connection.owner)

    def tick(self, now_s: float, late: bool) -> None:
        """Cut off connections that break a limit; a late tick excuses silence, which was ours."""
        self.pump()
        caught_up = not self.socket.closed and not self._events.paused(self.lane)
        caught_up = caught_up and not self._readable()
        for descriptor, connection in list(self.connections.items()):
            if late or self._events.paused(self.lane):
                connection.excuse(now_s)
            fault = connection.fault(now_s, caught_up)
            if fault:
                self.kick(descriptor, fault)
        strangers = [fd for fd, connection in self.connections.items() if connection.owner is None]
        crowd = max(len(strangers) - MAX_STRANGERS, len(self.connections) - MAX_CONNECTIONS)
        # The oldest go first: an honest first frame takes two round trips.
        for descriptor in strangers[: max(0, crowd)]:
            self.kick(descriptor, "stranger: too many")

    def close(self) -> None:
        """Leave the loop; close the sockets and the duplicate descriptors."""
        if self._again is not None:
            self._again.cancel()
        for watched in (self.socket, self._monitor):
            self._loop.remove_reader(watched)
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(0)
        for connection in self.connections.values():
            self._guard.forget(connection)
        self.connections.clear()
