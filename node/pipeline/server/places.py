"""The places of a server's pending gradients, shared out among the trainers that want them.

A gradient takes memory of a stage's size, so there are few places. A free one goes to the trainer
in line that holds the fewest: while others wait, nobody gets more than its fair share. A trainer
that lets the lease of a gradient run out owes a confirmation for it. Until it has confirmed as
many, or has been forgiven, it gets a place only while nobody else waits, and all trainers that owe
have one together: trainers that never confirm do not hold up the stage.
"""

import asyncio
import collections
from dataclasses import dataclass, field

from farflock.node.pipeline.server.pending import PendingGradient, PendingGradients
from farflock.swarm.links import PeerId
from farflock.swarm.peer.calls.call_server import CallReply
from farflock.swarm.protocol.gradient_leases import Begin, GradientKey

FORGIVEN_LEASES = 10.0  # after so many without another one that ran out, nothing is owed any more
MAX_DEBTORS = 256  # trainers that owe; beyond them, the one that has owed for longest is forgiven


@dataclass(slots=True)
class _InLine:
    """A backward pass that waits for a place, and what became of it."""

    key: GradientKey
    attempt: int
    reply: asyncio.Future[CallReply]
    begun: asyncio.Future[Begin]


@dataclass(slots=True)
class Debts:
    """The confirmations that trainers owe; all are forgiven after `forgiven_s`. Sans I/O."""

    forgiven_s: float
    _owed: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # number, until when

    def add(self, trainer: PeerId, now_s: float) -> None:
        """Note a gradient whose lease has run out."""
        owed, _ = self._owed.pop(trainer, (0, 0.0))
        self._owed[trainer] = owed + 1, now_s + self.forgiven_s
        if len(self._owed) > MAX_DEBTORS:
            del self._owed[next(iter(self._owed))]

    def pay(self, trainer: PeerId) -> None:
        """Note a confirmation."""
        owed, until_s = self._owed.pop(trainer, (0, 0.0))
        if owed > 1:
            self._owed[trainer] = owed - 1, until_s

    def forgive(self, now_s: float) -> None:
        """Forget what has been owed for too long."""
        self._owed = {peer: owed for peer, owed in self._owed.items() if owed[1] > now_s}

    def __contains__(self, trainer: object) -> bool:
        return trainer in self._owed

    def __len__(self) -> int:
        return len(self._owed)


class Places:
    """Gives the places of `pending` to trainers; at most `room` requests wait in line, but for the
    first of each trainer."""

    def __init__(self, pending: PendingGradients, room: int) -> None:
        self._pending, self._room = pending, room
        self._line: list[_InLine] = []
        self.debts = Debts(FORGIVEN_LEASES * pending.staging.lease_s)

    @property
    def waiting(self) -> int:
        """The number of passes in line."""
        return len(self._line)

    async def begin(
        self, key: GradientKey, attempt: int, reply: asyncio.Future[CallReply]
    ) -> Begin:
        """Do as `PendingGradients.begin`, but wait in line for a place. Return `busy` if the line
        is full, or if it does not move because all places hold gradients that their trainers do not
        confirm."""
        begun: asyncio.Future[Begin] = asyncio.get_running_loop().create_future()
        entry = _InLine(key, attempt, reply, begun)
        found = self._try(entry)
        if found != "busy" or not self._has_room(key[0]):
            return found
        self._line.append(entry)
        try:
            found = await begun
            # the reply to wait for may have gone since
            return self._try(entry) if found == "again" else found
        except asyncio.CancelledError:
            if begun.done() and not begun.cancelled() and begun.result() == "run":
                self._pending.drop(key, attempt)
            raise

    def call_up(self) -> None:
        """Give the free places to those in line."""
        while any(map(self._take_up, self._in_turn())):
            pass
        self._line = [entry for entry in self._line if not entry.begun.done()]

    def _in_turn(self) -> list[_InLine]:
        """Return the passes in line: first those of trainers that hold the fewest places, last
        those of trainers that owe."""
        held = collections.Counter(trainer for trainer, _ in self._pending.replies)

        def turn(entry: _InLine) -> tuple[bool, int]:
            return entry.key[0] in self.debts, held[entry.key[0]]

        return sorted((entry for entry in self._line if not entry.begun.done()), key=turn)

    def _take_up(self, entry: _InLine) -> bool:
        """Begin a pass in line; return False if it has to wait on."""
        found = self._try(entry)
        if found != "busy":
            entry.begun.set_result(found)
        return found != "busy"

    def turn_away(self) -> None:
        """Let all in line ask another server."""
        for entry in self._line:
            if not entry.begun.done():
                entry.begun.set_result("busy")
        self._line.clear()

    def confirm(self, key: GradientKey, attempt: int) -> PendingGradient | bool:
        """Do as `PendingGradients.confirm`, and call up those in line."""
        found = self._pending.confirm(key, attempt)
        if isinstance(found, PendingGradient):
            self.debts.pay(key[0])
        self.call_up()
        return found

    def revoke(self, key: GradientKey, attempt: int) -> None:
        """Do as `PendingGradients.revoke`, and call up those in line."""
        self._pending.revoke(key, attempt)
        self.call_up()

    def expire(self, now_s: float) -> None:
        """Give up gradients that were not confirmed in time, and call up those in line."""
        before = set(self._pending.gradients)
        self._pending.expire(now_s)
        self.debts.forgive(now_s)
        for trainer, _ in sorted(before - self._pending.gradients.keys()):
            self.debts.add(trainer, now_s)
        self.call_up()

    def _try(self, entry: _InLine) -> Begin:
        """Begin a pass, unless its trainer owes and another one that owes holds a place. A pass
        that is revoked while it is computed holds its place until it ends."""
        held = [trainer for trainer, _ in self._pending.replies]
        may_have = len(held) < self._pending.staging.places and not (
            entry.key[0] in self.debts and any(map(self.debts.__contains__, held))
        )
        found = self._pending.begin(entry.key, entry.attempt, entry.reply)
        if found == "run" and not may_have:
            self._pending.drop(entry.key, entry.attempt)
            return "busy"
        return found

    def _has_room(self, trainer: PeerId) -> bool:
        """True if a trainer may wait in line: a place there is never taken by others alone."""
        waiting = collections.Counter(entry.key[0] for entry in self._line)
        if trainer in self.debts:
            return not waiting[trainer]
        return len(self._line) < self._room or not waiting[trainer]
