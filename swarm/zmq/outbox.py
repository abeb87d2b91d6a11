"""Bounded queues between links and sockets: frames to be sent, and frames not yet received.

ZMQ's high-water marks count messages, but memory is bytes: sockets hold few frames, the rest waits
here, counted in bytes.
"""

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId, Sendable, size_of

Received = bytes | memoryview

CONTROL, BULK = 0, 1
LANES = (CONTROL, BULK)

MAX_CONTROL_BYTES = 1024 * 1024  # per peer
MAX_BULK_BYTES = 8 * 1024 * 1024  # per peer
MAX_TOTAL_BYTES = 64 * 1024 * 1024  # bulk of all peers together
MAX_TOTAL_CONTROL_BYTES = 16 * 1024 * 1024  # control of all peers together
MAX_WAITERS = 256
INBOX_BYTES = (8 * 1024 * 1024, 32 * 1024 * 1024)  # control, bulk
FRAME_COST_BYTES = 128  # overhead per queued object: empty frames are not free

_PEER_LIMITS = (MAX_CONTROL_BYTES, MAX_BULK_BYTES)


@dataclass(eq=False, slots=True)
class _Waiter:
    outbox: "Outbox"
    frame: Sendable
    queued: "asyncio.Future[bool]"


@dataclass(slots=True)
class Pool:
    """Bytes of all outboxes together, and callers waiting for room, in order of arrival."""

    limits: tuple[int, int] = (MAX_TOTAL_CONTROL_BYTES, MAX_TOTAL_BYTES)
    used: list[int] = field(default_factory=lambda: [0, 0])
    waiters: deque[_Waiter] = field(default_factory=deque)

    def serve(self) -> None:
        """Queue the frames of waiting callers while there is room."""
        if not self.waiters or self.used[BULK] >= self.limits[BULK]:
            return
        still = deque[_Waiter]()
        for waiter in self.waiters:
            if waiter.queued.done():
                continue
            if waiter.outbox.put(BULK, waiter.frame):
                waiter.queued.set_result(True)
            else:
                still.append(waiter)
        self.waiters = still


class Outbox:
    """Frames waiting for one peer, in order, within limits in bytes; control and bulk are apart."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queues: tuple[deque[Sendable], deque[Sendable]] = (deque(), deque())
        self._used = [0, 0]

    def __bool__(self) -> bool:
        return bool(self._queues[CONTROL] or self._queues[BULK])

    @property
    def bulk_bytes(self) -> int:
        """The bytes of bulk that wait, with the overhead of their frames."""
        return self._used[BULK]

    def put(self, lane: int, frame: Sendable) -> bool:
        """Queue a frame; return False if it exceeds this peer's limit or the total."""
        cost = size_of(frame) + FRAME_COST_BYTES
        pool = self._pool
        if (
            self._used[lane] + cost > _PEER_LIMITS[lane]
            or pool.used[lane] + cost > pool.limits[lane]
        ):
            return False
        self._used[lane] += cost
        pool.used[lane] += cost
        self._queues[lane].append(frame)
        return True

    async def put_bulk(self, frame: Sendable, timeout_s: float) -> bool:
        """Queue a bulk frame, waiting for room; False on timeout or if the outbox is cleared."""
        if self.put(BULK, frame):
            return True
        if len(self._pool.waiters) >= MAX_WAITERS:
            return False
        waiter = _Waiter(self, frame, asyncio.get_running_loop().create_future())
        self._pool.waiters.append(waiter)
        try:
            return await asyncio.wait_for(waiter.queued, timeout_s)
        except TimeoutError:
            return False
        finally:
            with contextlib.suppress(ValueError):  # gone already if it was served
                self._pool.waiters.remove(waiter)

    def head(self, lane: int) -> Sendable | None:
        """Return the oldest waiting frame, or None."""
        return self._queues[lane][0] if self._queues[lane] else None

    def pop(self, lane: int) -> None:
        """Remove the oldest frame, which was sent, and free its room."""
        self._free(lane, self._queues[lane].popleft())
        self._pool.serve()

    def clear(self) -> int:
        """Drop all frames, and those of waiting callers, which get False; return their number."""
        mine = [
            waiter
            for waiter in self._pool.waiters
            if waiter.outbox is self and not waiter.queued.done()
        ]
        for waiter in mine:
            waiter.queued.set_result(False)
        dropped = len(mine)
        for lane in LANES:
            while self._queues[lane]:
                self._free(lane, self._queues[lane].popleft())
                dropped += 1
        self._pool.serve()
        return dropped

    def _free(self, lane: int, frame: Sendable) -> None:
        cost = size_of(frame) + FRAME_COST_BYTES
        self._used[lane] -= cost
        self._pool.used[lane] -= cost


class Inbox:
    """Received frames of all peers; a writer stops reading its sockets while it is `full`."""

    def __init__(self) -> None:
        self._queues: tuple[deque[tuple[PeerId, Received]], deque[tuple[PeerId, Received]]] = (
            deque(),
            deque(),
        )
        self._used = [0, 0]
        self._arrived = asyncio.Event()
        self._closed = False

    def full(self, lane: int) -> bool:
        """Return whether this lane has used up its bytes."""
        return self._used[lane] >= INBOX_BYTES[lane]

    def half_empty(self, lane: int) -> bool:
        """True if a full lane may be read again; any earlier, each frame would wake the sockets."""
        return self._used[lane] <= INBOX_BYTES[lane] // 2

    def put(self, lane: int, peer: PeerId, frame: Received) -> None:
        """Add a frame; it may exceed the limit by this one frame."""
        self._used[lane] += len(frame) + FRAME_COST_BYTES
        self._queues[lane].append((peer, frame))
        self._arrived.set()

    async def get(self) -> tuple[int, PeerId, Received]:
        """Return the next lane, sender and frame, control first; `ConnectionError` once closed."""
        while True:
            if self._closed:
                raise ConnectionError("the links are closed")
            for lane in LANES:
                if self._queues[lane]:
                    peer, frame = self._queues[lane].popleft()
                    self._used[lane] -= len(frame) + FRAME_COST_BYTES
                    return lane, peer, frame
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        """Wake waiting readers, which raise."""
        self._closed = True
        self._arrived.set()
