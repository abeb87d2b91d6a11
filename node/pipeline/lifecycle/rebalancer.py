"""Moves of a stage server to another stage: SWARM's adaptive rebalancing
(swarm/protocol/rebalance.py), and emergency moves to a stage without servers.

A server moves by ending its life; its next life serves the other stage and inherits nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from farflock.node.run.terms import EMERGENCY_S, RebalanceTerms
from farflock.swarm.messages import Load
from farflock.swarm.peer.peer import Peer
from farflock.swarm.protocol.rebalance import LoadSnapshot, Move, next_move, snapshot_number

LOOK_EVERY_S = 0.3  # at the chain of views
RESCUE_EVERY = 4  # periods between emergency moves: the moving server needs time to start there


class LifeOver(Exception):
    """This life ends: its stage went on without it, or the node has to serve another one
    (`stage`)."""

    def __init__(self, reason: str, stage: int | None = None) -> None:
        super().__init__(reason)
        self.stage = stage


async def stay_on_chain(peer: Peer) -> None:
    """Raise `LifeOver` once the run goes on without the state that is here."""
    while not peer.branching.adrift:  # noqa: ASYNC110 - it may change with each view
        await asyncio.sleep(LOOK_EVERY_S)
    raise LifeOver("the run's members go on from another state")


def due_move(
    balance: RebalanceTerms, snapshot: LoadSnapshot, before: LoadSnapshot | None
) -> Move | None:
    """Return the move that is due in a period, or None.

    A stage that has no servers in this period and had none in the one `before` gets one, in
    every `RESCUE_EVERY`th period. After a single such period, its first server may just be
    arriving. Ordinary moves come every `balance.every_s`."""
    every = round(balance.every_s / EMERGENCY_S)
    if lost := _lost(snapshot):
        follows = before is not None and before.number + 1 == snapshot.number
        still_lost = before is not None and follows and bool(lost & _lost(before))
        if not still_lost or snapshot.number % RESCUE_EVERY:
            return None
    elif not every or snapshot.number % every:
        return None
    return next_move(snapshot, balance.rule)


def _lost(snapshot: LoadSnapshot) -> set[int]:
    """Return the stages that no peer serves."""
    if snapshot.replicas:
        return set()
    return {stage for stage, servers in enumerate(snapshot.stages) if not servers}


@dataclass(slots=True)
class Rebalancer:
    """One server's part in rebalancing. `load` returns its numbers for a period; `needs_bytes`
    is the memory that each stage needs, in order. A server that is to move waits for `merged`."""

    peer: Peer
    balance: RebalanceTerms
    needs_bytes: tuple[int, ...]
    load: Callable[[int], Load]
    merged: Callable[[], Awaitable[None]]

    async def run(self) -> None:
        """Check in each period whether a server has to move; raise `LifeOver` if it is this one."""
        before: LoadSnapshot | None = None
        while True:
            number = snapshot_number(self.peer.run_s(), EMERGENCY_S)
            self.peer.loads.say(self.load(number))
            # half a period lets the other servers' loads arrive
            await self._until(number + 0.5)
            snapshot = self.peer.loads.snapshot(number, self.needs_bytes)
            move = due_move(self.balance, snapshot, before) if snapshot is not None else None
            before = snapshot
            if move is not None and move.peer == self.peer.me:
                await self.merged()
                reason = f"moves from stage {move.source} to stage {move.target}"
                raise LifeOver(reason, move.target)
            await self._until(number + 1)

    async def _until(self, period: float) -> None:
        # at least a moment, so that periods that are over already do not block the event loop
        await asyncio.sleep(max(period * EMERGENCY_S - self.peer.run_s(), 0.01))
