"""Questions of a newcomer before it joins: for the run's terms, and for chunks of its data.

It knows the run's id and how to reach a few members, but has no view, stream or peer yet.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from farflock.swarm.chunk_store import Store
from farflock.swarm.frame import ProtocolViolation, unpack
from farflock.swarm.links import Links, PeerId
from farflock.swarm.messages import DataHeld, Miss, Piece, Terms, TermsQuery
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.data_holders import DataHolders
from farflock.swarm.tasks import cancel

MAX_WAITING = 16  # answers that nobody has read
ASK_EVERY_S = 0.5  # a question to a peer that is being dialled may be lost


class Visitor(NamedTuple):
    """A visitor's ways to ask: for chunks, and for the holders of data; and what came unasked."""

    context: PeerContext
    data_holders: DataHolders
    terms: asyncio.Queue[tuple[PeerId, Terms]]


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
    terms = asyncio.Queue[tuple[PeerId, Terms]](MAX_WAITING)

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
            elif isinstance(frame.message, Terms) and not terms.full():
                terms.put_nowait((sender, frame.message))

    spawn(receive())
    try:
        yield Visitor(context, data_holders, terms)
    finally:
        await cancel(*tasks)


async def fetch_chunk(
    links: Links, run: str, digest: bytes, size: int, holders: Sequence[PeerId], timeout_s: float
) -> bytes | None:
    """Return the verified chunk of this digest from any holder; None if none delivers in time."""
    async with visiting(links, run, size) as visitor:
        chunks = visitor.context.chunks
        there = await chunks.fetch(digest, size, lambda: holders, "bootstrap", timeout_s)
        return chunks.store.get(digest) if there else None


async def ask_terms(
    links: Links,
    run: str,
    members: Sequence[PeerId],
    fits: Callable[[PeerId, Terms], bool],
    timeout_s: float,
) -> tuple[PeerId, Terms] | None:
    """Ask members for the run's terms until one gives an answer that fits; None if none does."""
    async with visiting(links, run, 0) as visitor:

        async def ask() -> None:
            while True:
                for member in members:
                    visitor.context.send(member, TermsQuery())
                await asyncio.sleep(ASK_EVERY_S)

        visitor.context.spawn(ask())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    sender, terms = await visitor.terms.get()
                    if sender in members and fits(sender, terms):
                        return sender, terms
    return None
