"""Links over TCP: CURVE-encrypted ZMQ between peers that can dial each other, sealed frames through a third if not.

Each peer that listens has two ROUTERs, one for control and one for bulk; each dial makes one DEALER of each kind. The
first frame on every connection, both ways, is the sender's signed record; it binds the CURVE key that the handshake
proved to an identity, and only that identity is ever given as the sender.

Message (always a single part): one kind byte, then: 1 record; 2 frame; 3 ping and 4 pong with a token (8 bytes);
5 to a relay and 6 from a relay, both as in swarm/zmq/forward.py.
"""

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Required, TypedDict, Unpack

import msgspec
import zmq

from farflock.swarm.directory import MAX_RECORD_BYTES
from farflock.swarm.identity import Identity
from farflock.swarm.links import MAX_FRAME_BYTES, Life, PeerId, Road
from farflock.swarm.record import MAX_DOORS, BadRecord, Record, seal, unseal
from farflock.swarm.zmq.forward import FORWARD_BYTES_PER_S, MAX_FORWARD_BYTES, pack_forward
from farflock.swarm.zmq.outbox import BULK, CONTROL, LANES, Inbox
from farflock.swarm.zmq.partner import DEAD_S, Dial, Partner, Route, Table, Traffic, endpoint_pairs
from farflock.swarm.zmq.relay import FORWARD, FORWARDED, Detours
from farflock.swarm.zmq.socket import Context, Port, configure, multiaddress
from farflock.swarm.zmq.zap import Gate, ZapHandler

MAX_DIALS = 96  # a cell has 64 members; each dial takes about ten descriptors
MAX_ROUTES_PER_PEER = 2  # of one class, accepted from one identity
TICK_S = 0.05
UPKEEP_S = 0.25
LATE_S = 1.0  # a tick that comes so late was held up by us: nobody's silence counts
PING_EVERY_S = 2.0
GONE_S = 1.0  # for so long the last frames of a closed connection are taken

_RECORD, _FRAME, _PING, _PONG = b"\x01", b"\x02", b"\x03", b"\x04"
_TOKEN_BYTES = 8


class Options(TypedDict, total=False):
    """What `ZmqLinks.open` may be told; `incarnation` must be."""

    incarnation: Required[int]
    sequence: int  # at least any that this identity has published
    listen: str | None  # control is bound there, bulk on the next port (any two for port 0); None: only dial
    advertise: Sequence[str]  # numeric hosts to publish instead of the one in `listen`
    doors: Sequence[str]  # addresses of my directory, published in my record
    relay: bool  # forward for others
    refuse: Collection[PeerId]  # a block list
    patience_s: float  # silence after which a partner is suspect; 2 to 3 s where the round trip is above 200 ms
    forward_bytes_per_s: float  # to each peer that we forward for; four times that to all


class ZmqLinks:
    """`Links` over real sockets on the running loop. Make it with `open`; every call belongs in the loop's thread.

    `counters` counts dropped frames and refused connections by reason.
    """

    def __init__(
        self,
        identity: Identity,
        run: str,
        *,
        incarnation: int,
        sequence: int = 0,
        listen: str | None = "tcp://127.0.0.1:0",
        advertise: Sequence[str] = (),
        doors: Sequence[str] = (),
        relay: bool = True,
        refuse: Collection[PeerId] = (),
        patience_s: float = 0.85,
        forward_bytes_per_s: float = FORWARD_BYTES_PER_S,
    ) -> None:
        """See `open` and `Options`."""
        if relay and forward_bytes_per_s < MAX_FORWARD_BYTES:
            raise ValueError(
                f"forwarding needs at least {MAX_FORWARD_BYTES} bytes a second, one frame, got {forward_bytes_per_s}; "
                "pass relay=False to forward nothing"
            )
        self._identity, self._run, self._patience_s = identity, run, patience_s
        self._me = identity.peer
        self._key = identity.session_key()
        self._loop = asyncio.get_running_loop()
        self._table = Table(self._me, Gate(run, self._me, refuse))
        self._detours = Detours(identity, run, self._table, relay, forward_bytes_per_s)
        self._inbound: dict[tuple[int, bytes], Route] = {}  # by class and routing id
        self._backlog: dict[PeerId, Partner] = {}  # whose queues are not empty
        self._inbox = Inbox()
        self._stopped = [False, False]  # classes whose sockets are not read until the inbox is half empty
        self._closed = False
        self._context: Context = zmq.Context()
        self._context.max_sockets = 8192
        self._zap = ZapHandler(self._context, self._table.gate)
        self._routers: list[Port] = []
        curve = self._key.public_key().public_bytes_raw()
        try:
            endpoints = self._listen(listen, advertise) if listen else ()
            self._record = Record(
                run, self._me, incarnation, sequence, curve, endpoints, doors=tuple(doors[:MAX_DOORS])
            )
            self._greeting = _RECORD + seal(identity, self._record)
        except BaseException:
            self._shut()
            raise
        self._tick_s = self._upkeep_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    @classmethod
    async def open(cls, identity: Identity, run: str, **options: Unpack[Options]) -> "ZmqLinks":
        """Bind and begin; raise `OSError` if the port is taken, `ValueError` for options that cannot work."""
        return cls(identity, run, **options)

    def _listen(self, listen: str, advertise: Sequence[str]) -> tuple[str, ...]:
        """Bind both ROUTERs; the addresses to publish, in twos: control, bulk."""
        host, _, wanted = listen.removeprefix("tcp://").rpartition(":")
        if not advertise and ipaddress.ip_address(host.strip("[]")).is_unspecified:
            raise ValueError(f"{listen} is no address that others could dial; name those to publish in `advertise`")
        bound = []
        for lane in LANES:
            port = Port(self._context, lane, None, self)
            self._routers.append(port)
            configure(port.socket, lane, self._key, None, self._patience_s)
            endpoint = f"tcp://{host}:{int(wanted) + lane if int(wanted) else 0}"
            try:
                port.socket.bind(endpoint)
            except zmq.ZMQError as error:
                raise OSError(error.errno, f"cannot listen on {endpoint}: {error}; choose another port") from None
            bound.append(int(port.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))
        return tuple(multiaddress(address, port) for address in advertise or (host,) for port in bound)

    @property
    def me(self) -> PeerId:
        return self._me

    def record(
        self, *, role: str | None = None, speed: float | None = None, relays: Iterable[PeerId] | None = None
    ) -> bytes:
        """My record for the directory, signed afresh with the next sequence number; what is given replaces the old."""
        self._record = msgspec.structs.replace(
            self._record,
            sequence=self._record.sequence + 1,
            role=self._record.role if role is None else role,
            speed=self._record.speed if speed is None else speed,
            relays=self._record.relays if relays is None else tuple(relays),
        )
        self._detours.relays = self._record.relays
        blob = seal(self._identity, self._record)
        self._greeting = _RECORD + blob
        return blob

    @property
    def counters(self) -> Counter[str]:
        """How many frames were dropped and connections refused, by reason."""
        return self._table.counters

    # The seam.

    def learn(self, record: bytes) -> bool:
        """Take in a peer's signed record; False if it was refused or is not newer."""
        try:
            return self._table.note(unseal(record, self._run), self._loop.time())
        except BadRecord:
            self.counters["bad record"] += 1
            return False

    def send(self, peer: PeerId, frame: bytes) -> bool:
        partner = self._reach(peer, frame)
        if partner is None:
            return False
        if not partner.outbox.put(CONTROL, frame):
            self.counters["queue full"] += 1
            return False
        self._flush(partner)
        return True

    async def send_bulk(self, peer: PeerId, frame: bytes, timeout_s: float) -> bool:
        partner = self._reach(peer, frame)
        if partner is None:
            return False
        try:
            return await partner.outbox.put_bulk(frame, timeout_s)
        finally:
            self._flush(partner)

    def _reach(self, peer: PeerId, frame: bytes) -> Partner | None:
        """The partner to queue a frame for; None if there is no hope of a road."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame has at most {MAX_FRAME_BYTES} bytes, got {len(frame)}; cut it")
        now_s = self._loop.time()
        known = peer in self._table.partners
        partner = None if self._closed else self._table.want(peer, now_s)
        if partner and not known:
            self._tend(partner, now_s)  # dial at once
        if partner and partner.road() == "none" and partner.life(now_s, self._patience_s) == "dead":
            partner = None
        if partner is None:
            self.counters["no road"] += 1
        return partner

    async def receive(self) -> tuple[PeerId, bytes]:
        """The next frame of anybody; raise `ConnectionError` once closed."""
        lane, peer, frame = await self._inbox.get()
        if self._stopped[lane] and self._inbox.half_empty(lane):
            self._stopped[lane] = False
            for port in self._ports():
                if port.lane == lane:
                    port.wake()
        return peer, frame

    def life(self, peer: PeerId) -> Life:
        partner = self._asked(peer)
        return partner.life(self._loop.time(), self._patience_s) if partner else "unknown"

    def road(self, peer: PeerId) -> Road:
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
        """Who is asked about stays wanted, but nobody is dialled for a question."""
        partner = self._table.partners.get(peer)
        if partner:
            partner.wanted_s = self._loop.time()
        return partner

    def traffic(self, peer: PeerId) -> Mapping[Road, Traffic]:
        """Bytes to and from this peer by road, since it became a partner."""
        partner = self._table.partners.get(peer)
        return dict(partner.traffic) if partner else {}

    def total_bytes(self) -> tuple[int, int]:
        """Bytes sent to and received from everybody, on all roads, since the start."""
        roads = [road for partner in self._table.partners.values() for road in partner.traffic.values()]
        roads.append(self._table.past)
        return sum(road.sent for road in roads), sum(road.received for road in roads)

    def relayed_bytes(self, peer: PeerId) -> int:
        """What was forwarded here on this peer's behalf."""
        partner = self._table.partners.get(peer)
        return partner.relayed_bytes if partner else 0

    def refuse(self, peer: PeerId) -> None:
        """Have nothing to do with this peer from now on: its connections are cut, its frames and records refused."""
        self._table.gate.refused.add(peer)
        self._table.known.pop(peer, None)
        partner = self._table.partners.get(peer)
        if partner:
            for route in [*partner.routes[CONTROL], *partner.routes[BULK]]:
                self._table.gate.ban(bytes.fromhex(route.key))
            self._drop(partner)

    def _drop(self, partner: Partner) -> None:
        self._table.drop(partner, self._loop.time())
        self._backlog.pop(partner.peer, None)

    async def close(self) -> None:
        """Close every socket, timer and thread; queued frames are dropped. Harmless when repeated."""
        if not self._closed:
            self._timer.cancel()
            for partner in list(self._table.partners.values()):
                self._drop(partner)
            self._shut()

    def _shut(self) -> None:
        self._closed = True
        for port in self._routers:
            port.close()
        self._zap.close()
        self._inbox.close()
        self._context.term()

    # What the ports tell.

    def paused(self, lane: int) -> bool:
        """Whether this class is not read for now: back-pressure reaches the senders through TCP."""
        if self._inbox.full(lane):
            self._stopped[lane] = True
        return self._stopped[lane]

    def on_drop(self, reason: str) -> None:
        """Something was refused."""
        self.counters[reason] += 1

    def on_up(self, port: Port) -> None:
        """A handshake succeeded: on a dialled connection, introduce ourselves."""
        partner = self._table.partners.get(port.owner) if port.owner else None
        if partner and partner.dial and not port.write(None, self._greeting):
            partner.dial.ungreeted.add(port.lane)

    def on_refused(self, port: Port) -> None:
        """The other end's ZAP refused us."""
        self.counters["refused by partner"] += 1
        partner = self._table.partners.get(port.owner) if port.owner else None
        if partner and partner.dial:
            partner.dial.refused(self._loop.time())

    def on_down(self, port: Port, descriptor: int, owner: PeerId) -> None:
        """A proven connection ended."""
        partner = self._table.partners.get(owner)
        if partner is None:
            return
        now_s = self._loop.time()
        had = partner.best(CONTROL)
        for route in [route for route in partner.routes[port.lane] if route.descriptor == descriptor]:
            if route.port is port:
                partner.routes[port.lane].remove(route)
        if had and not partner.best(CONTROL):
            partner.lost_s = now_s
        if partner.dial and port is partner.dial.ports[CONTROL]:
            partner.dial.lost(now_s)

    def on_room(self, port: Port) -> None:
        """There may be room to write on this port."""
        partner = self._table.partners.get(port.owner) if port.owner else None
        if partner and partner.dial and port.lane in partner.dial.ungreeted and port.write(None, self._greeting):
            partner.dial.ungreeted.discard(port.lane)
        for waiting in list(self._backlog.values()):
            self._flush(waiting, port)

    def on_frame(self, port: Port, route: bytes | None, frame: zmq.Frame) -> None:
        """A message came: of a proven connection, or else it must be the record that proves it."""
        proven = self._proven(port, route, frame)
        body = frame.buffer
        kind = bytes(body[:1])
        if proven is None:
            if kind == _RECORD and len(body) <= 1 + MAX_RECORD_BYTES:
                self._meet(port, route, frame)
            else:
                port.kick(_descriptor(frame), "stranger: no record first")
        elif kind != _RECORD:
            self._take(proven, kind, body[1:])

    def _proven(self, port: Port, route: bytes | None, frame: zmq.Frame) -> Route | None:
        """The connection that a frame came on, also when it closed meanwhile; None if its owner is not proven."""
        if route is not None:
            known = self._inbound.get((port.lane, route))
            return known if known and known.key == frame.get("User-Id") else None
        partner = self._table.partners.get(port.owner or "")
        for known in partner.routes[port.lane] if partner else ():
            if known.port is port:
                return known
        return None

    def _meet(self, port: Port, route: bytes | None, frame: zmq.Frame) -> None:
        """Take a connection's first frame: bind the connection to its owner, and introduce ourselves in return."""
        descriptor = _descriptor(frame)
        dialled = self._table.partners.get(port.owner) if port.owner else None
        key = dialled.dial.record.curve if dialled and dialled.dial else bytes.fromhex(str(frame.get("User-Id")))
        try:
            record = self._table.gate.prove(key, bytes(frame.buffer[1:]))
        except BadRecord:
            port.kick(descriptor, "stranger: bad record")
            return
        if port.owner and record.peer != port.owner:
            port.kick(descriptor, "stranger: another peer than dialled")
            return
        self._table.note(record, self._loop.time())
        partner = self._table.partners.get(record.peer) or self._table.begin(record.peer, self._loop.time())
        if partner is None or descriptor not in port.connections:
            port.kick(descriptor, "too many partners")
            return
        partner.record = partner.record or record
        self._join(partner, Route(port, route, descriptor, record.peer, key.hex()))

    def _join(self, partner: Partner, route: Route) -> None:
        """Put a proven connection to use."""
        lane = route.port.lane
        route.port.connections[route.descriptor].owner = partner.peer
        if route.address is not None:
            accepted = [known for known in partner.routes[lane] if known.address is not None]
            for old in accepted[: max(0, len(accepted) + 1 - MAX_ROUTES_PER_PEER)]:
                old.kick("too many connections of one peer")
            self._inbound[lane, route.address] = route
            route.write(self._greeting)
        elif partner.dial and lane == CONTROL:
            partner.dial.connected()
        partner.routes[lane].append(route)
        partner.next_ping_s = 0.0
        self._flush(partner)

    # Frames.

    def _take(self, route: Route, kind: bytes, body: memoryview) -> None:
        partner = self._table.partners.get(route.owner)
        if partner is None:
            self.counters["frame of a dropped partner"] += 1
        elif kind == _FRAME and len(body) > MAX_FRAME_BYTES:
            self.counters["frame too long"] += 1
        elif kind == _FRAME:
            partner.count("direct", received=1 + len(body))
            self._inbox.put(route.port.lane, partner.peer, bytes(body))
        elif kind == _PING and len(body) == _TOKEN_BYTES:
            route.write(_PONG + bytes(body))
        elif kind == _PONG and len(body) == _TOKEN_BYTES:
            if route.port.lane == CONTROL and int.from_bytes(body, "big") == partner.pings:
                partner.rtt_s = self._loop.time() - partner.ping_s
        elif kind == FORWARD:
            self._detours.forward(partner, route.port.lane, body, self._loop.time())
        elif kind == FORWARDED:
            self._take_forwarded(partner, body)
        else:
            self.counters["not a message"] += 1

    def _flush(self, partner: Partner, only: Port | None = None) -> None:
        """Write what waits for a partner, on one port if given, as far as there is room."""
        for lane in LANES:
            while (frame := partner.outbox.head(lane)) is not None:
                if not self._write(partner, lane, frame, only):
                    break
                partner.stuck[lane] = None
                partner.outbox.pop(lane)
        if partner.outbox:
            self._backlog[partner.peer] = partner
        elif self._backlog.get(partner.peer) is partner:
            del self._backlog[partner.peer]

    def _write(self, partner: Partner, lane: int, frame: bytes, only: Port | None) -> bool:
        route = partner.best(lane)
        if route:
            if only not in (None, route.port) or not route.write(_FRAME + frame):
                return False
            partner.count("direct", sent=1 + len(frame))
            return True
        relay = self._detours.route(partner, lane)
        if relay is None or only not in (None, relay.port) or partner.best(CONTROL) or partner.tunnel is None:
            return False
        payload = partner.stuck[lane] or partner.tunnel.carry(lane, frame, self._loop.time())
        if payload is None:
            return False
        message = pack_forward(FORWARD, partner.peer, payload)
        if not relay.write(message):
            partner.stuck[lane] = payload  # sealed once: its counter is used up
            return False
        partner.count("forwarded", sent=len(message))
        return True

    def _take_forwarded(self, relay: Partner, body: memoryview) -> None:
        taken = self._detours.take(relay, body, self._loop.time())
        if taken is None:
            return
        sender, data = taken
        if data:
            self._inbox.put(data[0], sender.peer, data[1])
        self._flush(sender)  # there may be a session, or room in its window, now

    # What is done from time to time.

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._tick_s - TICK_S
        self._tick_s = now_s
        self._timer = self._loop.call_later(TICK_S, self._tick)
        for port in list(self._ports()):
            port.tick(now_s, late_s > LATE_S)
        if now_s >= self._upkeep_s:
            self._upkeep_s = now_s + UPKEEP_S
            self._upkeep(now_s, late_s)

    def _ports(self) -> Iterable[Port]:
        yield from self._routers
        for partner in self._table.partners.values():
            if partner.dial:
                yield from partner.dial.ports

    def _upkeep(self, now_s: float, late_s: float) -> None:
        for peer in self._detours.relays:
            self._table.want(peer, now_s)
        for partner in list(self._table.partners.values()):
            if late_s > LATE_S and partner.tunnel:
                partner.tunnel.excuse(late_s)
            self._tend(partner, now_s)
        for address, route in list(self._inbound.items()):
            owner = self._table.partners.get(route.owner)
            if owner and route in owner.routes[route.port.lane]:
                continue
            route.gone_s = now_s if route.gone_s is None else route.gone_s
            if now_s - route.gone_s > GONE_S:
                del self._inbound[address]

    def _tend(self, partner: Partner, now_s: float) -> None:
        """Dial, ping, detour, give up: whatever is due for one partner."""
        wanted = partner.wanted(now_s)
        self._tend_dial(partner, wanted, now_s)
        connected = partner.best(CONTROL) is not None
        if connected:
            partner.tunnel = None
            self._ping(partner, now_s)
        else:
            undialable = partner.dial is None or partner.dial.failed(now_s)
            self._detours.tend(partner, wanted and undialable, now_s)
        if partner.tunnel and partner.tunnel.over(now_s, DEAD_S) and not wanted:
            partner.tunnel = None
        self._tend_queue(partner, now_s)
        if not (wanted or connected or partner.best(BULK) or partner.tunnel):
            self._drop(partner)

    def _tend_dial(self, partner: Partner, wanted: bool, now_s: float) -> None:
        dial = partner.dial
        if dial:
            dial.tend(now_s)
            if not wanted and dial.down_s is not None:
                partner.hang_up(now_s)
            return
        missing = wanted and not (partner.best(CONTROL) and partner.best(BULK))
        if not missing or not partner.record or not endpoint_pairs(partner.record):
            return
        if sum(other.dial is not None for other in self._table.partners.values()) >= MAX_DIALS:
            self.counters["too many dials"] += 1
            return
        partner.dial = Dial(self._context, self, self._key, partner.record, self._patience_s, now_s)

    def _ping(self, partner: Partner, now_s: float) -> None:
        """Both ends ping all connections: it measures the round trip, and shows that somebody reads."""
        if now_s < partner.next_ping_s:
            return
        partner.next_ping_s, partner.ping_s = now_s + PING_EVERY_S, now_s
        partner.pings += 1
        for lane in LANES:
            for route in partner.routes[lane]:
                route.write(_PING + partner.pings.to_bytes(_TOKEN_BYTES, "big"))

    def _tend_queue(self, partner: Partner, now_s: float) -> None:
        """Frames that found no road for as long as it takes to be dead are dropped."""
        if partner.road() != "none":
            partner.roadless_s = None
        elif partner.roadless_s is None:
            partner.roadless_s = now_s
        elif now_s - partner.roadless_s >= DEAD_S and partner.outbox:
            self.counters["no road"] += partner.forget_queue()
            self._flush(partner)


def _descriptor(frame: zmq.Frame) -> int:
    """The socket that a message came in on."""
    return int(frame.get(zmq.SRCFD))
