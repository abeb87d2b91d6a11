"""When a stage server moves to another stage: SWARM's adaptive rebalancing (swarm/protocol/rebalance.py), and the same
at once for a stage that nobody serves.

Who is to move ends this life, and the next one serves the other stage; nothing of a life is carried over but what was decided.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from farflock.node.run.terms import EMERGENCY_S, RebalanceTerms
from farflock.swarm.messages import Load
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.rebalance import LoadSnapshot, Move, next_move, snapshot_number

RESCUE_EVERY = 4  # periods: who goes to such a stage needs the time to begin there before another one follows


class LifeOver(Exception):
    """This node's stage has gone on without it, or it is to serve another one (`stage`): it begins another life."""

    def __init__(self, reason: str, stage: int | None = None) -> None:
        super().__init__(reason)
        self.stage = stage


def due_move(balance: RebalanceTerms, snapshot: LoadSnapshot, before: LoadSnapshot | None) -> Move | None:
    """The move of a period: to a stage that had servers neither in this one nor in the one `before`, which may have been
    that of its first server's coming; to one that has servers only in every so many periods."""
    every = round(balance.every_s / EMERGENCY_S)
    if _lost(snapshot):
        is_new = before is None or before.number + 1 != snapshot.number or not _lost(snapshot) & _lost(before)
        if is_new or snapshot.number % RESCUE_EVERY:
            return None
    elif not every or snapshot.number % every:
        return None
    return next_move(snapshot, balance.rule)


def _lost(snapshot: LoadSnapshot) -> set[int]:
    """Stages that nobody holds."""
    if snapshot.replicas:
        return set()
    return {stage for stage, servers in enumerate(snapshot.stages) if not servers}


@dataclass(slots=True)
class Rebalancer:
    """One server's part. `load` gives its numbers for a period; `needs_bytes` are those of the stages, in order."""

    peer: Peer
    balance: RebalanceTerms
    needs_bytes: tuple[int, ...]
    load: Callable[[int], Load]

    async def run(self) -> None:
        """Look, period after period; `LifeOver` when it is this server that moves."""
        before: LoadSnapshot | None = None
        while True:
            number = snapshot_number(self.peer.run_s(), EMERGENCY_S)
            self.peer.loads.say(self.load(number))
            await self._until(number + 0.5)
            snapshot = self.peer.loads.snapshot(number, self.needs_bytes)
            move = due_move(self.balance, snapshot, before) if snapshot is not None else None
            before = snapshot
            if move is not None and move.peer == self.peer.me:
                raise LifeOver(f"goes from stage {move.source} to stage {move.target}", move.target)
            await self._until(number + 1)

    async def _until(self, period: float) -> None:
        await asyncio.sleep(max(period * EMERGENCY_S - self.peer.run_s(), 0.01))
