"""What the links hold of one partner: its connections and ours, its queue, how alive it is.

A connection counts whoever dialled it: a peer behind a NAT dials out, and is answered on that same connection.
"""

import math
from collections import Counter
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farflock.swarm.links import Liveness, PeerId, Transport
from farflock.swarm.record import Record, newer
from farflock.swarm.zmq.forward import Tunnel
from farflock.swarm.zmq.outbox import BULK, CONTROL, LANES, Outbox, Pool
from farflock.swarm.zmq.socket import Events, ZmqContext, ZmqSocket, configure, zmq_endpoint
from farflock.swarm.zmq.zap import Gate

MAX_KNOWN = 4096  # records in the address book
MAX_PARTNERS = 512
DEAD_S = 5.0
WANTED_S = 60.0  # a partner whom nobody has asked for is not dialled again
DIAL_S = 3.0  # a dial that takes longer has failed: the next endpoint, and the forwarded road meanwhile
MAX_DIAL_S = 15.0
REDIAL_S = 0.5  # after a refusal, doubling
MAX_REDIAL_S = 8.0


def endpoint_pairs(record: Record) -> list[tuple[str, str]]:
    """The ZMQ endpoints of a record: its addresses come in twos, first for control, then for bulk. What cannot be
    read is left out: a newer build may know other kinds."""
    pairs = []
    for control, bulk in zip(record.endpoints[::2], record.endpoints[1::2], strict=False):
        try:
            pairs.append((zmq_endpoint(control), zmq_endpoint(bulk)))
        except ValueError:
            continue
    return pairs


@dataclass(eq=False, slots=True)
class Route:
    """A connection whose owner is proven: `address` is a ROUTER's routing id, None on a DEALER."""

    port: ZmqSocket
    address: bytes | None
    descriptor: int
    owner: PeerId
    key: str  # the CURVE key in hex, as libzmq reports it with each frame
    gone_s: float | None = None

    def write(self, payload: bytes) -> bool:
        """Hand a message over; False if there is no room."""
        return self.port.write(self.address, payload)

    def kick(self, reason: str) -> None:
        """Cut it off."""
        self.port.kick(self.descriptor, reason)


@dataclass(slots=True)
class Traffic:
    """Bytes of frames on one road, headers of the links included."""

    sent: int = 0
    received: int = 0


class Dial:
    """Our own two connections to a partner; its endpoints are tried one pair after another."""

    def __init__(
        self,
        context: ZmqContext,
        events: Events,
        key: X25519PrivateKey,
        record: Record,
        suspect_after_s: float,
        now_s: float,
    ) -> None:
        self.record = record
        self.down_s: float | None = now_s  # since when control is not connected
        self.ungreeted: set[int] = set()  # lanes that are connected and have not sent our record
        self._pairs = endpoint_pairs(record)
        self._index = 0
        self._tries = 0
        self._refusals = 0
        self._next_s = now_s + DIAL_S
        self.ports = tuple(ZmqSocket(context, lane, record.peer, events) for lane in LANES)
        for port in self.ports:
            configure(port.socket, port.lane, key, record.curve, suspect_after_s)
            port.socket.connect(self._pairs[0][port.lane])

    def outdated(self, record: Record) -> bool:
        """Whether the partner has moved away from where we try in vain."""
        there = (self.record.endpoints, self.record.curve)
        return self.down_s is not None and there != (record.endpoints, record.curve)

    def failed(self, now_s: float) -> bool:
        """Whether control has not been connected for as long as a dial may take."""
        return self.down_s is not None and now_s - self.down_s >= DIAL_S

    def refused(self, now_s: float) -> None:
        """ZAP said no, and libzmq gave up: dial again, later each time."""
        self._next_s = now_s + min(REDIAL_S * 2**self._refusals, MAX_REDIAL_S)
        self._refusals = min(self._refusals + 1, 10)

    def connected(self) -> None:
        """Control is proven."""
        self.down_s, self._tries, self._refusals = None, 0, 0

    def lost(self, now_s: float) -> None:
        """Control went down; libzmq dials again by itself for the time being."""
        self.down_s, self._next_s = now_s, now_s + DIAL_S

    def tend(self, now_s: float) -> None:
        """Try the next pair of endpoints when it is time."""
        if self.down_s is None or now_s < self._next_s:
            return
        old, self._index = self._pairs[self._index], (self._index + 1) % len(self._pairs)
        self._tries = min(self._tries + 1, 10)
        self._next_s = now_s + min(DIAL_S * 1.5**self._tries, MAX_DIAL_S)
        for port in self.ports:
            port.socket.disconnect(old[port.lane])
            port.socket.connect(self._pairs[self._index][port.lane])

    def close(self) -> None:
        """Hang up."""
        for port in self.ports:
            port.close()


@dataclass(eq=False, slots=True)
class Partner:
    """One peer with whom we have, had or want a connection."""

    peer: PeerId
    outbox: Outbox
    wanted_s: float = -math.inf  # when somebody here last asked for it
    record: Record | None = None
    routes: tuple[list[Route], list[Route]] = field(default_factory=lambda: ([], []))
    dial: Dial | None = None
    tunnel: Tunnel | None = None
    via: PeerId | None = None  # the relay in use
    via_s: float = 0.0  # since when it is tried
    stuck: list[bytes | None] = field(default_factory=lambda: [None, None])  # sealed heads of the queue
    lost_s: float | None = None  # when the last control connection went down
    roadless_s: float | None = None  # since when there has been no road at all
    traffic: dict[Transport, Traffic] = field(default_factory=dict)
    relayed_bytes: int = 0  # what we forwarded for it
    rtt_s: float | None = None
    pings: int = 0
    ping_s: float = 0.0
    next_ping_s: float = 0.0

    def wanted(self, now_s: float) -> bool:
        """Whether somebody here asked for it lately."""
        return now_s - self.wanted_s < WANTED_S

    def best(self, lane: int) -> Route | None:
        """The newest connection of this class."""
        return self.routes[lane][-1] if self.routes[lane] else None

    def road(self) -> Transport:
        """Which road the next control frame takes."""
        if self.best(CONTROL):
            return "direct"
        return "forwarded" if self.tunnel and self.tunnel.confirmed else "none"

    def life(self, now_s: float, suspect_after_s: float) -> Liveness:
        """Judged by connections on the direct road, by sealed pings on the forwarded one."""
        if self.best(CONTROL):
            return "alive"
        heard_s = self.tunnel.heard_s if self.tunnel else None
        if heard_s is not None and now_s - heard_s < 0.9 * suspect_after_s:
            return "alive"
        known = [moment for moment in (heard_s, self.lost_s) if moment is not None]
        if not known:
            return "unknown"
        return "suspect" if now_s - max(known) < DEAD_S else "dead"

    def count(self, road: Transport, sent: int = 0, received: int = 0) -> None:
        """Add to the traffic of a road."""
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
        """Drop what waits; how many frames it was."""
        self.stuck = [None, None]
        return self.outbox.clear()


class PartnerTable:
    """The address book and the partners. `counters` counts by reason what was refused or dropped."""

    def __init__(self, me: PeerId, gate: Gate) -> None:
        self.me, self.gate = me, gate
        self.counters: Counter[str] = Counter()
        self.pool = Pool()
        self.known: dict[PeerId, tuple[Record, float]] = {}  # record, and until when on our clock
        self.partners: dict[PeerId, Partner] = {}
        self.past = Traffic()  # with partners that are none any more

    def note(self, record: Record, now_s: float) -> bool:
        """Keep a verified record; False if it is refused or not newer."""
        peer = record.peer
        known = self.known.get(peer)
        if peer == self.me or peer in self.gate.refused or not newer(record, known[0] if known else None):
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
            if partner.dial and partner.dial.outdated(record):
                partner.hang_up(now_s)
        return True

    def begin(self, peer: PeerId, now_s: float) -> Partner | None:
        """Make a partner of a peer that was heard, though nobody here has asked for it; None if there is no room.

        The one that was asked for longest ago makes room, unless it is still wanted: identities cost nothing, so
        strangers may displace strangers only.
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
        """Have done with a partner: cut its connections, forget its queue."""
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
        """The partner to be reached; None if nothing is known of it."""
        partner = self.partners.get(peer)
        if partner is None and self.record(peer, now_s):
            partner = self.begin(peer, now_s)
        if partner:
            partner.wanted_s = now_s
        return partner

    def record(self, peer: PeerId, now_s: float) -> Record | None:
        """The peer's newest record, while it lives."""
        record, until_s = self.known.get(peer, (None, 0.0))
        return record if now_s < until_s else None

    def _forget_expired(self, now_s: float) -> None:
        """Only when room is needed: until then an expired record keeps older ones from coming back."""
        for peer, (_record, until_s) in list(self.known.items()):
            if now_s >= until_s:
                del self.known[peer]
