"""Shards from the web servers that a run's manifest names, where no member delivers them."""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

from farflock.node.data.shard_table import ShardTable
from farflock.node.data.web_folder import (
    SHARD_S,
    SILENT_S,
    BadWebFolder,
    ShardFiles,
    WebFolder,
)
from farflock.swarm.chunk_store import is_intact

REST_S = 60.0  # of a server that failed
# for one shard with the index before it, and their headers, which a server may send byte by byte
ANSWER_S = 2 * (SHARD_S + SILENT_S)

log = logging.getLogger(__name__)

T = TypeVar("T")


async def detached(work: Callable[[], T]) -> T:
    """Compute in a thread of its own, which a process that ends does not wait for: no server may
    hold it up."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def end(conclude: Callable[[Any], None], value: object) -> None:
        if not result.done():
            conclude(value)

    def run() -> None:
        found: tuple[Callable[[Any], None], object]
        try:
            found = result.set_result, work()
        except Exception as error:
            found = result.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(end, *found)

    threading.Thread(target=run, name="web", daemon=True).start()
    return await result


class WebShards:
    """Copies of a run's prepared folders on the web, of data with these roots. `compute` runs what
    waits for servers."""

    def __init__(
        self,
        folders: Sequence[WebFolder],
        roots: Collection[str],
        compute: Callable[[Callable[[], Any]], Awaitable[Any]] = detached,
    ) -> None:
        self._folders, self._roots, self._compute = list(folders), roots, compute
        self._files: dict[str, ShardFiles] = {}  # by root
        self._rests_s: dict[WebFolder, float] = {}  # until when
        self._said: set[str] = set()
        self.fetched_bytes = 0

    async def fetch(self, table: ShardTable, number: int) -> bytes | None:
        """Return a shard, verified; None if no server delivers it. One that fails rests for a
        while; one that serves other data is asked no more."""
        for folder in list(self._folders):
            if _now() < self._rests_s.get(folder, 0.0):
                continue
            try:
                async with asyncio.timeout(ANSWER_S):
                    raw = await self._compute(partial(self._read, folder, table, number))
            except (BadWebFolder, TimeoutError) as error:
                self._rests_s[folder] = _now() + REST_S
                self._warn(str(error) or f"{folder.url} has no answer after {ANSWER_S:.0f} s")
                continue
            if raw is None:
                continue  # the copy of another source
            if is_intact(raw, table.digest(number)):
                self.fetched_bytes += len(raw)
                return bytes(raw)
            if folder in self._folders:
                self._folders.remove(folder)
            self._warn(
                f"{folder.url} sent a false copy of {table.digest(number).hex()[:16]}…, a part of "
                "the run's data; no more data is taken from it"
            )
        return None

    def _read(self, folder: WebFolder, table: ShardTable, number: int) -> bytes | None:
        """Return a shard, unverified; None if the folder is that of another source."""
        root = folder.read_root()
        if root not in self._roots:
            raise BadWebFolder(
                f"{folder.url} has the data {root[:16]}…, on which the run does not train; name a "
                "copy of its folder"
            )
        if root != table.root:
            return None
        files = self._files.get(table.root) or self._files.setdefault(table.root, ShardFiles(table))
        return folder.range(*files.place(number), table.size(number))

    def _warn(self, what: str) -> None:
        """Say a thing once."""
        if what not in self._said:
            self._said.add(what)
            log.warning("data from the web: %s", what)


def _now() -> float:
    return asyncio.get_running_loop().time()
