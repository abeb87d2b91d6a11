"""Admission of connections: ZAP (RFC 27) for every CURVE handshake, then the first frame.

The handshake proves that the other end holds a CURVE key, not whose it is, and a stranger's record
may not have arrived yet. So every key that is not banned is admitted, and its first frame must be
the signed record that names the key: only both together bind the connection to an identity.
"""

import asyncio
from collections.abc import Callable, Iterable

import zmq

from farflock.swarm.links import PeerId
from farflock.swarm.record import BadRecord, Record, unseal

MAX_BANNED_KEYS = 4096
_REQUEST_FRAMES = 7  # version, request id, domain, address, routing id, mechanism, CURVE key


class Gate:
    """The table behind ZAP: refused identities and banned keys. Knows no socket."""

    def __init__(self, run: str, me: PeerId, refuse: Iterable[PeerId] = ()) -> None:
        self._run = run
        self._me = me
        self.refused = set(refuse)
        self._banned: dict[bytes, None] = {}  # ordered set: the oldest leaves first

    @property
    def banned(self) -> tuple[bytes, ...]:
        """The refused CURVE keys, oldest first."""
        return tuple(self._banned)

    def admits(self, key: bytes) -> bool:
        """Return whether a connection with this CURVE key may go on to its first frame."""
        return len(key) == 32 and key not in self._banned

    def prove(self, key: bytes, blob: bytes) -> Record:
        """Return the record in a first frame; `BadRecord` unless it binds `key` to its signer."""
        record = unseal(blob, self._run)
        if record.curve != key:
            raise BadRecord(
                f"the record of {record.peer} names another CURVE key than the connection uses"
            )
        if record.peer in self.refused:
            self.ban(key)
            raise BadRecord(f"{record.peer} is refused here")
        if record.peer == self._me:
            raise BadRecord(
                "a connection by this peer's own identity; use each key file for one peer only"
            )
        return record

    def ban(self, key: bytes) -> None:
        """Refuse this CURVE key from its next handshake on."""
        self._banned[key] = None
        while len(self._banned) > MAX_BANNED_KEYS:
            del self._banned[next(iter(self._banned))]


class ZapHandler:
    """Answers one context's ZAP requests; the User-Id that it sets is the CURVE key in hex.

    `watch` is called before an answer: an admitted connection may send at once."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], gate: Gate, watch: Callable[[], None]
    ) -> None:
        self._gate, self._watch = gate, watch
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind("inproc://zeromq.zap.01")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._answer)

    def _answer(self) -> None:
        while True:
            try:
                request = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._watch()
            self._socket.send_multipart(self._reply(request))

    def _reply(self, request: list[bytes]) -> list[bytes]:
        """Return 200 or 400. After a 400 libzmq never retries, so the dialler must redial."""
        curve = len(request) == _REQUEST_FRAMES and request[5] == b"CURVE"
        key = request[6] if curve else b""
        if curve and self._gate.admits(key):
            return [b"1.0", request[1], b"200", b"", key.hex().encode(), b""]
        return [b"1.0", request[1] if len(request) > 1 else b"", b"400", b"not admitted", b"", b""]

    def close(self) -> None:
        """Leave the loop and close the socket."""
        self._loop.remove_reader(self._socket)
        self._socket.close()
