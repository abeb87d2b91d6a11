"""The forwarded transport over existing connections: sender, receiver, and relay between two.

Relays are tried in this order: those that the partner's record names (it keeps connections to
them), our own, then a few peers that we are connected to anyway. Each is tried for `RELAY_TRY_S`;
the one that answers is kept.
"""

from collections.abc import Iterator

from farflock.swarm.identity import Identity
from farflock.swarm.links import PeerId
from farflock.swarm.zmq.forward import (
    HELLOS_PER_S,
    Meter,
    Tunnel,
    is_hello,
    pack_forward,
    unpack_forward,
)
from farflock.swarm.zmq.message import FORWARD, FORWARDED
from farflock.swarm.zmq.outbox import CONTROL
from farflock.swarm.zmq.partner import Partner, PartnerTable, Route
from farflock.swarm.zmq.rate_limit import RateLimit
from farflock.swarm.zmq.sealed import BadSeal

RELAY_TRY_S = 1.0
RELAY_SILENT_S = 2.0
MAX_GUESSES = 4  # partners tried as relays that no record names
MAX_UNCONFIRMED = 32  # tunnels whose partner has not yet proved that it holds the keys


class Relays:
    """All tunnels of one peer, and its service as a relay."""

    def __init__(
        self,
        identity: Identity,
        run: str,
        table: PartnerTable,
        relay: bool,
        forward_bytes_per_s: float,
        limit: RateLimit,
    ) -> None:
        """`limit` is that of this peer's uplink, in which what it forwards counts."""
        self.relays: tuple[PeerId, ...] = ()  # my own, as my record names them
        self._identity, self._run, self._table, self.relay = identity, run, table, relay
        self._meter, self._limit = Meter(forward_bytes_per_s), limit
        self._hellos = Meter(HELLOS_PER_S)

    def forward(self, sender: Partner, lane: int, body: bytes | memoryview, now_s: float) -> None:
        """Forward a frame as a relay, with its authenticated sender; count it if it is dropped."""
        reason = self._forward(sender, lane, body, now_s) if self.relay else "forward: not a relay"
        if reason:
            self._table.counters[reason] += 1

    def _forward(
        self, sender: Partner, lane: int, body: bytes | memoryview, now_s: float
    ) -> str | None:
        """Forward the frame; return the reason if it was dropped."""
        try:
            peer, payload = unpack_forward(body)
        except BadSeal:
            return "forward: bad frame"
        target = self._table.partners.get(peer)
        route = target.best(lane) if target else None
        if route is None:
            return "forward: destination not connected"
        if not self._meter.take(sender.peer, len(body), now_s):
            return "forward: over budget"
        if not route.write(pack_forward(FORWARDED, sender.peer, payload)):
            return "forward: no room"
        self._limit.spend(len(body), now_s)
        sender.relayed_bytes += len(body)
        return None

    def take(
        self, relay: Partner, body: bytes | memoryview, now_s: float
    ) -> tuple[Partner, tuple[int, bytes] | None] | None:
        """Open a frame forwarded to us; return None if it is refused.

        Otherwise return its sender, with the lane and frame, or with None after a handshake."""
        try:
            return self._take(relay.peer, *unpack_forward(body), now_s)
        except BadSeal:
            self._table.counters["bad seal"] += 1
            return None

    def _take(
        self, relay: PeerId, sender: PeerId, payload: memoryview, now_s: float
    ) -> tuple[Partner, tuple[int, bytes] | None]:
        if sender in self._table.gate.refused or sender == self._identity.peer:
            raise BadSeal(f"{sender} may not send here")
        partner = self._table.partners.get(sender)
        tunnel = partner.tunnel if partner else None
        if tunnel is None:
            tunnel = self._answer(relay, sender, payload, now_s)
        taken = tunnel.take(payload, now_s)
        partner = partner or self._table.begin(sender, now_s)
        if partner is None:
            raise BadSeal("no room for another partner")
        partner.tunnel = tunnel
        # Anyone can replay an old hello, but no one can replay a sealed frame.
        if not is_hello(payload) or not tunnel.confirmed:
            partner.via = relay
        if taken:
            partner.count("forwarded", received=len(payload))
            partner.wanted_s = now_s
        self.carry(partner)
        return partner, taken

    def _answer(self, relay: PeerId, sender: PeerId, payload: memoryview, now_s: float) -> Tunnel:
        """Return a new tunnel for a peer that begins one; keep it only if its hello is valid."""
        unconfirmed = sum(
            bool(p.tunnel and not p.tunnel.confirmed) for p in self._table.partners.values()
        )
        if (
            not is_hello(payload)
            or unconfirmed >= MAX_UNCONFIRMED
            or not self._hellos.take(relay, 1, now_s)
        ):
            raise BadSeal("a sealed frame without a session, or too many hellos")
        return Tunnel(self._identity, sender, self._run)

    def route(self, partner: Partner, lane: int) -> Route | None:
        """Return the connection to the relay in use, or None."""
        via = self._table.partners.get(partner.via) if partner.via else None
        return via.best(lane) if via else None

    def carry(self, partner: Partner) -> None:
        """Send a tunnel's own payloads; what finds no room is lost and repeated later."""
        route = self.route(partner, CONTROL)
        while partner.tunnel and partner.tunnel.outgoing:
            message = pack_forward(FORWARD, partner.peer, partner.tunnel.outgoing.popleft())
            if route and route.write(message):
                partner.count("forwarded", sent=len(message))

    def tend(self, partner: Partner, needed: bool, now_s: float) -> None:
        """Begin, maintain or end a partner's tunnel; `needed`: it is wanted and not dialable."""
        tunnel = partner.tunnel
        if tunnel is None:
            if not needed:
                return
            tunnel = partner.tunnel = Tunnel(self._identity, partner.peer, self._run)
        if needed and not (tunnel.confirmed and tunnel.silence_s(now_s) < RELAY_SILENT_S):
            self._try_relay(partner, tunnel, now_s)
        tunnel.tick(now_s)
        self.carry(partner)

    def _try_relay(self, partner: Partner, tunnel: Tunnel, now_s: float) -> None:
        if partner.via and now_s - partner.via_s < RELAY_TRY_S and self.route(partner, CONTROL):
            return
        candidates = list(self._candidates(partner, now_s))
        if candidates:
            after = candidates.index(partner.via) + 1 if partner.via in candidates else 0
            partner.via, partner.via_s = candidates[after % len(candidates)], now_s
            tunnel.knock(now_s)

    def _candidates(self, partner: Partner, now_s: float) -> Iterator[PeerId]:
        """Yield connected relays, best first; dial the named ones for the next time."""
        partners = self._table.partners
        named = [*(partner.record.relays if partner.record else ()), *self.relays]
        for peer in named:
            self._table.want(peer, now_s)
        others = [
            peer for peer, other in partners.items() if other.best(CONTROL) and peer not in named
        ]
        for peer in dict.fromkeys([*named, *others[:MAX_GUESSES]]):
            if peer != partner.peer and peer in partners and partners[peer].best(CONTROL):
                yield peer
