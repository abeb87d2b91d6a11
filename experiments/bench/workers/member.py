"""A worker's way into a swarm of workers: real links on its host, and records from its owner.

There is no directory: the owner passes all records to all workers, so that the benchmark measures
the swarm alone.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec

from farflock.experiments.bench.workers.fleet import Owner
from farflock.node.assembly.peer_world import Clock, PeerWorld, Workers, peer_over
from farflock.swarm.identity import Identity
from farflock.swarm.peer.peer import Peer, RunTerms
from farflock.swarm.protocol.views import View
from farflock.swarm.zmq.links import LinkOptions, ZmqLinks

RUN = "bench"
SEED = 20_261_121
TERMS = RunTerms(RUN, SEED, view_s=2.0)
JOIN_TIMEOUT_S = 60.0
POLL_S = 0.02


class Place(msgspec.Struct, frozen=True):
    """This worker's number, the number of workers, and the address of its host."""

    number: int
    count: int
    host: str


@contextlib.asynccontextmanager
async def member(
    owner: Owner | None,
    place: Place,
    compute: Callable[[Callable[[], Any]], Awaitable[Any]],
    terms: RunTerms = TERMS,
    role: str | None = None,
) -> AsyncIterator[Peer]:
    """Run a peer on real links, not yet in any view; send its record to the owner, if any. Its
    record has this `role`; without one, that of a whole model."""
    identity = Identity.from_seed(place.number.to_bytes(32, "big"))
    options = LinkOptions(incarnation=place.number + 1, listen=f"tcp://{place.host}:0")
    links = await ZmqLinks.open(identity, RUN, options)
    try:
        record = links.record(role=role)
        world = PeerWorld(links, None, Clock(rests=True), Workers(compute))
        peer = peer_over(world, identity, terms)
        async with peer.running():
            if owner is not None:
                owner.say("record", record=record.hex())
            yield peer
    finally:
        await links.close()


async def meet(
    owner: Owner,
    peer: Peer,
    place: Place,
    found: Callable[[], None],
    join: Callable[[list[bytes], float], Awaitable[None]],
) -> View:
    """Start the run if this is worker 0, else join it; return the view that has all workers."""
    records = [bytes.fromhex(record) for record in (await owner.command("records"))["records"]]
    if place.number == 0:
        for blob in records[1:]:
            peer.membership.book.learn(blob)
        found()
    else:
        await join(records[:1], JOIN_TIMEOUT_S)
    async with asyncio.timeout(JOIN_TIMEOUT_S):
        # The chain of views has no event to wait for.
        while len(peer.context.views.newest.members) < place.count:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
    for other in records:  # so that no peer has to dial while it is measured
        peer.membership.book.learn(other)
    return peer.context.views.newest
