"""The files of a run's data or of its base, fetched from members or from web servers and checked.

A file comes in pieces from whichever members have them. What no member has, a copy in the web may
have. Whatever reads a large file in another thread ends soon after the task that awaits it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from farflock.node.data.index import INDEX_NAME, PIECE_BYTES, AfterPiece
from farflock.node.data.local_data import Arrival, LocalData, NamedFile
from farflock.node.data.mirror import BadMirror, Mirror, MirrorStream
from farflock.swarm.chunks import Chunks
from farflock.swarm.compute import Compute
from farflock.swarm.links import PeerId
from farflock.swarm.tasks import cancel

PARALLEL = 4  # pieces under way at once
PIECE_TIMEOUT_S = 1800.0  # of one piece, as long as something comes of it
SILENT_TIMEOUT_S = 15.0  # of a holder, before another is asked
LACKING_S = 30.0  # before a member that lacked a file is asked for it again
LOOK_EVERY_S = 1.0
WARN_EVERY_S = 60.0  # while no member has what is needed

T = TypeVar("T")
FileProgress = Callable[[int], None]  # bytes of a file that are here

log = logging.getLogger(__name__)


class NothingCame(Exception):
    """Something was fetched for too long without any progress."""


class ReadingEnded(Exception):
    """The task that awaited what was read from files is gone."""


def _unseen(here_bytes: int) -> None:
    """Let nobody know how much of a file is here."""


class DataFetcher:
    """Fetches the index that `local` has the root of, and files that it lists. `members` are the
    peers to ask now; `work` runs what reads, writes and hashes files. `subject` names, for whoever
    waits, what the files belong to."""

    def __init__(
        self,
        local: LocalData,
        chunks: Chunks,
        members: Callable[[], Sequence[PeerId]],
        mirrors: Sequence[Mirror],
        work: Compute,
        subject: str = "the data",
    ) -> None:
        self.local, self.members, self.work, self._subject = local, members, work, subject
        self._chunks, self._mirrors = chunks, tuple(mirrors)
        self._lacking: dict[tuple[PeerId, str], float] = {}  # until when they are not asked
        self._holders: dict[str, dict[PeerId, None]] = {}
        self._warned_s: dict[Mirror, float] = {}
        self.came_s = 0.0  # when something last came, or was read from the disk
        self.waits_for = ""  # in words, for the status
        self.fetched: dict[str, int] = {}  # SHA-256 and bytes of each file that came
        chunks.store.lenders["data", local.root] = local

    @property
    def is_alone(self) -> bool:
        """True if there is nobody to ask."""
        return not (self.members() or self._mirrors)

    async def index_bytes(self) -> bytes:
        """Return the index, which is fetched if it is not here; wait as long as nobody has it.

        A web server may send anything: the reader compares it with the root, and then keeps it."""
        raw = await self.work(self.local.index_bytes)
        while raw is None:
            raw = await self._index_from_members()
            for mirror in self._mirrors if raw is None else ():
                with self._warned(mirror):
                    raw = raw or await self.work(partial(mirror.read, INDEX_NAME, PIECE_BYTES))
            if raw is None:
                await asyncio.sleep(LOOK_EVERY_S)
        return raw

    async def coming(self, fetching: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return the result of what fetches; end it and raise `NothingCame` once nothing has come
        for `timeout_s`."""
        task, self.came_s = asyncio.ensure_future(fetching), _now()
        try:
            while not task.done():
                left_s = self.came_s + timeout_s - _now()
                if left_s <= 0:
                    raise NothingCame
                await asyncio.wait([task], timeout=left_s)
            return task.result()
        finally:
            await cancel(task)

    async def reading(self, read: Callable[[AfterPiece], T]) -> T:
        """Run what reads large files in `work`; it ends with a piece if this task is cancelled."""
        loop, cancelled = asyncio.get_running_loop(), False

        def after(size: int) -> None:
            if cancelled:
                raise ReadingEnded
            self.came_s = loop.time()

        try:
            return await self.work(partial(read, after))
        except asyncio.CancelledError:
            cancelled = True
            raise

    async def _index_from_members(self) -> bytes | None:
        digest, pin = bytes.fromhex(self.local.root), ("data index", self.local.root)
        for peer in self._order(INDEX_NAME, 0):
            size = await self._chunks.sizes.ask(digest, peer, SILENT_TIMEOUT_S)
            if size is not None and await self._fetched(peer, digest, size, pin):
                raw = self._chunks.store.get(digest)
                self._chunks.store.forget(pin)
                return raw
        return None

    async def bring(
        self,
        file: NamedFile,
        keep: Collection[str] = (),
        progress: FileProgress = _unseen,
        *,
        patient: bool = True,
    ) -> bool:
        """Fetch a file, unless it is here, and return whether it is. As long as nobody has it, wait
        if `patient`. Those whose SHA-256 is in `keep` do not make room for it."""
        if await self.reading(partial(self.local.has, file)):
            return True
        arrival = await self.reading(partial(self.local.arrival, file, keep))
        try:
            if not await self._fill(file, arrival, progress, patient=patient):
                return False
            await self.work(partial(self.local.arrived, file, arrival))
            self.fetched[file.sha256] = file.size
            return True
        finally:
            self.waits_for = ""
            self._holders.pop(file.sha256, None)
            self._lacking = {
                key: until_s for key, until_s in self._lacking.items() if key[1] != file.sha256
            }
            arrival.close()

    async def _fill(
        self, file: NamedFile, arrival: Arrival, progress: FileProgress, *, patient: bool
    ) -> bool:
        """Fetch all missing pieces of a file, and return whether they came. As long as nobody has
        them, wait if `patient`."""
        warned_s = _now()
        progress(arrival.here_bytes)
        while arrival.missing:
            left = len(arrival.missing)
            self.waits_for = f"{file.name} of {self._subject} ({left} pieces are missing)"
            await self._from_members(file, arrival, progress)
            if arrival.missing:
                await self._from_mirrors(file, arrival, progress)
            if len(arrival.missing) < left:
                continue
            if not patient:
                return False
            if _now() - warned_s > WARN_EVERY_S:
                warned_s = _now()
                log.warning(
                    "no member has %s of %s; this node waits for it", file.name, self._subject
                )
            await asyncio.sleep(LOOK_EVERY_S)
        return True

    async def _from_members(
        self, file: NamedFile, arrival: Arrival, progress: FileProgress
    ) -> None:
        """Fetch the missing pieces, several at once, from the members that have them."""
        left = sorted(arrival.missing)

        async def some() -> None:
            while left:
                place = left.pop(0)
                if not await self._piece(file, arrival, place):
                    return
                progress(arrival.here_bytes)

        await _together(some() for _ in range(min(PARALLEL, len(left))))

    async def _piece(self, file: NamedFile, arrival: Arrival, place: int) -> bool:
        """Fetch one piece from any member; return False if none has it."""
        digest, size = arrival.missing[place]
        pin = ("data", digest)
        for peer in self._order(file.sha256, place):
            if not await self._fetched(peer, digest, size, pin):
                self._lacking[peer, file.sha256] = _now() + LACKING_S
                continue
            self._holders.setdefault(file.sha256, {})[peer] = None
            piece = self._chunks.store.view(digest)
            try:
                if piece is not None and await self.work(partial(arrival.put, place, piece)):
                    self.came_s = _now()
                    return True
            finally:
                self._chunks.store.forget(pin)
        return False

    async def _fetched(self, peer: PeerId, digest: bytes, size: int, pin: object) -> bool:
        """Fetch a chunk from one peer into the store; give up one from which nothing comes."""
        fetch, began_s = self._chunks.fetch, _now()
        fetching = asyncio.ensure_future(
            fetch(digest, size, lambda: (peer,), pin, PIECE_TIMEOUT_S, final=True)
        )
        try:
            while not fetching.done():
                await asyncio.wait([fetching], timeout=LOOK_EVERY_S)
                heard_s = max(self._chunks.heard_s(peer), began_s)
                self.came_s = max(self.came_s, self._chunks.heard_s(peer))
                if _now() - heard_s > SILENT_TIMEOUT_S:
                    return False
            return fetching.result()
        finally:
            await cancel(fetching)

    async def _from_mirrors(
        self, file: NamedFile, arrival: Arrival, progress: FileProgress
    ) -> None:
        """Download the missing pieces from the first web server that has them."""
        for mirror in self._mirrors:
            with self._warned(mirror):
                while arrival.missing:
                    stream = await self.work(partial(mirror.stream, file, arrival))
                    await self._from_stream(stream, arrival, progress)
                return

    async def _from_stream(
        self, stream: MirrorStream, arrival: Arrival, progress: FileProgress
    ) -> None:
        try:
            while await self.work(partial(stream.take, arrival)):
                self.came_s = _now()
                progress(arrival.here_bytes)
        finally:
            stream.close()

    @contextlib.contextmanager
    def _warned(self, mirror: Mirror) -> Iterator[None]:
        """Turn what a server did wrong into a warning, now and then: another may do better."""
        try:
            yield
        except BadMirror as reason:
            if _now() >= self._warned_s.get(mirror, 0.0):
                self._warned_s[mirror] = _now() + WARN_EVERY_S
                log.warning("%s", reason)

    def _order(self, name: str, place: int) -> list[PeerId]:
        """Return the members to ask, those known to have the file first; different pieces are asked
        of different members."""
        now_s = _now()
        asked = [peer for peer in self.members() if self._lacking.get((peer, name), 0.0) <= now_s]
        known = [peer for peer in asked if peer in self._holders.get(name, {})]
        others = [peer for peer in asked if peer not in known]
        return [*_rotated(known, place), *_rotated(others, place)]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _rotated(peers: Sequence[PeerId], place: int) -> list[PeerId]:
    at = place % len(peers) if peers else 0
    return [*peers[at:], *peers[:at]]


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of the works to their end; raise the first error, as they meet the same ones."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
