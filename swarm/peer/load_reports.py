"""Periodic load reports by the servers of all stages, from which all compute the same move.

All must compute it from the same numbers (swarm/protocol/rebalance.py): each server reports once
per period, and a peer that is missing a report computes nothing in that period.
"""

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Load
from farflock.swarm.protocol.rebalance import LoadSnapshot, ServerLoad
from farflock.swarm.roles import EVERY

REPEAT_S = 1.0  # a report may be lost, and one missing report holds up the move


class LoadReports:
    """This peer's load report, and the reports that it has received."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self.mine: Load | None = None
        self._announced: dict[PeerId, Load] = {}
        self._sent_s = 0.0

    def say(self, load: Load) -> None:
        """Announce this peer's load for a period."""
        if self.mine is None or self.mine.number != load.number:
            self.mine = load
            self._send()

    def receive(self, sender: PeerId, incarnation: int, message: Load) -> None:
        """Handle a member's report."""
        view = self._context.views.newest
        if view.index(sender, incarnation) is None:
            self._context.drop("load of a stranger")
        elif sender not in self._announced or message.number >= self._announced[sender].number:
            self._announced = {
                peer: load for peer, load in self._announced.items() if peer in view.peers
            }
            self._announced[sender] = message

    def tick(self) -> None:
        """Repeat the report, which may have been lost."""
        if self.mine is not None and self._context.now() - self._sent_s >= REPEAT_S:
            self._send()

    def snapshot(self, number: int, needs_bytes: tuple[int, ...]) -> LoadSnapshot | None:
        """Return the loads of each stage's live servers in this period; None if one is missing."""
        view, loads = self._context.views.newest, dict(self._announced)
        if self.mine is not None:
            loads[self._context.me] = self.mine
        stages: list[list[ServerLoad]] = [[] for _ in needs_bytes]
        replicas = 0
        for member in view.members:
            gone = member.peer != self._context.me and self._context.gone(view, member.peer)
            replicas += not gone and member.stage == EVERY
            if gone or not 0 <= member.stage < len(stages):
                # replicas and trainers do not move, and an unknown stage must not hold others up
                continue
            load = loads.get(member.peer)
            if load is None or load.number != number:
                return None
            stages[member.stage].append(
                ServerLoad(member.peer, load.queue, load.rate, load.memory_bytes, load.resident_s)
            )
        return LoadSnapshot(number, tuple(map(tuple, stages)), needs_bytes, replicas)

    def _send(self) -> None:
        assert self.mine is not None
        self._sent_s = self._context.now()
        for peer in self._context.views.newest.peers:
            if peer != self._context.me:
                self._context.send(peer, self.mine)
