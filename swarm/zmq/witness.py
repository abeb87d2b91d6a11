"""Addresses as partners see them of each other: one asks, the other looks, and dials back.

A peer asks over each partner's connection. If the partner has dialled it, that is the answer: this
address leads to this key. Else the partner takes the address from which the connection comes, dials
the asker's ports there, and counts it only if CURVE's handshake proves the asker's key (the idea is
AutoNAT's, of libp2p: nobody can send it to a third address). Bytes, numbers big endian:

- observe: the asker's ports for control and for bulk (2 each)
- observed: the IPv4 or IPv6 address (4 or 16), and the ports at which it was dialled (2 each)
"""

import ipaddress
import struct
from collections.abc import Callable

import zmq

from farflock.swarm.addresses import AddressScope, LinkAddress, is_elsewhere, numeric, scope_of
from farflock.swarm.links import PeerId
from farflock.swarm.zmq.message import OBSERVE, OBSERVED
from farflock.swarm.zmq.outbox import CONTROL
from farflock.swarm.zmq.partner import DIAL_S, Partner, PartnerTable, Route
from farflock.swarm.zmq.socket import ZmqSocket
from farflock.swarm.zmq.sockets import Sockets

ASK_EVERY_S = 300.0
ANSWER_EVERY_S = 30.0  # to one peer
MAX_PROBES = 4  # at once; further questions are dropped, and repeated by who asked
WORTH = (
    AddressScope.EVERYWHERE
)  # where an address is worth a look: narrower ones are known to their owner

_PORTS = struct.Struct(">HH")


class DialBack:
    """A dial back to a key: the `Events` of its two sockets, which only prove their other end."""

    def __init__(self, route: Route, address: LinkAddress, until_s: float) -> None:
        self.route, self.address, self.until_s = route, address, until_s
        self.proven: set[int] = set()  # lanes
        self.ports: tuple[ZmqSocket, ...] = ()

    def on_up(self, port: ZmqSocket) -> None:
        self.proven.add(port.lane)

    def on_frame(self, port: ZmqSocket, route: bytes | None, frame: zmq.Frame) -> None: ...

    def on_down(self, port: ZmqSocket, descriptor: int, owner: PeerId) -> None: ...

    def on_refused(self, port: ZmqSocket) -> None: ...

    def on_room(self, port: ZmqSocket) -> None: ...

    def on_drop(self, reason: str) -> None: ...

    def paused(self, lane: int) -> bool:
        return False


class Witness:
    """Asks partners, answers theirs, and tells `confirmed` which address of ours was dialled."""

    def __init__(self, table: PartnerTable, sockets: Sockets) -> None:
        self.confirmed: Callable[[LinkAddress, PeerId], None] = lambda address, by: None
        self.own: tuple[LinkAddress, ...] = ()  # that this peer publishes; none: it only dials out
        self.ports: tuple[int, int] | None = None  # where it listens
        self._table, self._sockets = table, sockets

    def ask(self, partner: Partner, now_s: float) -> None:
        """Ask a connected partner, if it is time."""
        route = partner.best(CONTROL)
        if self.ports and route is not None and now_s >= partner.looks.ask_s:
            partner.looks.ask_s, partner.looks.waits = now_s + ASK_EVERY_S, True
            route.write(OBSERVE + _PORTS.pack(*self.ports))

    def answer(self, partner: Partner, route: Route, body: memoryview, now_s: float) -> None:
        """Say at which address this partner was dialled, or dial it where it seems to be."""
        if len(body) != _PORTS.size:
            self._table.counters["question about an address"] += 1
            return
        if now_s < partner.looks.answer_s:
            return
        partner.looks.answer_s = now_s + ANSWER_EVERY_S
        dial, record, ports = partner.dial, partner.record, _PORTS.unpack(body)
        if route.address is None and dial is not None:
            if scope_of(dial.address.host) >= WORTH:
                tell(route, dial.address)
            return
        has_room = len(self._sockets.probes) < MAX_PROBES and 0 not in ports
        if has_room and record is not None and scope_of(route.seen) >= WORTH:
            probe = DialBack(route, LinkAddress(str(numeric(route.seen)), *ports), now_s + DIAL_S)
            self._sockets.probe(probe, partner.peer, record.curve)

    def hear(self, partner: Partner, route: Route, body: memoryview) -> None:
        """Take a partner's answer, one for each question: it counts if the partner is of another
        network."""
        waits, partner.looks.waits = partner.looks.waits, False
        if not waits:
            self._table.counters["answer that nobody has asked for"] += 1
            return
        try:
            host = str(numeric(str(ipaddress.ip_address(bytes(body[: -_PORTS.size])))))
            address = LinkAddress(host, *_PORTS.unpack(body[-_PORTS.size :]))
        except (ValueError, struct.error):
            self._table.counters["answer about an address"] += 1
            return
        if scope_of(host) < WORTH:
            return
        dial = partner.dial
        theirs = dial.address.host if route.address is None and dial is not None else route.seen
        known = address in self.own  # by this partner's own dial, whatever is between the two
        likely = (address.control, address.bulk) == self.ports and scope_of(theirs) >= WORTH
        if is_elsewhere(theirs, host) and (known or likely):
            self.confirmed(address, partner.peer)

    def tick(self, now_s: float) -> None:
        """End the dials back that have come through, or have had their time."""
        for probe in list(self._sockets.probes):
            is_proven = len(probe.proven) == len(probe.ports)
            if is_proven or now_s >= probe.until_s:
                self._sockets.end_probe(probe)
            if is_proven:
                tell(probe.route, probe.address)


def tell(route: Route, address: LinkAddress) -> None:
    """Answer over the connection that the question came on, if it is still there."""
    if route.descriptor in route.port.connections:
        packed = numeric(address.host).packed + _PORTS.pack(address.control, address.bulk)
        route.write(OBSERVED + packed)
