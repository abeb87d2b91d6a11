"""The seam between asyncio and computation: protocol code passes a function and awaits its result.
A process computes in worker threads, a simulation inline."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Compute(Protocol):
    """A way to run a slow function and await its result."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def inline(work: Callable[[], T]) -> T:
    """Compute in the calling task."""
    return work()


class Worker:
    """One thread for one kind of work. Training steps and codec work have a thread each, so that an
    exchange can go on during a long step: torch releases the interpreter lock in its kernels."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; return its result or raise its exception. Cancelling the call
        does not stop the work."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Wait for the running work, drop queued work, and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
