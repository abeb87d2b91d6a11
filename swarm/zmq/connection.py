"""One TCP connection under a ZMQ socket, watched through a duplicate of its descriptor."""

import contextlib
import os
import socket
import struct
import sys

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_RECORD_BYTES

STRANGER_S = 5.0
STRANGER_WIRE_BYTES = 2 * MAX_RECORD_BYTES  # first frame, CURVE handshake and framing
# Control and bulk, taken by libzmq and not read by us; a correct partner keeps bulk below its
# window of `partner.DIRECT_WINDOW_BYTES`.
UNREAD_BYTES = (8 * 1024 * 1024, 24 * 1024 * 1024)
SILENT_S = 30.0  # every live partner pings every connection every 10 s
TELLS_SILENCE = sys.platform.startswith("linux")  # whether the kernel knows when bytes came last

# Linux's struct tcp_info
_LAST_DATA_RECEIVED_AT = 52  # tcpi_last_data_recv, milliseconds
_BYTES_RECEIVED_AT = 128  # tcpi_bytes_received
_SEALED_BYTES = 8 + 8 + 16 + 1  # what CURVE adds to a message: name, nonce, tag and flags
_SHORT_BODY_BYTES = 255  # ZMTP writes the length of a longer one in 8 bytes, else in one


def wire_bytes(message_bytes: int) -> int:
    """Return the bytes of a message on the wire, with CURVE's and ZMTP's headers."""
    body_bytes = message_bytes + _SEALED_BYTES
    return body_bytes + (2 if body_bytes <= _SHORT_BODY_BYTES else 9)


class Connection:
    """A TCP connection under a ZMQ socket; `owner` is the identity that its first frame proved.

    `unread` and `kick` may be called from `guard`'s thread, the rest from the loop's alone."""

    def __init__(self, descriptor: int, lane: int, now_s: float) -> None:
        self.owner: PeerId | None = None
        self.kicked = False
        self.guarded = False  # cut off by the guard
        self.limit_bytes = UNREAD_BYTES[lane]
        self._handle = socket.socket(fileno=os.dup(descriptor))
        self._begun_s = self._read_s = now_s
        self.backlog_bytes = 0  # taken by libzmq and not read, at the last tick
        self._taken_bytes = self._read_bytes = 0

    def read(self, size_bytes: int, now_s: float) -> None:
        """Count a whole message as read."""
        self._read_s = now_s
        self._read_bytes += wire_bytes(size_bytes)

    def excuse(self, now_s: float) -> None:
        """Restart the silence timer: we did not read."""
        self._read_s = now_s

    def unread(self) -> int:
        """Return about how many bytes libzmq has taken since the message that was read last."""
        with contextlib.suppress(OSError):
            unseen = self.taken() - self._taken_bytes
            return max(0, self.backlog_bytes + unseen - self._read_bytes)
        return 0

    def fault(self, now_s: float, caught_up: bool) -> str | None:
        """Return why this connection must be cut off, or None; call it every tick.

        `caught_up`: its socket has no message left. Heartbeats are never read, so they would add up
        to a backlog; a message that was read ends it, unless others wait behind it."""
        taken = self.taken()
        before = 0 if self._read_bytes and caught_up else self.backlog_bytes
        self.backlog_bytes = max(0, before + taken - self._taken_bytes - self._read_bytes)
        self._taken_bytes, self._read_bytes = taken, 0
        if self.owner is None:
            if now_s - self._begun_s > STRANGER_S:
                return "stranger: no record in time"
            return "stranger: too many bytes" if taken > STRANGER_WIRE_BYTES else None
        if self.backlog_bytes > self.limit_bytes:
            return "endless message"
        return "silent" if now_s - self._read_s > SILENT_S else None

    def taken(self) -> int:
        """Return the bytes libzmq took from the kernel so far, with ciphertext and framing."""
        if not sys.platform.startswith("linux"):
            return 0
        info = self._handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED_AT + 8)
        if len(info) < _BYTES_RECEIVED_AT + 8:
            return 0
        import fcntl  # late: every system can import this module
        import termios

        waiting = struct.unpack("i", fcntl.ioctl(self._handle, termios.FIONREAD, bytes(4)))[0]
        return int(struct.unpack_from("=Q", info, _BYTES_RECEIVED_AT)[0]) - int(waiting)

    def silence_s(self) -> float:
        """Return the seconds since bytes came last, read or not; 0 if the kernel does not tell."""
        if TELLS_SILENCE:
            with contextlib.suppress(OSError, struct.error):
                end = _LAST_DATA_RECEIVED_AT + 4
                info = self._handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, end)
                return float(struct.unpack_from("=I", info, _LAST_DATA_RECEIVED_AT)[0]) / 1000
        return 0.0

    def kick(self) -> None:
        """Shut the connection down; ZAP acts only at the handshake, so there is no other way."""
        self.kicked = True
        with contextlib.suppress(OSError):
            self._handle.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the duplicate descriptor."""
        self._handle.close()
