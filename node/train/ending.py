"""The end of a training loop, by agreement or alone; the rounds that it missed, and its restart
from the group's state."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from farflock.node.reporting import Report
from farflock.node.train.driver import Apply
from farflock.node.train.exchange_client import OutOfStep, StopRequest, UnderWay
from farflock.node.train.losses import Losses
from farflock.optimizers.method import Progress
from farflock.swarm.compute import Compute
from farflock.swarm.tasks import cancel

LOOK_EVERY_S = 0.05  # between two checks for the content of a decided round


class Barrier(Protocol):
    """The agreed end of a run (end_barrier.py)."""

    def is_due(self, total_tokens: int) -> bool:
        """Return whether the run has reached its total of tokens."""
        ...

    async def end(
        self, take_in: Callable[[], Awaitable[None]], stopping: Callable[[], bool]
    ) -> None:
        """Wait until all peers have ended with the same rounds, which `take_in` applies."""
        ...


class AdoptedState(Protocol):
    """A node's state, as the end of its loop sees it (state_sync.py)."""

    @property
    def is_behind(self) -> bool:
        """True if a decided round is missing from the state."""
        ...

    def missed(self) -> Apply | None:
        """Return the next round that was decided without this node and is here, or None."""
        ...

    async def adopt(self) -> None:
        """Replace the state with the run's."""
        ...


class EndingLoop(Protocol):
    """A loop, as its end sees it (node/loop.py)."""

    adopt: Callable[[str], Awaitable[None]] | None
    compute: Compute
    stop: StopRequest
    under_way: UnderWay

    @property
    def state_sync(self) -> AdoptedState:
        """This node's state in the run."""
        ...

    @property
    def losses(self) -> Losses:
        """The losses of its steps."""
        ...

    @property
    def report(self) -> Report:
        """The callback that receives events."""
        ...

    @property
    def progress(self) -> Progress:
        """The run's progress, as far as this peer knows."""
        ...

    async def settle(self, *, last: bool = False) -> None:
        """Apply the results that are due, and wait for those that are needed."""
        ...

    async def begin_step(self) -> Progress:
        """Apply the rounds that were decided without this peer."""
        ...

    async def apply(self, action: Apply) -> None:
        """Let the method apply a result."""
        ...


def is_over(loop: EndingLoop, total_tokens: int, barrier: Barrier | None) -> bool:
    """Return whether the run has reached its total of tokens: by the barrier's agreement, or by
    this peer's own estimate if there is no barrier."""
    return loop.progress.tokens >= total_tokens if barrier is None else barrier.is_due(total_tokens)


async def end(loop: EndingLoop, barrier: Barrier | None, drain_s: float) -> None:
    """Wait at the barrier, if any, until every peer has ended with the same rounds; then drain."""

    async def take_in() -> None:
        await loop.settle(last=True)
        await loop.begin_step()

    await loop.compute(loop.losses.read)
    loop.losses.tell(loop.report)
    if barrier is not None:
        await barrier.end(take_in, lambda: loop.stop.requested)
    await drain(loop, max(drain_s, loop.stop.drain_s))


async def drain(loop: EndingLoop, timeout_s: float, *, last: bool = False) -> None:
    """Wait up to `timeout_s` for the open exchanges and apply their results, so that no result is
    left out of the state. After the `last` step of all, a peer that the group has left behind keeps
    its own state: whoever has the group's may be gone."""
    if timeout_s <= 0:
        return
    if last:
        loop.stop(timeout_s)
    until_s = asyncio.get_running_loop().time() + timeout_s
    if loop.under_way:
        await asyncio.wait(loop.under_way.values(), timeout=timeout_s)
    await loop.settle()
    await loop.begin_step()
    while loop.state_sync.is_behind and asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(LOOK_EVERY_S)  # the content of a last round may still arrive
        await loop.begin_step()


async def replay(loop: EndingLoop) -> None:
    """Apply the rounds that were decided without this peer and are here; raise `OutOfStep` if one
    was here, and is gone."""
    while (missed := loop.state_sync.missed()) is not None:
        await loop.apply(missed)


async def take_in_missed(loop: EndingLoop) -> None:
    """Apply the rounds that were decided without this peer, or start over if one is gone."""
    try:
        await replay(loop)
    except OutOfStep as reason:
        await start_over(loop, str(reason))


async def start_over(loop: EndingLoop, reason: str) -> None:
    """Drop the open exchanges and replace this peer's state with the group's; one that is to stop
    keeps its own."""
    await drop(loop.under_way)
    if loop.stop.requested:
        return
    loop.report("adopt", {"reason": reason})
    await (loop.adopt(reason) if loop.adopt is not None else loop.state_sync.adopt())


async def drop(under_way: UnderWay) -> None:
    """Cancel the open exchanges and forget them."""
    await cancel(*under_way.values())
    under_way.clear()
