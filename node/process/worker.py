"""The one border between asyncio and threads: work that computes runs in named single-thread executors.

Training steps and codec work have a thread each, so that an exchange can go on while a long step runs (torch releases
the interpreter lock in its kernels). In simulations nothing of this file is used.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Worker:
    """One thread for one kind of work. Calling it with a function runs that there and awaits its result."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`, or its exception. Cancelling the wait does not stop the work: it ends by itself."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Wait for the running piece of work and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)
