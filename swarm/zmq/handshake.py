"""Authentication of connections by their first frame.

The first frame on every connection, both ways, is the sender's signed record. It binds the CURVE
key that the handshake proved to an identity, and only that identity is reported as the sender.
"""

import asyncio

import zmq

from farflock.swarm.addresses import numeric
from farflock.swarm.record import BadRecord
from farflock.swarm.zmq.message import RECORD
from farflock.swarm.zmq.outbox import CONTROL
from farflock.swarm.zmq.partner import Dial, Partner, PartnerTable, Route
from farflock.swarm.zmq.socket import ZmqSocket
from farflock.swarm.zmq.twins import OwnLife, Twins

MAX_ROUTES_PER_PEER = 2  # accepted per traffic class from one identity
GONE_S = 1.0  # how long frames of a closed connection are still accepted


class Handshakes:
    """Introduces us on every connection; turns connections with a proven owner into routes."""

    def __init__(self, table: PartnerTable, own: OwnLife) -> None:
        self.greeting = b""  # the first message on each connection: our signed record
        self.twins = Twins(table, own)
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._inbound: dict[tuple[int, bytes], Route] = {}  # by traffic class and routing id

    def introduce(self, port: ZmqSocket) -> None:
        """Send our record first on a new connection that we dialled."""
        dial = self._dial(port)
        if dial and not port.write(None, self.greeting):
            dial.ungreeted.add(port.lane)

    def introduce_again(self, port: ZmqSocket) -> None:
        """Retry a greeting that did not fit before."""
        dial = self._dial(port)
        if dial and port.lane in dial.ungreeted and port.write(None, self.greeting):
            dial.ungreeted.discard(port.lane)

    def refused(self, port: ZmqSocket) -> None:
        """Redial later: the other end's ZAP handler refused us."""
        self._table.counters["refused by partner"] += 1
        dial = self._dial(port)
        if dial:
            dial.refused(self._loop.time())

    def proven(self, port: ZmqSocket, address: bytes | None, frame: zmq.Frame) -> Route | None:
        """Return a frame's route, even if it has closed; None if its owner is not proven."""
        if address is not None:
            known = self._inbound.get((port.lane, address))
            return known if known and known.key == frame.get("User-Id") else None
        partner = self._table.partners.get(port.owner or "")
        for known in partner.routes[port.lane] if partner else ():
            if known.port is port:
                return known
        return None

    def prove(self, port: ZmqSocket, address: bytes | None, frame: zmq.Frame) -> Partner | None:
        """Check a connection's first record, answer with ours; return its owner or cut it off."""
        descriptor = int(frame.get(zmq.SRCFD))
        dial = self._dial(port)
        key = dial.record.curve if dial else bytes.fromhex(str(frame.get("User-Id")))
        try:
            record = self._table.gate.prove(key, bytes(frame.buffer[len(RECORD) :]))
        except BadRecord:
            port.kick(descriptor, "stranger: bad record")
            return None
        if port.owner and record.peer != port.owner:
            port.kick(descriptor, "stranger: another peer than dialled")
            return None
        now_s = self._loop.time()
        self._table.note(record, now_s, dial)
        partner = self._table.partners.get(record.peer) or self._table.begin(record.peer, now_s)
        if partner is None or descriptor not in port.connections:
            port.kick(descriptor, "too many partners")
            return None
        partner.record = partner.record or record
        life = record.incarnation
        seen = _address(frame)
        route = Route(port, address, descriptor, record.peer, key.hex(), seen, life)
        if self.twins.holds_back(partner, route, now_s):
            return None
        self._join(partner, route)
        return partner

    def end_waits(self, now_s: float) -> list[Partner]:
        """Put connections to use that waited for another life of their owner to answer; return
        their owners."""
        partners = []
        for route in self.twins.tick(now_s):
            if (partner := self._table.partners.get(route.owner)) is not None:
                self._join(partner, route)
                partners.append(partner)
        return partners

    def _join(self, partner: Partner, route: Route) -> None:
        """Put a proven connection to use."""
        lane = route.port.lane
        route.port.connections[route.descriptor].owner = partner.peer
        if route.address is not None:
            accepted = [known for known in partner.routes[lane] if known.address is not None]
            for old in accepted[: max(0, len(accepted) + 1 - MAX_ROUTES_PER_PEER)]:
                old.kick("too many connections of one peer")
            self._inbound[lane, route.address] = route
            route.write(self.greeting)
        elif partner.dial and lane == CONTROL:
            partner.dial.connected()
        partner.routes[lane].append(route)
        partner.next_ping_s = 0.0

    def lost(self, port: ZmqSocket, descriptor: int, owner: str) -> None:
        """Remove the route of a proven connection that ended."""
        partner = self._table.partners.get(owner)
        if partner is None:
            return
        now_s = self._loop.time()
        had = partner.best(CONTROL)
        routes = partner.routes[port.lane]
        for route in [route for route in routes if route.descriptor == descriptor]:
            if route.port is port:
                routes.remove(route)
        if had and not partner.best(CONTROL):
            partner.lost_s = now_s
        if partner.dial and port is partner.dial.ports[CONTROL]:
            partner.dial.lost(now_s)

    def forget_closed(self, now_s: float) -> None:
        """Forget accepted connections that closed `GONE_S` ago: their last frames have arrived."""
        for address, route in list(self._inbound.items()):
            owner = self._table.partners.get(route.owner)
            if owner and route in owner.routes[route.port.lane]:
                continue
            route.gone_s = now_s if route.gone_s is None else route.gone_s
            if now_s - route.gone_s > GONE_S:
                del self._inbound[address]

    def _dial(self, port: ZmqSocket) -> Dial | None:
        """Return the dial that a socket belongs to; None for a listening socket."""
        partner = self._table.partners.get(port.owner) if port.owner else None
        return partner.dial if partner else None


def _address(frame: zmq.Frame) -> str:
    """Return the address from which a frame comes, as far as libzmq knows it."""
    try:
        return str(numeric(str(frame.get("Peer-Address"))))
    except (ValueError, zmq.ZMQError):
        return "0.0.0.0"
