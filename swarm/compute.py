"""The seam between asyncio and whatever computes: protocol code hands a function in and awaits its
result. A process computes in worker threads, a simulation inline."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Compute(Protocol):
    """Runs a function that takes long, and gives its result."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def inline(work: Callable[[], T]) -> T:
    """Compute here and now."""
    return work()


class Worker:
    """One thread for one kind of work. Training steps and codec work have a thread each, so that an
    exchange can go on while a long step runs: torch releases the interpreter lock in its kernels."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, or raise its exception. Cancelling the wait does not stop the
        work: it ends by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Wait for the running piece of work and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
