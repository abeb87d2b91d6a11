"""The forwarded transport: sealed frames through a third peer that both ends are connected to.

Unlike libp2p's circuit relay it is available at once (no reservations), is metered, and carries the
same frames. The relay learns who talks to whom, when and how much, and can drop frames; the seal
defeats anything else. No I/O here: bytes and `now_s` in, bytes out.

To the relay: destination key (32) + payload. From the relay: the authenticated sender's key (32) +
payload. Payload: 0x01 + hello, or 0x02 + sealed frame (swarm/zmq/sealed.py). Inside the seal, after
one kind byte: a control frame; the end position in the stream of bulk bytes (8) and a bulk frame;
a ping or pong with a token (8); or the bulk position received so far (8).
"""

import math
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farflock.swarm.identity import Identity, peer_id, public_key
from farflock.swarm.links import MAX_FRAME_BYTES, PeerId
from farflock.swarm.zmq.outbox import BULK, CONTROL
from farflock.swarm.zmq.sealed import SEAL_BYTES, BadSeal, Sealed

WINDOW_BYTES = 2 * 1024 * 1024  # unconfirmed bulk bytes on their way
ACK_EVERY_BYTES = WINDOW_BYTES // 8
WINDOW_STALL_S = 2.0  # without news for this long, bytes on their way count as lost
HELLO_RETRY_S = 0.5
HELLO_GIVE_UP_S = 5.0
HELLOS_PER_S = 20.0  # each costs a signature check
PING_EVERY_S = 0.25
FORWARD_BYTES_PER_S = 32 * 1024 * 1024  # default for one sender
MAX_SENDERS = 1024  # whose allowance a relay remembers
MAX_FORWARD_BYTES = 32 + 1 + SEAL_BYTES + 1 + 8 + MAX_FRAME_BYTES

_public_key = lru_cache(MAX_SENDERS)(public_key)  # base58 in Python, for each frame
_peer_id = lru_cache(MAX_SENDERS)(peer_id)
_HELLO, _SEALED = b"\x01", b"\x02"
_CONTROL, _BULK, _PING, _PONG, _ACK = range(5)
_NUMBER = struct.Struct(">Q")


def pack_forward(kind: bytes, peer: PeerId, payload: bytes | memoryview) -> bytes:
    """Return a payload after its header: the message's kind, and the destination or sender."""
    return b"".join((kind, _public_key(peer), payload))


def unpack_forward(body: bytes | memoryview) -> tuple[PeerId, memoryview]:
    """Return the addressed peer and the payload; raise `BadSeal` for a wrong length."""
    if not 32 < len(body) <= MAX_FORWARD_BYTES:
        raise BadSeal(f"a forwarded frame has 33 to {MAX_FORWARD_BYTES} bytes, got {len(body)}")
    return _peer_id(bytes(body[:32])), memoryview(body)[32:]


def is_hello(payload: bytes | memoryview) -> bool:
    """Return whether this payload may begin a session."""
    return payload[:1] == _HELLO


@dataclass(slots=True)
class _Allowance:
    left: float
    at_s: float

    def refill(self, rate: float, burst: float, now_s: float) -> None:
        self.left = min(burst, self.left + rate * max(0.0, now_s - self.at_s))
        self.at_s = now_s


class Meter:
    """A relay's budget: a rate for each sender, four times that for all; bursts of 1 s."""

    def __init__(self, rate_per_s: float) -> None:
        self._rate = rate_per_s
        self._all = _Allowance(4 * rate_per_s, 0.0)
        self._senders: dict[PeerId, _Allowance] = {}

    def __len__(self) -> int:
        """Return the number of senders with a budget of their own."""
        return len(self._senders)

    def take(self, sender: PeerId, amount: float, now_s: float) -> bool:
        """Take `amount` from the budgets; if either has less, take nothing and return False."""
        mine = self._senders.pop(sender, None) or _Allowance(self._rate, now_s)
        self._senders[sender] = mine  # newest last: the least recent sender is forgotten first
        if len(self._senders) > MAX_SENDERS:
            del self._senders[next(iter(self._senders))]
        mine.refill(self._rate, self._rate, now_s)
        self._all.refill(4 * self._rate, 4 * self._rate, now_s)
        if amount > mine.left or amount > self._all.left:
            return False
        mine.left -= amount
        self._all.left -= amount
        return True


@dataclass(slots=True)
class CreditWindow:
    """End-to-end flow control of bulk bytes: the queues on the way stay short.

    Bytes without news for `stall_s` count as lost: a relay may drop them."""

    size_bytes: int = WINDOW_BYTES
    stall_s: float = WINDOW_STALL_S
    sent: int = 0
    acked: int = 0
    news_s: float = 0.0
    received: int = 0
    acknowledged: int = 0

    def room(self, now_s: float) -> bool:
        """Return whether a frame may go."""
        if self.sent - self.acked >= self.size_bytes and now_s - self.news_s >= self.stall_s:
            self.acked = self.sent
        return self.sent - self.acked < self.size_bytes

    def send(self, size: int, now_s: float) -> int:
        """Count a frame as sent; return its end position."""
        if self.sent == self.acked:
            self.news_s = now_s
        self.sent += size
        return self.sent

    def heard(self, position: int, now_s: float) -> None:
        """Record that the partner received everything up to `position`."""
        if self.acked < position <= self.sent:
            self.acked, self.news_s = position, now_s

    def due(self, min_bytes: int) -> int | None:
        """Return the position to confirm; None while fewer than `min_bytes` are due."""
        if self.received - self.acknowledged < min_bytes:
            return None
        self.acknowledged = self.received
        return self.received


@dataclass(eq=False, slots=True)
class _Session:
    seal: Sealed
    begun_s: float
    window: CreditWindow = field(default_factory=CreditWindow)
    confirmed: bool = False  # a frame of the partner was opened, so it has the keys


class Tunnel:
    """The forwarded transport to one partner: handshake, rekeying, pings and flow control.

    Payloads other than data collect in `outgoing`; the caller sends them after each call.
    """

    def __init__(
        self,
        identity: Identity,
        partner: PeerId,
        run: str,
        draw: Callable[[], X25519PrivateKey] = X25519PrivateKey.generate,
    ) -> None:
        """Make a tunnel; `draw` gives a new key for each session."""
        self.outgoing: deque[bytes] = deque(maxlen=16)
        self.heard_s: float | None = None
        self.rtt_s: float | None = None
        self._identity, self._partner, self._run, self._draw = identity, partner, run, draw
        self._pending: _Session | None = None
        self._current: _Session | None = None
        self._previous: _Session | None = None
        self._hello_s = -HELLO_RETRY_S
        self._ping_s = 0.0
        self._pings = 0
        self._hellos = Meter(HELLOS_PER_S)

    @property
    def confirmed(self) -> bool:
        """True once both sides hold keys, so that data can be sent."""
        return self._sender() is not None

    def over(self, now_s: float, silence_s: float) -> bool:
        """Return whether there is no session or attempt, or a session silent for too long."""
        if self.confirmed:
            return self.silence_s(now_s) > silence_s
        return self._current is None and self._pending is None

    def silence_s(self, now_s: float) -> float:
        """Return the seconds since the partner was last heard, infinite if it never was."""
        return math.inf if self.heard_s is None else now_s - self.heard_s

    def excuse(self, late_s: float) -> None:
        """Extend the partner's deadline by the time that our own loop was blocked."""
        if self.heard_s is not None:
            self.heard_s += late_s

    def _sender(self) -> _Session | None:
        """Return the session to seal with: the old one until the partner has the new keys."""
        for session in (self._current, self._previous):
            if session and session.confirmed:
                return session
        return None

    def knock(self, now_s: float) -> None:
        """Begin a handshake unless one is pending."""
        if self._pending is None:
            self._pending = self._fresh(now_s)
            self._say_hello(self._pending, now_s)

    def _fresh(self, now_s: float) -> _Session:
        seal = Sealed(self._identity, self._partner, self._run, self._draw())
        return _Session(seal, now_s)

    def _say_hello(self, session: _Session, now_s: float) -> None:
        self._hello_s = now_s
        self.outgoing.append(_HELLO + session.seal.hello())

    def tick(self, now_s: float) -> None:
        """Retry, give up, ping and confirm what is due; call about every `PING_EVERY_S`."""
        if self._pending and now_s - self._pending.begun_s > HELLO_GIVE_UP_S:
            self._pending = None
        if self._pending and now_s - self._hello_s >= HELLO_RETRY_S:
            self._say_hello(self._pending, now_s)
        self._retire(now_s)
        if self._current and now_s - self._ping_s >= PING_EVERY_S / 2:
            self._ping(self._current, now_s)
            self._confirm(self._current, 1)

    def _retire(self, now_s: float) -> None:
        """After a while drop the older of two sessions, or the newer if it was never used."""
        if self._current and now_s - self._current.begun_s > HELLO_GIVE_UP_S:
            if not self._current.confirmed:
                self._current = self._previous
            self._previous = None

    def _ping(self, session: _Session, now_s: float) -> None:
        self._ping_s = now_s
        self._pings += 1
        self._say(session, _PING, self._pings)

    def _say(self, session: _Session, kind: int, number: int) -> None:
        self.outgoing.append(
            _SEALED + session.seal.seal(bytes([kind]) + _NUMBER.pack(number), CONTROL)
        )

    def _confirm(self, session: _Session, min_bytes: int) -> None:
        position = session.window.due(min_bytes)
        if position is not None:
            self._say(session, _ACK, position)

    def carry(self, lane: int, frame: bytes, now_s: float) -> bytes | None:
        """Return a frame as a payload, or None without a session or, for bulk, without room."""
        session = self._sender()
        if session is None:
            return None
        if lane == CONTROL:
            return _SEALED + session.seal.seal(bytes([_CONTROL]) + frame, CONTROL)
        if not session.window.room(now_s):
            return None
        position = session.window.send(len(frame), now_s)
        return _SEALED + session.seal.seal(bytes([_BULK]) + _NUMBER.pack(position) + frame, BULK)

    def take(self, payload: bytes | memoryview, now_s: float) -> tuple[int, bytes] | None:
        """Take a payload sent in the partner's name; return the lane and data frame in it, or None.

        Raise `BadSeal` for anything that the partner did not make for this session.
        """
        if is_hello(payload):
            self._take_hello(bytes(payload[1:]), now_s)
            return None
        if payload[:1] != _SEALED:
            raise BadSeal(f"no payload begins with {bytes(payload[:1]).hex()}")
        session, lane, data = self._open(payload[1:])
        session.confirmed = True
        self.heard_s = now_s
        return self._take_inner(session, lane, data, now_s)

    def _open(self, sealed: bytes | memoryview) -> tuple[_Session, int, bytes]:
        error = BadSeal("a sealed frame without a session")
        for session in (self._current, self._previous):
            if session:
                try:
                    return session, *session.seal.open(sealed)
                except BadSeal as refused:
                    error = refused
        raise error

    def _take_hello(self, hello: bytes, now_s: float) -> None:
        if not self._hellos.take(self._partner, 1, now_s):
            raise BadSeal(f"more than {HELLOS_PER_S:.0f} hellos a second")
        if self._current and self._is_of(self._current, hello):
            if not self._current.confirmed:
                self._say_hello(self._current, now_s)  # our last hello was lost
                self._ping(self._current, now_s)
            return
        session = self._pending or self._fresh(now_s)
        heard = session.seal.theirs
        agreed = session.seal.meet(hello)  # raises before any state changes
        self._pending = None if agreed else session
        if not agreed or heard != session.seal.theirs:
            self._say_hello(session, now_s)
        if agreed:
            self._previous, self._current = self._sender(), session
            self._ping(session, now_s)

    def _is_of(self, session: _Session, hello: bytes) -> bool:
        """Return whether this hello belongs to the session that we have."""
        try:
            return session.seal.meet(hello)
        except BadSeal:
            return False

    def _take_inner(
        self, session: _Session, lane: int, data: bytes, now_s: float
    ) -> tuple[int, bytes] | None:
        kind = data[0] if data else -1
        if kind == _CONTROL and lane == CONTROL:
            return CONTROL, data[1:]
        if len(data) < 1 + _NUMBER.size:
            raise BadSeal(f"{len(data)} bytes inside a seal")
        (number,) = _NUMBER.unpack_from(data, 1)
        if kind == _BULK and lane == BULK:
            session.window.received = number
            self._confirm(session, ACK_EVERY_BYTES)
            return BULK, data[9:]
        if kind == _PING:
            self._say(session, _PONG, number)
        elif kind == _PONG:
            if number == self._pings:  # only the newest ping's time is kept
                self.rtt_s = now_s - self._ping_s
        elif kind == _ACK:
            session.window.heard(number, now_s)
        else:
            raise BadSeal(f"kind {kind} inside a seal of lane {lane}")
        return None
