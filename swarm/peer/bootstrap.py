"""Fetching one chunk before joining: a newcomer needs it to read the run's manifest.

It knows the run's id, the chunk's digest and a few members' records, but has no view, stream or
peer yet.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from farflock.swarm.chunk_store import Store
from farflock.swarm.context import PeerContext
from farflock.swarm.frame import ProtocolViolation, unpack
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import Miss, Piece
from farflock.swarm.tasks import cancel


async def fetch_chunk(
    links: Links, run: str, digest: bytes, size: int, holders: Sequence[PeerId], timeout_s: float
) -> bytes | None:
    """Return the verified chunk of this digest from any holder; None if none delivers in time."""
    tasks: dict[asyncio.Task[None], None] = {}

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks[task] = None
        task.add_done_callback(tasks.pop)

    store = Store(budget_bytes=size)
    context = PeerContext(run, 0, 0, links, store, spawn)

    async def receive() -> None:
        while True:
            sender, packed = await links.receive()
            try:
                frame = unpack(packed)
            except ProtocolViolation:
                continue
            if isinstance(frame.message, Piece | Miss):
                context.chunks.receive(sender, frame.message, frame.body)

    spawn(receive())
    try:
        there = await context.chunks.fetch(digest, size, lambda: holders, "bootstrap", timeout_s)
        return store.get(digest) if there else None
    finally:
        await cancel(*tasks)
