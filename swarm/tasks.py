"""Ends of asyncio tasks that are waited for, and a limit on how long nothing comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable
from typing import Any


async def cancel(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Cancel the tasks, wait until they have ended, and return their results or exceptions."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class Silence:
    """Blocks that end with `TimeoutError` once nothing was heard for so long."""

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, tuple[float, Hashable]] = {}

    @contextlib.asynccontextmanager
    async def limited(self, seconds: float, kind: Hashable = None) -> AsyncIterator[None]:
        """Let the block last as long as something is heard every so many seconds: of this kind, or
        of any if it is None."""
        async with asyncio.timeout(seconds) as limit:
            self._limits[limit] = seconds, kind
            try:
                yield
            finally:
                del self._limits[limit]

    def heard(self, kind: Hashable) -> None:
        """Note that something came."""
        now_s = asyncio.get_running_loop().time()
        for limit, (seconds, wanted) in self._limits.items():
            if wanted in (None, kind) and not limit.expired():
                limit.reschedule(now_s + seconds)
