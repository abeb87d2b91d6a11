"""Serves chunks that lie on a disk, such as data to train on, below all other chunks.

One piece leaves at a time, of each asker in turn. While chunks of rounds and of joins wait to be
served, at most every fourth byte is of these.
"""

import asyncio
import collections
from collections.abc import Awaitable
from typing import Protocol

import msgspec

from farflock.swarm.chunk_server import (
    MAX_ASKERS,
    MAX_WANTS,
    SERVE_TIMEOUT_S,
    ChunkCarrier,
    ChunkServer,
    is_queued,
    piece_bytes,
    piece_of,
)
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Miss, Want

SHARE = 1 / 3  # bytes for each byte of other chunks, while such wait
WAIT_S = 0.02  # between two looks whether others wait
MAX_CREDIT_BYTES = 1 << 20
KEPT_CHUNKS = 4  # in memory: a chunk is asked for in parts


class Lender(Protocol):
    """Numbered chunks on a disk. Only `read` may be slow."""

    @property
    def root(self) -> bytes:
        """The hash of the chunk that lists the others."""
        ...

    @property
    def index_bytes(self) -> int:
        """The size of that chunk."""
        ...

    def __contains__(self, digest: bytes, /) -> bool:
        """Return whether a chunk can be read."""
        ...

    def held(self, first: int, /) -> bytes:
        """Return which chunks can be read, from number `first` on, as `DataHeld` says it."""
        ...

    def read(self, digest: bytes, /) -> Awaitable[bytes | None]:
        """Return a chunk, verified; None if it is not there any more."""
        ...


class Lending:
    """The service of the chunks of lenders, beside that of a store."""

    def __init__(
        self, others: ChunkServer, carrier: ChunkCarrier, dropped: collections.Counter[str]
    ) -> None:
        self._others, self._carrier, self._dropped = others, carrier, dropped
        self.lenders: dict[bytes, Lender] = {}  # by root
        self._wants: dict[PeerId, collections.deque[Want]] = {}  # of the next asker first
        self._read: dict[bytes, bytes] = {}  # the newest last
        self._serves = False
        self._credit, self._seen_bytes = float(MAX_CREDIT_BYTES), 0
        self.sent_bytes = 0

    @property
    def idle(self) -> bool:
        """True if no request waits."""
        return not self._serves

    def __contains__(self, digest: bytes) -> bool:
        return any(digest in lender for lender in self.lenders.values())

    def receive(self, sender: PeerId, want: Want) -> None:
        """Queue a request for a chunk that is lent, or drop and count it."""
        queue = self._wants.get(sender)
        if queue is None:
            if len(self._wants) >= MAX_ASKERS:
                self._dropped["too many askers"] += 1
                return
            queue = self._wants[sender] = collections.deque()
        if is_queued(queue, want):
            return
        if len(queue) >= MAX_WANTS:
            self._dropped["too many wants"] += 1
            return
        queue.append(want)
        if not self._serves:
            self._serves = True
            self._carrier.spawn(self._serve())

    async def _serve(self) -> None:
        try:
            while self._wants:
                asker = next(iter(self._wants))
                queue = self._wants.pop(asker)
                want = queue.popleft()
                if (left := await self._serve_piece(asker, want)) is not None:
                    queue.appendleft(left)
                queue.extend(self._wants.pop(asker, ()))  # asked for meanwhile
                if queue:
                    self._wants[asker] = queue  # behind the others
        finally:
            self._serves = False

    async def _serve_piece(self, asker: PeerId, want: Want) -> Want | None:
        """Send the next piece of a request; return what is left of that."""
        data = await self._chunk(want.digest)
        if data is None:
            self._carrier.send(asker, Miss(want.digest))
            return None
        if want.start >= min(want.stop, len(data)):
            return None
        piece, body = piece_of(want, memoryview(data))
        await self._turn(len(body))
        if not await self._carrier.send_piece(asker, piece, body, SERVE_TIMEOUT_S):
            return None
        self.sent_bytes += len(body)
        start = want.start + piece_bytes(want)
        return msgspec.structs.replace(want, start=start) if start < want.stop else None

    async def _turn(self, size: int) -> None:
        """Wait until no other chunk waits, or this one's share is due."""
        while True:
            new = self._others.sent_bytes - self._seen_bytes
            self._seen_bytes += new
            self._credit = min(self._credit + new * SHARE, MAX_CREDIT_BYTES)
            if not self._others.wants:
                return
            if self._credit >= size:
                self._credit -= size
                return
            await asyncio.sleep(WAIT_S)

    async def _chunk(self, digest: bytes) -> bytes | None:
        found = self._read.pop(digest, None)
        for lender in self.lenders.values() if found is None else ():
            if digest in lender:
                found = await lender.read(digest)
                break
        if found is not None:
            self._read[digest] = found
            if len(self._read) > KEPT_CHUNKS:
                del self._read[next(iter(self._read))]
        return found
