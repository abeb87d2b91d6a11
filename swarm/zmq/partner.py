"""State of one partner in the links: connections both ways, queue, liveness.

A connection counts no matter which side dialled it: a peer behind a NAT dials out, and the partner
answers on the same connection.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farflock.swarm.addresses import LinkAddress, numeric
from farflock.swarm.directory import MAX_RECORD_AGE_S
from farflock.swarm.links import Liveness, PeerId, Transport
from farflock.swarm.record import Record, newer
from farflock.swarm.zmq.forward import CreditWindow, Tunnel
from farflock.swarm.zmq.guard import Guard
from farflock.swarm.zmq.message import TAKEN, TOKEN_BYTES
from farflock.swarm.zmq.outbox import BULK, CONTROL, LANES, Outbox, Pool
from farflock.swarm.zmq.socket import Events, ZmqContext, ZmqSocket, configure, zmq_endpoint
from farflock.swarm.zmq.zap import Gate

MAX_KNOWN = 4096  # records in the address book
MAX_PARTNERS = 512
DEAD_S = 5.0
SILENT_SHARE = 0.9  # of the time until a partner is suspect; the rest is for noticing
# Of bulk frames on one connection that the partner has not yet read; TCP itself never pushes back,
# as libzmq reads without a limit. At 100 Mbit/s it is full after 0.67 s.
DIRECT_WINDOW_BYTES = 8 * 1024 * 1024
CONFIRM_EVERY_BYTES = DIRECT_WINDOW_BYTES // 16
WANTED_S = 60.0  # a partner not asked for in this time is not redialled
# A slower dial has failed: try the next endpoint, and forward meanwhile.
DIAL_S = 3.0
MAX_DIAL_S = 15.0
REDIAL_S = 0.5  # after a refusal, doubling
MAX_REDIAL_S = 8.0
# Of an address at which several peers are said to be, or a peer whose record has expired.
REST_S = 1.0
MAX_REST_S = 15.0
MAX_RESTS = 4096


class Rests:
    """The rest of each address after dials that failed, over all records that name it."""

    def __init__(self) -> None:
        self._failures: dict[str, tuple[int, float]] = {}  # in a row, and when it is due again

    def is_due(self, endpoint: str, now_s: float) -> bool:
        """Return whether the address may be dialled again."""
        return now_s >= self._failures.get(endpoint, (0, 0.0))[1]

    def failed(self, endpoint: str, now_s: float) -> None:
        """Let an address rest, after each failure for twice as long."""
        count = self._failures.pop(endpoint, (0, 0.0))[0]
        self._failures[endpoint] = count + 1, now_s + min(REST_S * 2 ** min(count, 10), MAX_REST_S)
        if len(self._failures) > MAX_RESTS:
            del self._failures[next(iter(self._failures))]

    def worked(self, endpoint: str) -> None:
        """Forget the failures of an address."""
        self._failures.pop(endpoint, None)


def endpoint_pairs(record: Record) -> list[tuple[str, str]]:
    """Return a record's ZMQ endpoints as (control, bulk) pairs, without kinds unknown here."""
    pairs = []
    for control, bulk in zip(record.endpoints[::2], record.endpoints[1::2], strict=False):
        try:
            pairs.append((zmq_endpoint(control), zmq_endpoint(bulk)))
        except ValueError:
            continue
    return pairs


@dataclass(eq=False, slots=True)
class Route:
    """A connection with a proven owner; `address` is a ROUTER's routing id, None on a DEALER."""

    port: ZmqSocket
    address: bytes | None
    descriptor: int
    owner: PeerId
    key: str  # the CURVE key in hex, as libzmq reports it with each frame
    seen: str = "0.0.0.0"  # the address that it comes from; unspecified: unknown
    life: int = 0  # of the owner: its incarnation, by the first frame
    gone_s: float | None = None
    # TCP loses nothing, so bytes without news are still unread; control frames are not counted
    window: CreditWindow = field(
        default_factory=lambda: CreditWindow(DIRECT_WINDOW_BYTES, stall_s=math.inf)
    )

    def confirm(self, every_bytes: int = CONFIRM_EVERY_BYTES) -> bool:
        """Tell the partner how many of its bulk bytes we have read, if it is time.

        Return False if that finds no room: call it again."""
        window = self.window
        if window.received - window.acknowledged < every_bytes:
            return True
        if not self.write(TAKEN + window.received.to_bytes(TOKEN_BYTES, "big")):
            return False
        window.acknowledged = window.received
        return True

    def write(self, payload: bytes) -> bool:
        """Send a message; return False if there is no room."""
        return self.port.write(self.address, payload)

    def kick(self, reason: str) -> None:
        """Cut this connection off."""
        self.port.kick(self.descriptor, reason)


@dataclass(slots=True)
class Traffic:
    """Bytes of frames on one transport, headers of the links included."""

    sent: int = 0
    received: int = 0


class Dial:
    """Our own two connections to a partner; pairs of endpoints are tried in turn."""

    def __init__(
        self,
        context: ZmqContext,
        events: Events,
        guard: Guard,
        key: X25519PrivateKey,
        record: Record,
        silent_after_s: float,
        now_s: float,
        first: int = 0,
    ) -> None:
        self.record = record
        self.down_s: float | None = now_s  # since when control is not connected
        self.ungreeted: set[int] = set()  # connected lanes that have not sent our record
        self._pairs = endpoint_pairs(record)
        self._index = first
        self._tries = 0
        self._refusals = 0
        self._next_s = now_s + DIAL_S
        self.ports = tuple(ZmqSocket(context, lane, record.peer, events, guard) for lane in LANES)
        for port in self.ports:
            configure(port.socket, port.lane, key, record.curve, silent_after_s)
            port.socket.connect(self._pairs[first][port.lane])

    @property
    def address(self) -> LinkAddress:
        """The address that is dialled now."""
        control, bulk = (endpoint.rpartition(":") for endpoint in self._pairs[self._index])
        host = str(numeric(control[0].removeprefix("tcp://")))
        return LinkAddress(host, int(control[2]), int(bulk[2]))

    def outdated(self, record: Record) -> bool:
        """Return whether the partner has moved away from an endpoint that does not connect."""
        there = (self.record.endpoints, self.record.curve)
        return self.down_s is not None and there != (record.endpoints, record.curve)

    def failed(self, now_s: float) -> bool:
        """Return whether control has been down for longer than a dial may take."""
        return self.down_s is not None and now_s - self.down_s >= DIAL_S

    def refused(self, now_s: float) -> None:
        """Schedule a redial with backoff: libzmq does not reconnect after a refusal by ZAP."""
        self._next_s = now_s + min(REDIAL_S * 2**self._refusals, MAX_REDIAL_S)
        self._refusals = min(self._refusals + 1, 10)

    def connected(self) -> None:
        """Reset the retries: the control connection is proven."""
        self.down_s, self._tries, self._refusals = None, 0, 0

    def lost(self, now_s: float) -> None:
        """Note that control went down; for now libzmq redials by itself."""
        self.down_s, self._next_s = now_s, now_s + DIAL_S

    @property
    def endpoint(self) -> str:
        """The control endpoint that is dialled now."""
        return self._pairs[self._index][CONTROL]

    def is_over(self, now_s: float) -> bool:
        """Return whether the time for this pair of endpoints has passed without a connection."""
        return self.down_s is not None and now_s >= self._next_s

    def next(self, now_s: float, is_allowed: Callable[[str], bool]) -> None:
        """Try the next pair of endpoints whose control endpoint is allowed; the same again if no
        other is."""
        old, count = self._pairs[self._index], len(self._pairs)
        ahead = [(self._index + step) % count for step in range(1, count)]
        allowed = (number for number in ahead if is_allowed(self._pairs[number][CONTROL]))
        self._index = next(allowed, self._index)
        self._tries = min(self._tries + 1, 10)
        self._next_s = now_s + min(DIAL_S * 1.5**self._tries, MAX_DIAL_S)
        for port in self.ports:
            port.socket.disconnect(old[port.lane])
            port.socket.connect(self._pairs[self._index][port.lane])

    def close(self) -> None:
        """Close both connections."""
        for port in self.ports:
            port.close()


@dataclass(slots=True)
class Looks:
    """Times of the next question and the next answer about addresses (swarm/zmq/witness.py),
    whether this peer waits for an answer, and the time of the next vouch (swarm/zmq/twins.py)."""

    ask_s: float = 0.0
    answer_s: float = 0.0
    waits: bool = False
    vouch_s: float = -math.inf


@dataclass(eq=False, slots=True)
class Partner:
    """One peer that we have, had or want a connection with."""

    peer: PeerId
    outbox: Outbox
    wanted_s: float = -math.inf  # when this node last asked for it
    tried_s: float = -math.inf  # when it was last dialled where others are looked for too
    record: Record | None = None
    routes: tuple[list[Route], list[Route]] = field(default_factory=lambda: ([], []))
    dial: Dial | None = None
    tunnel: Tunnel | None = None
    via: PeerId | None = None  # the relay in use
    via_s: float = 0.0  # when we began to try it
    # By lane, the sealed first frame that found no room.
    stuck: list[bytes | None] = field(default_factory=lambda: [None, None])
    lost_s: float | None = None  # when the last control connection went down
    roadless_s: float | None = None  # since when there has been no transport at all
    traffic: dict[Transport, Traffic] = field(default_factory=dict)
    relayed_bytes: int = 0  # forwarded for it by this node
    rtt_s: float | None = None
    pings: int = 0
    ping_s: float = 0.0
    next_ping_s: float = 0.0
    looks: Looks = field(default_factory=Looks)

    def wanted(self, now_s: float) -> bool:
        """Return whether this node asked for the peer within `WANTED_S`."""
        return now_s - self.wanted_s < WANTED_S

    @property
    def is_settled(self) -> bool:
        """True if both connections are there, and nothing waits."""
        control, bulk = self.routes
        is_dialling = self.dial is not None and self.dial.down_s is not None
        return bool(control and bulk) and not (is_dialling or self.tunnel or self.outbox)

    def seeks(self, endpoint: str, now_s: float) -> bool:
        """Return whether this node looks for the peer, in vain, at an address among others."""
        if self.record is None or self.best(CONTROL) or not self.wanted(now_s):
            return False
        return any(control == endpoint for control, _ in endpoint_pairs(self.record))

    def best(self, lane: int) -> Route | None:
        """Return the newest connection of this lane, or None."""
        return self.routes[lane][-1] if self.routes[lane] else None

    def road(self) -> Transport:
        """Return the transport that the next control frame takes."""
        if self.best(CONTROL):
            return "direct"
        return "forwarded" if self.tunnel and self.tunnel.confirmed else "none"

    def life(self, now_s: float, suspect_after_s: float) -> Liveness:
        """Judge liveness by connections when direct, by sealed pings when forwarded."""
        if self.best(CONTROL):
            return "alive"
        heard_s = self.tunnel.heard_s if self.tunnel else None
        if heard_s is not None and now_s - heard_s < SILENT_SHARE * suspect_after_s:
            return "alive"
        known = [moment for moment in (heard_s, self.lost_s) if moment is not None]
        if not known:
            return "unknown"
        return "suspect" if now_s - max(known) < DEAD_S else "dead"

    def count(self, road: Transport, sent: int = 0, received: int = 0) -> None:
        """Add to the traffic of a transport."""
        traffic = self.traffic.setdefault(road, Traffic())
        traffic.sent += sent
        traffic.received += received

    def hang_up(self, now_s: float) -> None:
        """End our own dial; connections that the partner made stay."""
        if self.dial is None:
            return
        had = self.best(CONTROL)
        for lane, port in enumerate(self.dial.ports):
            self.routes[lane][:] = [route for route in self.routes[lane] if route.port is not port]
        if had and not self.best(CONTROL):
            self.lost_s = now_s
        self.dial.close()
        self.dial = None

    def forget_queue(self) -> int:
        """Drop all waiting frames and return their number."""
        self.stuck = [None, None]
        return self.outbox.clear()


class PartnerTable:
    """The address book and the partners. `counters` counts refusals and drops by reason."""

    def __init__(self, me: PeerId, gate: Gate) -> None:
        self.me, self.gate = me, gate
        self.counters: Counter[str] = Counter()
        self.pool = Pool()
        self.known: dict[PeerId, tuple[Record, float]] = {}  # record, and its expiry on our clock
        self.partners: dict[PeerId, Partner] = {}
        self.past = Traffic()  # with former partners

    def note(self, record: Record, now_s: float, over: Dial | None = None) -> bool:
        """Keep a verified record, which came `over` this dial if it did; return False if it is
        refused or not newer."""
        peer = record.peer
        known = self.known.get(peer)
        if (
            peer == self.me
            or peer in self.gate.refused
            or not newer(record, known[0] if known else None)
        ):
            return False
        if known is None and len(self.known) >= MAX_KNOWN:
            self._forget_expired(now_s)
        if known is None and len(self.known) >= MAX_KNOWN:
            self.counters["address book full"] += 1
            return False
        self.known[peer] = (record, now_s + record.lifetime_s)
        partner = self.partners.get(peer)
        if partner:
            partner.record = record
            # a dial that has brought the record leads to its owner, whatever it began with
            if partner.dial and partner.dial is not over and partner.dial.outdated(record):
                partner.hang_up(now_s)
        return True

    def begin(self, peer: PeerId, now_s: float) -> Partner | None:
        """Make a partner of a peer that contacted us; None if it is refused or there is no room.

        A full table drops the partner wanted longest ago, but never one that is still wanted:
        identities are free, so strangers may displace only strangers.
        """
        if peer in self.gate.refused:
            return None
        if len(self.partners) >= MAX_PARTNERS:
            oldest = min(self.partners.values(), key=lambda partner: partner.wanted_s)
            self.counters["too many partners"] += 1
            if oldest.wanted(now_s):
                return None
            self.drop(oldest, now_s)
        partner = self.partners[peer] = Partner(peer, Outbox(self.pool))
        partner.record = self.record(peer, now_s)
        return partner

    def drop(self, partner: Partner, now_s: float) -> None:
        """Cut a partner's connections, clear its queue and remove it."""
        for route in [*partner.routes[CONTROL], *partner.routes[BULK]]:
            route.kick("dropped partner")
        partner.hang_up(now_s)
        dropped = partner.forget_queue()
        if dropped:
            self.counters["dropped with partner"] += dropped
        if self.partners.pop(partner.peer, None) is not None:
            for traffic in partner.traffic.values():
                self.past.sent += traffic.sent
                self.past.received += traffic.received

    def want(self, peer: PeerId, now_s: float) -> Partner | None:
        """Return the partner to be reached, marked as wanted; None if nothing is known of it."""
        partner = self.partners.get(peer)
        if partner is None and self.record(peer, now_s):
            partner = self.begin(peer, now_s)
        if partner:
            partner.wanted_s = now_s
        return partner

    def record(self, peer: PeerId, now_s: float) -> Record | None:
        """Return the peer's newest record unless it has expired."""
        record, until_s = self.known.get(peer, (None, 0.0))
        return record if now_s < until_s else None

    def excuse(self, seconds: float) -> None:
        """Let time in which this process did not run, as in a machine that slept, age nothing."""
        self.known = {
            peer: (record, until_s + seconds) for peer, (record, until_s) in self.known.items()
        }
        for partner in self.partners.values():
            partner.wanted_s += seconds

    def forget_old(self, now_s: float) -> None:
        """Forget records that expired so long ago that no older one can come back."""
        self._forget_expired(now_s - MAX_RECORD_AGE_S)

    def _forget_expired(self, now_s: float) -> None:
        """Forget records that had expired by then; they keep older ones from coming back, until
        room is needed."""
        for peer, (_record, until_s) in list(self.known.items()):
            if now_s >= until_s:
                del self.known[peer]
