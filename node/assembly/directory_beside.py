"""A run's directory beside everything else: it is opened when it is first asked, and a node whose
directory cannot be opened, or has died or fallen silent, goes on without it until it is open again.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from farflock.swarm.dht.files import PortTaken
from farflock.swarm.dht.greeting import DirectoryUnreachable
from farflock.swarm.directory import Directory
from farflock.swarm.tasks import cancel

RETRY_S = 2.0  # after the first failure, doubling
LONGEST_RETRY_S = 60.0
WATCH_S = 5.0  # between two looks at the directory

log = logging.getLogger(__name__)


class OpenDirectory(Directory, Protocol):
    """A directory that may end by itself."""

    @property
    def alive(self) -> bool:
        """False once nothing can be reached; it must be closed and opened again."""
        ...

    async def trouble(self) -> str:
        """Return why it must be closed and opened again, as a clause; nothing if it serves."""
        ...


class DirectoryBeside:
    """`Directory` over one that is yet to be opened, and opened again if it ends.

    `announce`, `peers` and `publish_head` do nothing without it; `heads`, which only those ask that
    have no other way into the run, raises what kept it from opening."""

    def __init__(
        self,
        opening: Callable[[], Coroutine[Any, Any, OpenDirectory]],
        opened: Callable[[tuple[str, ...]], object],
    ) -> None:
        """`opened` is called with the directory's addresses."""
        self.failure = ""  # why it is not there; empty: nobody has asked, or nothing is wrong
        self._opening, self._opened = opening, opened
        self._task: asyncio.Task[OpenDirectory] | None = None
        self._inner: OpenDirectory | None = None
        self._watching: asyncio.Task[None] | None = None
        self._again_s, self._pause_s = 0.0, RETRY_S
        self._closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        return () if self._inner is None else self._inner.addresses

    def trouble(self) -> str:
        """Return why the directory is not there; nothing if it is, or if nobody has asked."""
        return self.failure

    async def begin(self) -> None:
        """Open it now, and return once it is open or has failed."""
        await self._there()

    async def open(self) -> OpenDirectory:
        """Return the directory once it is open; raise what keeps it from that."""
        if self._closed:
            raise DirectoryUnreachable("the directory is closed; open another one")
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        if self._task is None or (self._task.done() and self._is_due()):
            self._task = asyncio.create_task(self._open())
        await asyncio.wait([self._task])  # it goes on if the one who asks has no time to wait
        if self._task.cancelled():
            raise DirectoryUnreachable("the directory was closed before it was open")
        return self._task.result()

    def _is_due(self) -> bool:
        """Return whether to open it again."""
        if self._inner is not None:
            return bool(self.failure) or not self._inner.alive
        return asyncio.get_running_loop().time() >= self._again_s

    async def _open(self) -> OpenDirectory:
        before, self._inner = self._inner, None
        try:
            if before is not None:
                await before.close()
            self._inner = await self._opening()
        except Exception as error:  # whatever it is, the node can go on without a directory
            self._again_s = asyncio.get_running_loop().time() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_RETRY_S)
            self.failure = str(error) or type(error).__name__
            if isinstance(error, DirectoryUnreachable | PortTaken):
                raise
            self.failure = f"it cannot be opened ({self.failure}); check that hivemind is complete"
            raise DirectoryUnreachable(f"the directory: {self.failure}") from error
        if self.failure:
            log.info("the directory is open again")
        self.failure, self._pause_s = "", RETRY_S
        self._opened(self._inner.addresses)
        return self._inner

    async def _watch(self) -> None:
        """Open the directory again when it has died or fallen silent, or could not be opened."""
        while True:
            await asyncio.sleep(WATCH_S)
            inner = self._inner
            why = "" if inner is None else await _trouble_of(inner)
            if why and inner is self._inner:  # another one may have been opened meanwhile
                log.warning("the node goes on without the directory, and opens it again: %s", why)
                self.failure = why
            if self._task is not None and self._task.done() and self._is_due():
                await self._there()

    async def _there(self) -> OpenDirectory | None:
        """Return the directory; None if there is none now."""
        before = self.failure
        try:
            return await self.open()
        except (DirectoryUnreachable, PortTaken):
            if self.failure != before:
                log.warning("the node goes on without the directory: %s", self.failure)
            return None

    async def announce(self, run: str, record: bytes) -> bool:
        there = await self._there()
        return there is not None and await there.announce(run, record)

    async def peers(self, run: str) -> list[bytes]:
        there = await self._there()
        return [] if there is None else await there.peers(run)

    async def publish_head(self, run: str, head: bytes) -> bool:
        there = await self._there()
        return there is not None and await there.publish_head(run, head)

    async def heads(self, run: str) -> list[bytes]:
        return [] if self._closed else await (await self.open()).heads(run)

    async def close(self) -> None:
        self._closed = True
        await cancel(*(task for task in (self._watching, self._task) if task is not None))
        if self._inner is not None:
            await self._inner.close()


async def _trouble_of(inner: OpenDirectory) -> str:
    """Return why a directory must be opened again; a look at it that fails is a reason too, since
    nothing is known of what fails in there, and who watches must not end."""
    try:
        return await inner.trouble()
    except Exception as error:
        return f"a look at it failed ({str(error) or type(error).__name__})"
