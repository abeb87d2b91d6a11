"""Periodic work for partners: dial, ping, find a relay, give up."""

import asyncio

from farflock.swarm.zmq.arrivals import Arrivals
from farflock.swarm.zmq.handshake import Handshakes
from farflock.swarm.zmq.message import PING, TOKEN_BYTES
from farflock.swarm.zmq.outbox import BULK, CONTROL, LANES
from farflock.swarm.zmq.partner import DEAD_S, Partner, PartnerTable, endpoint_pairs
from farflock.swarm.zmq.relay import Relays
from farflock.swarm.zmq.sending import Sender
from farflock.swarm.zmq.sockets import Sockets

MAX_DIALS = 96  # a cell has 64 members; each dial takes about ten descriptors
TICK_S = 0.05  # while there are connections
UPKEEP_S = 0.25
LOOK_S = 1.0  # between looks at all connections while this machine receives next to nothing
QUIET_BYTES = 256 * 1024  # received by the whole machine since the last look: next to nothing
LATE_S = 1.0  # a tick this late was blocked by us: no partner's silence counts
PING_EVERY_S = 2.0


class Upkeep:
    """Maintains the connections to partners; ticks on the running loop until cancelled."""

    def __init__(
        self,
        table: PartnerTable,
        sockets: Sockets,
        handshakes: Handshakes,
        sender: Sender,
        detours: Relays,
    ) -> None:
        self._table, self._sockets, self._handshakes = table, sockets, handshakes
        self._sender, self._detours = sender, detours
        self._loop = asyncio.get_running_loop()
        self._arrivals = Arrivals()
        self._watched = 0  # connections at the last look
        self._upkeep_s = self._look_s = self._due_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def cancel(self) -> None:
        """Stop ticking."""
        self._timer.cancel()
        self._arrivals.close()

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s
        pause_s = TICK_S if self._sockets.guard.watched else UPKEEP_S
        self._due_s = now_s + pause_s
        self._timer = self._loop.call_later(pause_s, self._tick)
        if late_s > LATE_S or now_s >= self._look_s or self._is_busy():
            self._look(now_s, late_s > LATE_S)
        self._sockets.guard.tick()
        if now_s >= self._upkeep_s:
            self._upkeep_s = now_s + UPKEEP_S
            self._tend_all(now_s, late_s)

    def _is_busy(self) -> bool:
        """Return whether frames wait, connections have come, or one may be near a limit."""
        watched = self._sockets.guard.watched
        if self._sender.waiting or len(watched) > self._watched:
            return True
        arrived = self._arrivals.since() if watched else 0
        return arrived is None or arrived >= QUIET_BYTES

    def _look(self, now_s: float, is_late: bool) -> None:
        """Check the limits of all connections, and read and write what may be stuck."""
        self._look_s = now_s + LOOK_S
        self._arrivals.begin()
        self._watched = len(self._sockets.guard.watched)
        for port in list(self._sockets.ports()):
            port.tick(now_s, is_late)

    def _tend_all(self, now_s: float, late_s: float) -> None:
        for peer in self._detours.relays:
            self._table.want(peer, now_s)
        for partner in list(self._table.partners.values()):
            if late_s > LATE_S and partner.tunnel:
                partner.tunnel.excuse(late_s)
            self.tend(partner, now_s)
        self._handshakes.forget_closed(now_s)

    def tend(self, partner: Partner, now_s: float) -> None:
        """Do whatever is due for one partner: dial, ping, forward, give up."""
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
        self._sender.drop_stale(partner, now_s)
        if not (wanted or connected or partner.best(BULK) or partner.tunnel):
            self.drop(partner, now_s)

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
            self._table.counters["too many dials"] += 1
            return
        partner.dial = self._sockets.dial(partner.record, now_s)

    def _ping(self, partner: Partner, now_s: float) -> None:
        """Ping all connections: it measures the round trip and shows that both ends read."""
        if now_s < partner.next_ping_s:
            return
        partner.next_ping_s, partner.ping_s = now_s + PING_EVERY_S, now_s
        partner.pings += 1
        for lane in LANES:
            for route in partner.routes[lane]:
                route.write(PING + partner.pings.to_bytes(TOKEN_BYTES, "big"))

    def drop(self, partner: Partner, now_s: float) -> None:
        """Cut a partner's connections and drop its frames."""
        self._table.drop(partner, now_s)
        self._sender.forget(partner)
