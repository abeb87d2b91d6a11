"""Work during which a node contributes nothing to its rounds, and says so.

Others go on without waiting for it, and it goes on applying what they decide, so that it is still
in step afterwards.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from farflock.node.train.exchange_client import StopRequest
from farflock.optimizers.method import Progress
from farflock.swarm.messages import Key
from farflock.swarm.peer.peer import Peer

LOOK_EVERY_S = 0.05
STALL_S = 2.0  # of a pause between two steps, before others are told not to wait

T = TypeVar("T")


class NextRounds(Protocol):
    """A node's state, as far as its place in the rounds is concerned (state_sync.py)."""

    @property
    def next_rounds(self) -> dict[str, int]:
        """The first round of each stream that is not applied, by the stream's name in the swarm."""
        ...


class AbsentLoop(Protocol):
    """A loop between two steps (node/loop.py)."""

    stop: StopRequest

    @property
    def state_sync(self) -> NextRounds:
        """This node's state in the run."""
        ...

    async def settle(self, *, last: bool = False) -> None:
        """Apply the results that are there."""
        ...

    async def begin_step(self) -> Progress:
        """Apply the rounds that were decided without this peer."""
        ...


class Absence:
    """One node's absences from its rounds."""

    def __init__(self, peer: Peer, loop: AbsentLoop) -> None:
        self._peer, self._loop = peer, loop

    async def during(self, work: Coroutine[Any, Any, T], after_s: float = 0.0) -> T:
        """Return what some work returns. Once it has taken `after_s`, others are told not to wait,
        until it ends. Where rounds have passed by then, it ends with the next round, so that the
        others need not wait for this node's steps either."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task,), timeout=after_s)
            if task.done():
                return task.result()
            first = self._loop.state_sync.next_rounds
            await self._away(task.done)
            last = self._loop.state_sync.next_rounds
            if last != first and not self._loop.stop.requested:
                await self._away(lambda: self._may_go_on(last))
            self._peer.absences.come_back(self._loop.state_sync.next_rounds.items())
            return await task
        finally:
            task.cancel()

    async def _away(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self._peer.absences.leave(self._loop.state_sync.next_rounds.items())
            await self._take_in()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _take_in(self) -> None:
        await self._loop.settle(last=True)
        await self._loop.begin_step()

    def _may_go_on(self, last: dict[str, int]) -> bool:
        """Return whether a round has ended since, or no other member makes any."""
        context = self._peer.context
        others = (peer for peer in context.views.newest.peers if peer != context.me)
        makes_rounds = any(
            not context.gone(context.views.newest, peer)
            and not any(context.is_away(peer, Key(*entry)) for entry in last.items())
            for peer in others
        )
        is_asked_to_stop = self._loop.stop.requested
        return is_asked_to_stop or not makes_rounds or self._loop.state_sync.next_rounds != last
