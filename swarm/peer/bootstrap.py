"""Fetching chunks before joining: a newcomer needs them to read the run's manifest and its data.

It knows the run's id, the chunk's digest and a few members' records, but has no view, stream or
peer yet.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple

from farflock.swarm.chunk_store import Store
from farflock.swarm.frame import ProtocolViolation, unpack
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import DataHeld, Miss, Piece
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.data_holders import DataHolders
from farflock.swarm.tasks import cancel


class Visitor(NamedTuple):
    """A visitor's ways to ask: for chunks, and for the holders of data."""

    context: PeerContext
    data_holders: DataHolders


@contextlib.asynccontextmanager
async def visiting(links: Links, run: str, room_bytes: int) -> AsyncIterator[Visitor]:
    """Let a peer ask members for chunks while the block runs, with room for so many bytes."""
    tasks: dict[asyncio.Task[None], None] = {}

    def spawn(work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks[task] = None
        task.add_done_callback(tasks.pop)

    context = PeerContext(run, 0, 0, links, Store(room_bytes), spawn)
    data_holders = DataHolders(context)

    async def receive() -> None:
        while True:
            sender, packed = await links.receive()
            try:
                frame = unpack(packed)
            except ProtocolViolation:
                continue
            if isinstance(frame.message, Piece | Miss):
                context.chunks.receive(sender, frame.message, frame.body)
            elif isinstance(frame.message, DataHeld):
                data_holders.receive(sender, frame.incarnation, frame.message)

    spawn(receive())
    try:
        yield Visitor(context, data_holders)
    finally:
        await cancel(*tasks)


async def fetch_chunk(
    links: Links, run: str, digest: bytes, size: int, holders: Sequence[PeerId], timeout_s: float
) -> bytes | None:
    """Return the verified chunk of this digest from any holder; None if none delivers in time."""
    async with visiting(links, run, size) as (context, _):
        chunks = context.chunks
        there = await chunks.fetch(digest, size, lambda: holders, "bootstrap", timeout_s)
        return chunks.store.get(digest) if there else None
