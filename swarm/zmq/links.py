"""Links over TCP: CURVE-encrypted ZMQ, or sealed frames through a third peer.

Each listening peer has two ROUTERs, one for control and one for bulk; each dial makes one DEALER
of each kind (`sockets`). A connection counts once its first frame has proved its owner
(`handshake`). Frames leave through `sending` and arrive through `receiving`; `upkeep` dials, pings
and gives up. The wire format is in `message`.
"""

import asyncio
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from farflock.swarm.addresses import MAX_PUBLISHED, LinkAddress
from farflock.swarm.contact import Contact
from farflock.swarm.identity import Identity
from farflock.swarm.links import MAX_FRAME_BYTES, Liveness, PeerId, Sendable, Transport, size_of
from farflock.swarm.record import MAX_DOORS, BadRecord, Record, seal, unseal
from farflock.swarm.zmq.forward import FORWARD_BYTES_PER_S, MAX_FORWARD_BYTES
from farflock.swarm.zmq.handshake import Handshakes
from farflock.swarm.zmq.message import RECORD
from farflock.swarm.zmq.outbox import BULK, CONTROL
from farflock.swarm.zmq.partner import SILENT_SHARE, Partner, PartnerTable, Traffic
from farflock.swarm.zmq.pulse import Pulse
from farflock.swarm.zmq.rate_limit import RateLimit
from farflock.swarm.zmq.receiving import Receiver
from farflock.swarm.zmq.relay import Relays
from farflock.swarm.zmq.sending import Sender
from farflock.swarm.zmq.socket import HEARTBEAT_S
from farflock.swarm.zmq.sockets import Sockets
from farflock.swarm.zmq.twins import OwnLife
from farflock.swarm.zmq.upkeep import Upkeep
from farflock.swarm.zmq.zap import Gate

UNSIGNED = -1  # the sequence number in place of a record: any signed one is newer
MIN_SUSPECT_AFTER_S = 2 * HEARTBEAT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """Options of `ZmqLinks`; raise `ValueError` for a forwarding rate below one frame, and for a
    time until silence counts that ends before the next heartbeat can be late."""

    incarnation: int
    sequence: int = 0  # no less than this identity has ever published
    # Control is bound here, bulk on the next port (any two for port 0); None: only dial.
    listen: str | None = "tcp://127.0.0.1:0"
    also: Sequence[str] = ()  # further numeric hosts to listen on, at the same ports
    advertise: Sequence[str] = ()  # numeric hosts to publish instead of the one in `listen`
    doors: Sequence[str] = ()  # my directory's addresses, published in my record
    relay: bool = True  # forward for others
    refuse: Collection[PeerId] = ()  # a block list
    # Of silence, at least `MIN_SUSPECT_AFTER_S`; use 2 to 3 s above 200 ms round trip.
    suspect_after_s: float = 0.85
    forward_bytes_per_s: float = FORWARD_BYTES_PER_S  # per peer; four times that in total
    up_bytes_per_s: float = math.inf  # on the line, headers included
    down_bytes_per_s: float = math.inf
    # Called when another life of this peer is in the run, and has signed that it is.
    on_twin: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        if self.suspect_after_s < MIN_SUSPECT_AFTER_S:
            raise ValueError(
                f"partners are heard every {HEARTBEAT_S} s, so silence says nothing before "
                f"{MIN_SUSPECT_AFTER_S} s, got suspect_after_s={self.suspect_after_s}; pass more"
            )
        if self.relay and self.forward_bytes_per_s < MAX_FORWARD_BYTES:
            raise ValueError(
                f"forwarding needs at least {MAX_FORWARD_BYTES} bytes a second, one frame, "
                f"got {self.forward_bytes_per_s}; pass relay=False to forward nothing"
            )


class ZmqLinks:
    """`Links` over real sockets, made with `open`; call it only from the running loop's thread."""

    def __init__(self, identity: Identity, run: str, options: LinkOptions) -> None:
        """See `open`."""
        self._identity, self._run, self._suspect_after_s = identity, run, options.suspect_after_s
        silent_after_s = SILENT_SHARE * options.suspect_after_s
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self.listens: tuple[LinkAddress, ...] = ()  # where it was told to; none: it only dials
        key = identity.session_key()
        self._table = table = PartnerTable(identity.peer, Gate(run, identity.peer, options.refuse))
        up, down = RateLimit(options.up_bytes_per_s), RateLimit(options.down_bytes_per_s)
        self._detours = Relays(identity, run, table, options.relay, options.forward_bytes_per_s, up)
        self._handshakes = Handshakes(table, OwnLife(identity, run, options.incarnation))
        self._sender = sender = Sender(table, self._detours, up)
        self.queued_bytes = sender.queued_bytes
        self._receiver = Receiver(table, self._handshakes, self._sender, self._detours, down)
        self._receiver.on_twin = options.on_twin
        self._sockets = Sockets(table, key, self._receiver, silent_after_s)
        self._receiver.wake = self._sockets.wake
        try:
            listen, curve = options.listen, key.public_key().public_bytes_raw()
            if listen:
                self.listens = self._sockets.listen(listen, options.also, options.advertise)
            self._record = Record(
                run,
                identity.peer,
                options.incarnation,
                options.sequence,
                curve,
                _endpoints(self.listens),
                doors=tuple(options.doors[:MAX_DOORS]),
            )
            self._handshakes.greeting = RECORD + seal(identity, self._record)
        except BaseException:
            self._shut()
            raise
        pulse = Pulse(self._sockets, silent_after_s)
        self._upkeep = Upkeep(
            table, self._sockets, self._handshakes, self._sender, self._detours, pulse
        )
        self.witness = self._receiver.witness = self._upkeep.witness
        if self.listens:
            self.witness.ports = self.listens[0].control, self.listens[0].bulk

    @classmethod
    async def open(cls, identity: Identity, run: str, options: LinkOptions) -> "ZmqLinks":
        """Bind the sockets and start the links.

        Raise `OSError` if the port is taken and `ValueError` if it cannot be dialled."""
        return cls(identity, run, options)

    @property
    def me(self) -> PeerId:
        return self._table.me

    def record(
        self,
        *,
        role: str | None = None,
        speed: float | None = None,
        relays: Iterable[PeerId] | None = None,
        doors: Sequence[str] | None = None,
        addresses: Sequence[LinkAddress] | None = None,
    ) -> bytes:
        """Return my record, signed with the next sequence number and updated by the arguments."""
        self._record = msgspec.structs.replace(
            self._record,
            sequence=self._record.sequence + 1,
            role=self._record.role if role is None else role,
            speed=self._record.speed if speed is None else speed,
            relays=self._record.relays if relays is None else tuple(relays),
            doors=self._record.doors if doors is None else tuple(doors[:MAX_DOORS]),
            endpoints=self._record.endpoints if addresses is None else _endpoints(addresses),
        )
        if addresses is not None:
            self.witness.own = tuple(addresses)
        self._detours.relays = self._record.relays
        blob = seal(self._identity, self._record)
        self._handshakes.greeting = RECORD + blob
        return blob

    @property
    def table(self) -> PartnerTable:
        """The peers known and connected."""
        return self._table

    @property
    def sockets(self) -> Sockets:
        """The open sockets, and the connections to them."""
        return self._sockets

    @property
    def detours(self) -> Relays:
        """The routes through other peers, and this peer's service as a relay."""
        return self._detours

    @property
    def waiting(self) -> int:
        """The number of peers with queued frames."""
        return self._sender.waiting

    @property
    def counters(self) -> Counter[str]:
        """Counts of dropped frames and refused connections, by reason."""
        return self._table.counters

    def learn(self, record: bytes) -> bool:
        """Take in a peer's signed record; return False if it is refused or not newer."""
        try:
            return self._table.note(unseal(record, self._run), self._loop.time())
        except BadRecord:
            self.counters["bad record"] += 1
            return False

    def expect(self, contact: Contact, *others: Contact) -> None:
        """Make a peer reachable whose record is not here yet, at one address or at `others` too:
        the first frame on each connection to it will be that record."""
        places = [each.endpoints for each in (contact, *others)][:MAX_PUBLISHED]
        endpoints = tuple(itertools.chain.from_iterable(places))
        record = Record(self._run, contact.peer, 0, UNSIGNED, contact.curve, endpoints)
        self._table.note(record, self._loop.time())

    def send(self, peer: PeerId, frame: bytes) -> bool:
        partner = self._reach(peer, frame)
        return partner is not None and self._sender.put(partner, frame)

    async def send_bulk(self, peer: PeerId, frame: Sendable, timeout_s: float) -> bool:
        partner = self._reach(peer, frame)
        return partner is not None and await self._sender.put_bulk(partner, frame, timeout_s)

    def _reach(self, peer: PeerId, frame: Sendable) -> Partner | None:
        """Return the partner to queue a frame for; None if no transport to it can be hoped for."""
        if size_of(frame) > MAX_FRAME_BYTES:
            raise ValueError(
                f"a frame has at most {MAX_FRAME_BYTES} bytes, got {size_of(frame)}; cut it"
            )
        now_s = self._loop.time()
        known = peer in self._table.partners
        partner = None if self._closed else self._table.want(peer, now_s)
        if partner and not known:
            self._upkeep.tend(partner, now_s)  # dial at once
        if (
            partner
            and partner.road() == "none"
            and partner.life(now_s, self._suspect_after_s) == "dead"
        ):
            partner = None
        if partner is None:
            self.counters["no road"] += 1
        return partner

    async def receive(self) -> tuple[PeerId, bytes | memoryview]:
        """Return the next sender and frame; raise `ConnectionError` once closed."""
        lane, peer, frame = await self._receiver.inbox.get()
        if self._receiver.resumes(lane):
            self._sockets.wake(lane)
        return peer, frame

    def life(self, peer: PeerId) -> Liveness:
        partner = self._asked(peer)
        return partner.life(self._loop.time(), self._suspect_after_s) if partner else "unknown"

    def road(self, peer: PeerId) -> Transport:
        partner = self._asked(peer)
        return partner.road() if partner else "none"

    def rtt_s(self, peer: PeerId) -> float | None:
        partner = self._asked(peer)
        if partner is None:
            return None
        if partner.road() == "forwarded" and partner.tunnel:
            return partner.tunnel.rtt_s
        return partner.rtt_s

    def _asked(self, peer: PeerId) -> Partner | None:
        """Return the partner, if any, and keep it wanted; a question alone never makes us dial."""
        partner = self._table.partners.get(peer)
        if partner:
            partner.wanted_s = self._loop.time()
        return partner

    def traffic(self, peer: PeerId) -> Mapping[Transport, Traffic]:
        """Return the bytes to and from this peer by transport, since it became a partner."""
        partner = self._table.partners.get(peer)
        return dict(partner.traffic) if partner else {}

    def total_bytes(self) -> tuple[int, int]:
        """Return the bytes sent and received so far, over all peers and transports."""
        roads = [
            road for partner in self._table.partners.values() for road in partner.traffic.values()
        ]
        roads.append(self._table.past)
        return sum(road.sent for road in roads), sum(road.received for road in roads)

    def relayed_bytes(self, peer: PeerId) -> int:
        """Return the bytes forwarded here on behalf of this peer."""
        partner = self._table.partners.get(peer)
        return partner.relayed_bytes if partner else 0

    def refuse(self, peer: PeerId) -> None:
        """Cut this peer's connections, and refuse its frames and records from now on."""
        self._table.gate.refused.add(peer)
        self._table.known.pop(peer, None)
        partner = self._table.partners.get(peer)
        if partner:
            for route in [*partner.routes[CONTROL], *partner.routes[BULK]]:
                self._table.gate.ban(bytes.fromhex(route.key))
            self._upkeep.drop(partner, self._loop.time())

    async def close(self) -> None:
        """Close every socket, timer and thread and drop queued frames; idempotent."""
        if not self._closed:
            self._upkeep.cancel()
            for partner in list(self._table.partners.values()):
                self._upkeep.drop(partner, self._loop.time())
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        self._receiver.close()
        self._sender.close()
        self._sockets.close()


def _endpoints(addresses: Sequence[LinkAddress]) -> tuple[str, ...]:
    """Return the endpoints of a record: those of each address in turn."""
    return tuple(itertools.chain.from_iterable(each.endpoints for each in addresses))
