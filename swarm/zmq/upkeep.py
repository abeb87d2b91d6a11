"""Periodic work for partners: dial, ping, find a relay, give up."""

import asyncio
import contextlib

from farflock.swarm.zmq.handshake import Handshakes
from farflock.swarm.zmq.message import PING, TOKEN_BYTES
from farflock.swarm.zmq.outbox import BULK, CONTROL, LANES
from farflock.swarm.zmq.partner import (
    DEAD_S,
    Dial,
    Partner,
    PartnerTable,
    Rests,
    endpoint_pairs,
)
from farflock.swarm.zmq.pulse import Pulse
from farflock.swarm.zmq.relay import Relays
from farflock.swarm.zmq.sending import Sender
from farflock.swarm.zmq.sockets import Sockets
from farflock.swarm.zmq.witness import Witness

MAX_DIALS = 96  # a cell has 64 members; each dial takes about ten descriptors
TICK_S = 0.05  # while bytes arrive, or wait to be sent
UPKEEP_S = 0.25
LOOK_S = 3.0  # between looks at all connections while this machine receives next to nothing
LOOK_STRANGERS_S = 1.0  # the same while a connection has no proven owner
LATE_S = 1.0  # a tick this late was blocked by us: no partner's silence counts
PING_EVERY_S = 10.0
FORGET_EVERY_S = 60.0
BULK_ALONE_S = 2.3  # bulk has no heartbeats; a full queue in a home router delays it this long


class Upkeep:
    """Maintains the connections to partners; ticks on the running loop until cancelled."""

    def __init__(
        self,
        table: PartnerTable,
        sockets: Sockets,
        handshakes: Handshakes,
        sender: Sender,
        detours: Relays,
        pulse: Pulse,
    ) -> None:
        self._table, self._sockets, self._handshakes = table, sockets, handshakes
        self._sender, self._detours, self._pulse = sender, detours, pulse
        self._loop = asyncio.get_running_loop()
        self._rests, self._forget_s = Rests(), self._loop.time()
        self.witness = Witness(table, sockets)
        self._is_cancelled = False
        self._sockets.guard.alarm = self._wake
        self._watched = 0  # connections at the last look
        self._upkeep_s = self._look_s = self._due_s = self._loop.time()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def cancel(self) -> None:
        """Stop ticking."""
        self._is_cancelled = True
        self._timer.cancel()

    def _wake(self) -> None:
        """Tick at once; called in the guard's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tick_early)

    def _tick_early(self) -> None:
        if not self._is_cancelled:
            self._timer.cancel()
            self._tick()

    def _tick(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._due_s
        is_busy = self._is_busy()
        self._pulse.tick(now_s)
        rest_s = 0.0 if is_busy else min(UPKEEP_S, self._pulse.due_s - now_s) - TICK_S
        pause_s = TICK_S + max(0.0, rest_s)
        self._due_s = now_s + pause_s
        self._timer = self._loop.call_later(pause_s, self._tick)
        if late_s > LATE_S or now_s >= self._look_s or is_busy:
            self._look(now_s, late_s > LATE_S)
        self._sockets.guard.tick(pause_s - TICK_S)
        if now_s >= self._upkeep_s:
            self._upkeep_s = now_s + UPKEEP_S
            self._tend_all(now_s, late_s)

    def _is_busy(self) -> bool:
        """Return whether frames wait, connections have come, or one may be near a limit."""
        guard = self._sockets.guard
        if self._sender.waiting or len(guard.watched) > self._watched:
            return True
        return bool(guard.watched) and not guard.is_quiet()

    def _look(self, now_s: float, is_late: bool) -> None:
        """Check the limits of all connections, and read and write what may be stuck."""
        watched = self._sockets.guard.watched
        strangers = any(connection.owner is None for connection in watched)
        self._look_s = now_s + (LOOK_STRANGERS_S if strangers else LOOK_S)
        self._watched = len(watched)
        self._sockets.guard.begin()
        for port in list(self._sockets.ports()):
            port.tick(now_s, is_late)

    def _tend_all(self, now_s: float, late_s: float) -> None:
        if late_s > LATE_S:
            self._table.excuse(late_s)
        for peer in self._detours.relays:
            self._table.want(peer, now_s)
        for partner in list(self._table.partners.values()):
            if late_s > LATE_S and partner.tunnel:
                partner.tunnel.excuse(late_s)
            if now_s >= partner.next_ping_s or not partner.is_settled:
                self.tend(partner, now_s)
        self._handshakes.forget_closed(now_s)
        for partner in self._handshakes.end_waits(now_s):
            self._sender.flush(partner)
        self.witness.tick(now_s)
        if now_s >= self._forget_s:
            self._forget_s = now_s + FORGET_EVERY_S
            self._table.forget_old(now_s)

    def tend(self, partner: Partner, now_s: float) -> None:
        """Do whatever is due for one partner: dial, ping, forward, give up."""
        wanted = partner.wanted(now_s)
        self._tend_dial(partner, wanted, now_s)
        connected = partner.best(CONTROL) is not None
        if connected:
            partner.tunnel = None
            self._ping(partner, now_s)
        else:
            self._cut_bulk(partner, now_s)
            undialable = partner.dial is None or partner.dial.failed(now_s)
            self._detours.tend(partner, wanted and undialable, now_s)
        if partner.tunnel and partner.tunnel.over(now_s, DEAD_S) and not wanted:
            partner.tunnel = None
        self._sender.drop_stale(partner, now_s)
        if not (wanted or connected or partner.best(BULK) or partner.tunnel):
            self.drop(partner, now_s)

    def _cut_bulk(self, partner: Partner, now_s: float) -> None:
        """Cut the bulk connections of a partner long without control, whose heartbeats failed."""
        if partner.lost_s is not None and now_s - partner.lost_s > BULK_ALONE_S:
            for route in partner.routes[BULK]:
                route.kick("bulk without control")

    def _tend_dial(self, partner: Partner, wanted: bool, now_s: float) -> None:
        dial = partner.dial
        if dial:
            self._tend_own(partner, dial, now_s)
            if not wanted and dial.down_s is not None:
                partner.hang_up(now_s)
            return
        missing = wanted and not (partner.best(CONTROL) and partner.best(BULK))
        if not missing or not partner.record:
            return
        first = self._first(partner, endpoint_pairs(partner.record), now_s)
        if first is None:
            return
        if sum(other.dial is not None for other in self._table.partners.values()) >= MAX_DIALS:
            self._table.counters["too many dials"] += 1
            return
        partner.dial = self._sockets.dial(partner.record, now_s, first)
        self._take_turn(partner, partner.dial, now_s)

    def _tend_own(self, partner: Partner, dial: Dial, now_s: float) -> None:
        """Go on with a dial. One whose address is that of others too, or whose peer may be gone,
        does not keep its descriptors between two attempts."""
        if dial.down_s is None:
            self._rests.worked(dial.endpoint)
        elif dial.is_over(now_s):
            self._rests.failed(dial.endpoint, now_s)
            if self._is_alone(partner, dial.endpoint, now_s):
                dial.next(now_s, lambda endpoint: self._may_dial(partner, endpoint, now_s))
                self._take_turn(partner, dial, now_s)
            else:
                partner.hang_up(now_s)

    def _first(self, partner: Partner, pairs: list[tuple[str, str]], now_s: float) -> int | None:
        """Return the number of the endpoints to dial first; None while all of them rest, or are for
        others to try."""
        allowed = (n for n, (each, _) in enumerate(pairs) if self._may_dial(partner, each, now_s))
        return next(allowed, None)

    def _may_dial(self, partner: Partner, endpoint: str, now_s: float) -> bool:
        """Return whether an address is this partner's alone, or has rested and is not for others to
        try."""
        if self._is_alone(partner, endpoint, now_s):
            return True
        rivals = self._rivals(partner, endpoint, now_s)
        is_free = not any(each.dial and each.dial.endpoint == endpoint for each in rivals)
        is_turn = all(partner.tried_s <= each.tried_s for each in rivals)
        return is_free and is_turn and self._rests.is_due(endpoint, now_s)

    def _take_turn(self, partner: Partner, dial: Dial, now_s: float) -> None:
        """Note that a dial has begun at an address of others too: they are next."""
        if not self._is_alone(partner, dial.endpoint, now_s):
            partner.tried_s = now_s

    def _is_alone(self, partner: Partner, endpoint: str, now_s: float) -> bool:
        """Return whether an address is that of this partner alone, which was heard of lately."""
        is_known = self._table.record(partner.peer, now_s) is not None
        return is_known and not self._rivals(partner, endpoint, now_s)

    def _rivals(self, partner: Partner, endpoint: str, now_s: float) -> list[Partner]:
        """Return the other peers that are looked for at an address."""
        others = self._table.partners.values()
        return [each for each in others if each is not partner and each.seeks(endpoint, now_s)]

    def _ping(self, partner: Partner, now_s: float) -> None:
        """Ping all connections: it measures the round trip and shows that both ends read."""
        if now_s < partner.next_ping_s:
            return
        partner.next_ping_s, partner.ping_s = now_s + PING_EVERY_S, now_s
        partner.pings += 1
        for lane in LANES:
            for route in partner.routes[lane]:
                route.write(PING + partner.pings.to_bytes(TOKEN_BYTES, "big"))
        self.witness.ask(partner, now_s)

    def drop(self, partner: Partner, now_s: float) -> None:
        """Cut a partner's connections and drop its frames."""
        self._table.drop(partner, now_s)
        self._sender.forget(partner)
