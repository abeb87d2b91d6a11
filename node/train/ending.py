"""How a loop ends, by agreement or by itself, and how it starts over."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from farflock.node.reporting import Report
from farflock.node.train.exchange_client import StopRequest, UnderWay, drop
from farflock.optimizers.method import Progress

ADOPT_TIMEOUT_S = 300.0
LOOK_EVERY_S = 0.05  # for a content that is on its way


class Barrier(Protocol):
    """The end of a run that all peers agree on (end_barrier.py)."""

    def is_due(self, total_tokens: int) -> bool:
        """Whether the run has its tokens."""
        ...

    async def end(self, take_in: Callable[[], Awaitable[None]], stopping: Callable[[], bool]) -> None:
        """Wait until all have ended with the same rounds, which `take_in` applies."""
        ...


class AdoptedState(Protocol):
    """A node's state, as its loop's end sees it (state_sync.py)."""

    @property
    def is_behind(self) -> bool:
        """Whether a decided round is missing in it."""
        ...

    async def adopt(self, timeout_s: float) -> None:
        """Replace it by the run's."""
        ...


class EndingLoop(Protocol):
    """A loop, as its end sees it (node/loop.py)."""

    adopt: Callable[[str], Awaitable[None]] | None
    stop: StopRequest
    under_way: UnderWay

    @property
    def state_sync(self) -> AdoptedState:
        """This node's state in the run."""
        ...

    @property
    def report(self) -> Report:
        """Where to report events."""
        ...

    @property
    def progress(self) -> Progress:
        """Where the run is, as far as this peer knows."""
        ...

    async def settle(self, *, last: bool = False) -> None:
        """Apply what is due, and wait for what must be waited for."""
        ...

    async def begin_step(self) -> Progress:
        """Apply the rounds that were decided without this peer."""
        ...


def is_over(loop: EndingLoop, total_tokens: int, barrier: Barrier | None) -> bool:
    """Whether the run has its tokens: with a barrier by what all agree on, else by this node's estimate."""
    return loop.progress.tokens >= total_tokens if barrier is None else barrier.is_due(total_tokens)


async def end(loop: EndingLoop, barrier: Barrier | None, drain_s: float) -> None:
    """End with the same rounds as everybody else, where there is a barrier; then drain."""

    async def take_in() -> None:
        await loop.settle(last=True)
        await loop.begin_step()

    if barrier is not None:
        await barrier.end(take_in, lambda: loop.stop.requested)
    await drain(loop, max(drain_s, loop.stop.drain_s))


async def drain(loop: EndingLoop, timeout_s: float) -> None:
    """Take in what is still under way, so that nothing is in doubt afterwards."""
    if timeout_s <= 0:
        return
    until_s = asyncio.get_running_loop().time() + timeout_s
    if loop.under_way:
        await asyncio.wait(loop.under_way.values(), timeout=timeout_s)
    await loop.settle()
    await loop.begin_step()
    while loop.state_sync.is_behind and asyncio.get_running_loop().time() < until_s:
        await asyncio.sleep(LOOK_EVERY_S)  # for the content of a last round that was decided without this peer
        await loop.begin_step()


async def start_over(loop: EndingLoop, reason: str) -> None:
    """Give up what is under way and this peer's state, for the group's."""
    await drop(loop.under_way)
    loop.report("adopt", {"reason": reason})
    await (loop.adopt(reason) if loop.adopt is not None else loop.state_sync.adopt(ADOPT_TIMEOUT_S))
