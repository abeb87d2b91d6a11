"""A limit on how long nothing comes, for what waits for anything of a kind to come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Silence:
    """Blocks that end with `TimeoutError` once nothing was heard for so long."""

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, float] = {}

    @contextlib.asynccontextmanager
    async def limited(self, seconds: float) -> AsyncIterator[None]:
        """Let the block last as long as something is heard every so many seconds."""
        async with asyncio.timeout(seconds) as limit:
            self._limits[limit] = seconds
            try:
                yield
            finally:
                del self._limits[limit]

    def heard(self) -> None:
        """Note that something came."""
        now_s = asyncio.get_running_loop().time()
        for limit, seconds in self._limits.items():
            if not limit.expired():
                limit.reschedule(now_s + seconds)
