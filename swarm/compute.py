"""The seam between asyncio and whatever computes: protocol code hands a function in and awaits its result."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Compute(Protocol):
    """Runs a function that takes long, and gives its result. A process runs it in a worker thread (node/process/worker.py), the
    simulator inline."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def inline(work: Callable[[], T]) -> T:
    """Compute here and now: what simulations and tests hand in; a process hands in its worker thread."""
    return work()
