"""The payloads of calls: cut into chunks by the sender, fetched whole by the receiver.

A payload may be larger than a chunk, and only one peer has it: a suspect peer is waited for.
"""

import asyncio
from collections.abc import Hashable, Sequence

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_BODY_BYTES,
    MAX_CHUNK_BYTES,
    MAX_PAYLOAD_CHUNKS,
    MAX_PAYLOADS,
    Payload,
)
from farflock.swarm.peer.context import PeerContext

MAX_PAYLOAD_BYTES = MAX_PAYLOAD_CHUNKS * MAX_CHUNK_BYTES
LOOK_S = 0.1  # between checks on a suspect holder


def require_sendable(body: bytes, payloads: Sequence[bytes] = ()) -> None:
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


def put(context: PeerContext, payloads: Sequence[bytes], pin: Hashable) -> tuple[Payload, ...]:
    """Cut payloads into chunks and keep those until `pin` is released."""
    return tuple(
        tuple((context.store.put(part, pin), len(part)) for part in _cut(payload))
        for payload in payloads
    )


async def fetch(
    context: PeerContext,
    holder: PeerId,
    payloads: Sequence[Payload],
    pin: Hashable,
    timeout_s: float,
) -> tuple[bytes, ...] | None:
    """Fetch whole payloads; None on timeout, a wrong size, or a holder that is dead or lacks them.

    Chunks that arrived are pinned in any case: release `pin` afterwards."""
    chunks = {digest: size for payload in payloads for digest, size in payload}
    fetches = (_fetch(context, holder, *chunk, pin, timeout_s) for chunk in chunks.items())
    if not all(await asyncio.gather(*fetches)):
        return None
    whole = [[context.store.get(digest) or b"" for digest, _ in payload] for payload in payloads]
    announced = [[size for _, size in payload] for payload in payloads]
    if [[len(part) for part in parts] for parts in whole] != announced:
        return None
    return tuple(parts[0] if len(parts) == 1 else b"".join(parts) for parts in whole)


async def _fetch(
    context: PeerContext, holder: PeerId, digest: bytes, size: int, pin: Hashable, timeout_s: float
) -> bool:
    ends_s = context.now() + timeout_s
    while (left_s := ends_s - context.now()) > 0:
        if await context.chunks.fetch(digest, size, lambda: [holder], pin, left_s, final=True):
            return True
        # A suspect holder may come back; a dead one, or a live one without the chunk, is no use.
        if context.life(holder) != "suspect":
            return False
        await asyncio.sleep(LOOK_S)
    return False


def _cut(payload: bytes) -> list[bytes]:
    return [
        payload[start : start + MAX_CHUNK_BYTES]
        for start in range(0, len(payload), MAX_CHUNK_BYTES)
    ]
