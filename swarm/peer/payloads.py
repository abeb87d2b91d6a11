"""The payloads of calls: cut into chunks by the sender, fetched whole by the receiver.

A payload may be larger than a chunk, and only one peer has it: a suspect peer is waited for. Small
payloads travel with the first copy of their message, as bulk. They are announced like all others,
and checked as fetched chunks are; a receiver that lacks them fetches them.

A large payload of an answer may stay where it was made (`Left`, left.py). A later call names the
members that hold it, and the receiver of that call fetches it there.
"""

import asyncio
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from farflock.swarm.chunk_store import digest_of
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_HOLDERS,
    MAX_INLINE_BYTES,
    MAX_PAYLOAD_CHUNKS,
    MAX_PAYLOADS,
    Payload,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.tasks import cancel

MAX_PAYLOAD_BYTES = MAX_PAYLOAD_CHUNKS * MAX_CHUNK_BYTES
LOOK_S = 0.1  # between checks on a suspect holder
# Of the slowest line on which a repeat, which is small, does not overtake the bulk before it.
INLINE_BYTES_PER_S = 125_000
HOLDER_TIMEOUT_S = 3.0  # without a piece from any holder that a call names; well below a pass's
MAX_DELIVERED = 4096  # chunks that are remembered as delivered, over all peers


@dataclass(frozen=True, slots=True)
class Left:
    """A payload that stayed where it was made: its chunks, and the members that hold them. The
    maker is the first, and keeps them for its caller's call `number`."""

    chunks: Payload
    holders: tuple[PeerId, ...]
    number: int

    def __len__(self) -> int:
        """Return the payload's size in bytes."""
        return sum(size for _, size in self.chunks)

    @property
    def call(self) -> tuple[PeerId, int]:
        """The maker, and the call for which it keeps the payload."""
        return self.holders[0], self.number

    def held_by(self, peer: PeerId) -> "Left":
        """Return this payload with one more holder; beside the maker, only the last are named."""
        maker, *others = (holder for holder in self.holders if holder != peer)
        if peer == self.holders[0]:
            return self
        return replace(self, holders=(maker, *others[len(others) - MAX_HOLDERS + 2 :], peer))


Given = bytes | Left  # a payload of a call, as its caller has it


def require_sendable(body: bytes, payloads: Sequence[Given] = ()) -> None:
    """Raise `ValueError` for a body or payloads too large for a call or an answer."""
    largest = max(map(len, payloads), default=0)
    if len(body) > MAX_BODY_BYTES:
        raise ValueError(
            f"a call's body has {len(body)} bytes, and at most {MAX_BODY_BYTES} fit; "
            "send the rest as a payload"
        )
    if len(payloads) > MAX_PAYLOADS or largest > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a call has {len(payloads)} payloads of up to {largest} bytes, and carries at most "
            f"{MAX_PAYLOADS} of at most {MAX_PAYLOAD_BYTES} bytes each; join or cut them"
        )


def sizes_of(payloads: Sequence[Payload]) -> tuple[int, ...]:
    """Return the announced size of each payload in bytes."""
    return tuple(sum(size for _, size in payload) for payload in payloads)


def put(context: PeerContext, payloads: Sequence[Given], pin: Hashable) -> tuple[Payload, ...]:
    """Cut payloads into chunks and keep those until `pin` is released; name those of others."""
    return tuple(
        payload.chunks
        if isinstance(payload, Left)
        else tuple((context.store.put(data, pin), len(data)) for data in _cut(payload))
        for payload in payloads
    )


def holders_of(payloads: Sequence[Given]) -> tuple[tuple[PeerId, ...], ...]:
    """Return the holders that a call names for each payload; () if the caller has them all."""
    named = tuple(payload.holders if isinstance(payload, Left) else () for payload in payloads)
    return named if any(named) else ()


def inline_of(
    payloads: Sequence[Given],
    announced: Sequence[Payload],
    known: Callable[[bytes], bool] = lambda digest: False,
) -> tuple[bytes, ...]:
    """Return the different payloads, in order, if all of them fit into one message; otherwise
    nothing. Leave out those that the receiver is `known` to have, and those of other holders."""
    inline = {
        chunks[0][0]: payload
        for payload, chunks in zip(payloads, announced, strict=True)
        if chunks and isinstance(payload, bytes) and not known(chunks[0][0])
    }
    fits = sum(map(len, inline.values())) <= MAX_INLINE_BYTES
    return tuple(inline.values()) if fits else ()


@dataclass(slots=True)
class Delivered:
    """The last chunks that peers have had from this one: they likely have them still."""

    _chunks: dict[tuple[PeerId, bytes], None] = field(default_factory=dict)  # oldest first

    def add(self, peer: PeerId, payloads: Sequence[Payload]) -> None:
        """Note that a peer has had these payloads."""
        for digest, _ in itertools.chain.from_iterable(payloads):
            self._chunks.pop((peer, digest), None)
            self._chunks[peer, digest] = None
        for chunk in list(itertools.islice(self._chunks, max(len(self) - MAX_DELIVERED, 0))):
            del self._chunks[chunk]

    def had(self, peer: PeerId, digest: bytes) -> bool:
        """True if this peer has had the chunk."""
        return (peer, digest) in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)


def inline_s(inline: Sequence[bytes]) -> float:
    """Return the time that payloads inside a message may take to arrive after a small message."""
    return sum(map(len, inline)) / INLINE_BYTES_PER_S


def take_inline(
    context: PeerContext, payloads: Sequence[Payload], inline: Sequence[bytes], pin: Hashable
) -> None:
    """Keep the chunks that came with their message; drop bytes that no payload announces."""
    announced = {chunk for payload in payloads for chunk in payload}
    for data in inline:
        if ((digest := digest_of(data)), len(data)) in announced:
            context.store.put(data, pin, verified=digest)
        else:
            context.drop("payload that its call does not announce")


async def fetch_left(
    context: PeerContext, left: Left, pin: Hashable, timeout_s: float
) -> bytes | None:
    """Fetch a payload from the members among its holders; None once none of them has it, or has
    sent anything for `HOLDER_TIMEOUT_S`.

    Chunks that arrived are pinned in any case: release `pin` afterwards."""
    if context.chain is None:
        return None
    able = [
        holder
        for holder in left.holders
        if holder != context.me and context.views.newest.lists(holder)
    ]
    began_s = heard_s = context.now()
    work = fetch(context, able, (left.chunks,), pin, timeout_s)
    fetching = asyncio.get_running_loop().create_task(work)
    try:
        while not fetching.done() and (left_s := heard_s + HOLDER_TIMEOUT_S - context.now()) > 0:
            await asyncio.wait((fetching,), timeout=left_s)
            heard_s = max([began_s, *map(context.chunks.heard_s, able)])
        found = fetching.result() if fetching.done() else None
    finally:
        await cancel(fetching)
    return None if found is None else found[0]


async def fetch(
    context: PeerContext,
    holders: Sequence[PeerId],
    payloads: Sequence[Payload],
    pin: Hashable,
    timeout_s: float,
) -> tuple[bytes, ...] | None:
    """Fetch whole payloads; None on timeout, a wrong size, or holders that are dead or lack them.

    Chunks that arrived are pinned in any case: release `pin` afterwards."""
    chunks = {digest: size for payload in payloads for digest, size in payload}
    missing = []
    for chunk in chunks.items():
        if chunk[0] in context.store:  # as all that came with their message are: no task is needed
            context.store.pin(chunk[0], pin)
        else:
            missing.append(_fetch(context, holders, *chunk, pin, timeout_s))
    if missing and not all(await asyncio.gather(*missing)):
        return None
    whole = [[context.store.get(digest) or b"" for digest, _ in payload] for payload in payloads]
    announced = [[size for _, size in payload] for payload in payloads]
    if [[len(data) for data in found] for found in whole] != announced:
        return None
    return tuple(found[0] if len(found) == 1 else b"".join(found) for found in whole)


async def _fetch(
    context: PeerContext,
    holders: Sequence[PeerId],
    digest: bytes,
    size: int,
    pin: Hashable,
    timeout_s: float,
) -> bool:
    ends_s = context.now() + timeout_s
    while (left_s := ends_s - context.now()) > 0:
        if await context.chunks.fetch(digest, size, lambda: holders, pin, left_s, final=True):
            return True
        # A suspect holder may come back; a dead one, or a live one without the chunk, is no use.
        if all(context.life(holder) != "suspect" for holder in holders):
            return False
        await asyncio.sleep(LOOK_S)
    return False


def _cut(payload: bytes) -> list[bytes]:
    return [
        payload[start : start + MAX_CHUNK_BYTES]
        for start in range(0, len(payload), MAX_CHUNK_BYTES)
    ]
