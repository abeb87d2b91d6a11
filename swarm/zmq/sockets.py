"""The sockets of one peer's links: two ROUTERs that listen, two DEALERs for each dial."""

import errno
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import zmq
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from farflock.swarm.addresses import LinkAddress, bracketed, numeric
from farflock.swarm.links import PeerId
from farflock.swarm.record import Record
from farflock.swarm.zmq.guard import Guard
from farflock.swarm.zmq.outbox import LANES
from farflock.swarm.zmq.partner import Dial, PartnerTable
from farflock.swarm.zmq.socket import Events, ZmqContext, ZmqSocket, configure, zmq_endpoint
from farflock.swarm.zmq.zap import ZapHandler

if TYPE_CHECKING:
    from farflock.swarm.zmq.witness import DialBack

ANY_PORT_ATTEMPTS = 16  # for a port that is free at several hosts
MAX_SOCKETS = 8192  # per ZMQ context: more than the limits on dials and connections allow


def bound_port(socket: zmq.Socket[bytes], hosts: Sequence[str], port: int) -> int:
    """Bind a socket to one port of all hosts, and return the port: any that is free at each of them
    if `port` is 0. Raise `OSError` if there is none."""
    for attempt in range(ANY_PORT_ATTEMPTS):
        bound, number = [], port
        for name in hosts:
            endpoint = f"tcp://{bracketed(name)}:{number}"
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                may_try = not port and error.errno == errno.EADDRINUSE
                if not may_try or attempt == ANY_PORT_ATTEMPTS - 1:
                    reason = f"cannot listen on {endpoint}: {error}; choose another port"
                    raise OSError(error.errno, reason) from None
                break
            bound.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            number = int(bound[-1].rpartition(":")[2])
        else:
            return number
        for endpoint in bound:  # what the first host gave is taken at another one
            socket.unbind(endpoint)
    raise AssertionError("the last attempt returns or raises")


class Sockets:
    """Makes and closes the sockets, which report to `events`."""

    def __init__(
        self, table: PartnerTable, key: X25519PrivateKey, events: Events, silent_after_s: float
    ) -> None:
        self.routers: list[ZmqSocket] = []
        self._table, self._key, self._events = table, key, events
        self._silent_after_s = silent_after_s
        self._context: ZmqContext = zmq.Context()
        self._context.max_sockets = MAX_SOCKETS
        self.guard = Guard()
        self.probes: dict[DialBack, None] = {}  # dials back, which end soon
        self._zap = ZapHandler(self._context, table.gate, self._watch)

    def listen(
        self, address: str, also: Sequence[str], advertise: Sequence[str]
    ) -> tuple[LinkAddress, ...]:
        """Bind both ROUTERs, to the same ports of each further host; return the addresses to
        publish.

        Raise `OSError` if a port is taken, `ValueError` if the addresses could not be dialled.
        """
        host, _, wanted = address.removeprefix("tcp://").rpartition(":")
        if not advertise and numeric(host).is_unspecified:
            raise ValueError(
                f"{address} is not an address that others could dial; "
                "name those to publish in `advertise`"
            )
        control, bulk = (
            self._bind(lane, (host, *also), int(wanted) + lane if int(wanted) else 0)
            for lane in LANES
        )
        names = (str(numeric(name)) for name in advertise or (host,))
        return tuple(LinkAddress(name, control, bulk) for name in names)

    def _bind(self, lane: int, hosts: Sequence[str], port: int) -> int:
        """Make one ROUTER; return its TCP port, which is the same at all hosts."""
        router = ZmqSocket(self._context, lane, None, self._events, self.guard)
        self.routers.append(router)  # before it binds, so that `close` finds it if that fails
        configure(router.socket, lane, self._key, None, self._silent_after_s)
        return bound_port(router.socket, hosts, port)

    def dial(self, record: Record, now_s: float, first: int = 0) -> Dial:
        """Begin to connect to the owner of a record, at its pair of endpoints of this number."""
        return Dial(
            self._context,
            self._events,
            self.guard,
            self._key,
            record,
            self._silent_after_s,
            now_s,
            first,
        )

    def probe(self, probe: "DialBack", peer: PeerId, curve: bytes) -> None:
        """Begin to connect to a key at an address, to see whether it is there."""
        ports = []
        for lane, endpoint in zip(LANES, probe.address.endpoints, strict=True):
            port = ZmqSocket(self._context, lane, peer, probe, self.guard)
            ports.append(port)
            configure(port.socket, lane, self._key, curve, self._silent_after_s)
            port.socket.connect(zmq_endpoint(endpoint))
        probe.ports = tuple(ports)
        self.probes[probe] = None

    def end_probe(self, probe: "DialBack") -> None:
        """Close the sockets of a dial back."""
        del self.probes[probe]
        for port in probe.ports:
            port.close()

    def ports(self) -> Iterator[ZmqSocket]:
        """Yield every open socket."""
        yield from self.routers
        for probe in self.probes:
            yield from probe.ports
        for partner in self._table.partners.values():
            if partner.dial:
                yield from partner.dial.ports

    def _watch(self) -> None:
        """Let the guard know of every connection before any is admitted."""
        for router in self.routers:
            router.watch()

    def wake(self, lane: int) -> None:
        """Read the sockets of this lane again, in the loop's next turn."""
        for port in self.ports():
            if port.lane == lane:
                port.wake()

    def close(self) -> None:
        """Close everything; every dial must have been closed before."""
        for probe in list(self.probes):
            self.end_probe(probe)
        for router in self.routers:
            router.close()
        self.guard.close()
        self._zap.close()
        self._context.term()
