"""Batches: small chunks that are asked for by one request and come in one piece.

A request, a piece and a task for each of many small chunks would cost far more than their bytes. A
batch is named by its first chunk. The request names the others in `more`, the answer their sizes;
what the holder lacks has size 0 and is left out.
"""

import asyncio
import collections
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from farflock.swarm.chunk_store import Store, digest_of
from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_BATCH_CHUNKS, Piece, Want

BATCH_BYTES = 512 * 1024  # of one answer; with the sizes in its head it fits into a frame
SMALL_BYTES = 32 * 1024  # a chunk that may come in a batch: two fit into the shortest piece
DIGEST_BYTES = 32

SizedChunk = tuple[bytes, int]  # its digest and size


def fitting(chunks: Iterable[SizedChunk], max_bytes: int = BATCH_BYTES) -> list[SizedChunk]:
    """Return the first chunks that one batch may have: small ones, together within `max_bytes`."""
    batch: list[SizedChunk] = []
    left_bytes = min(max_bytes, BATCH_BYTES)
    for digest, size in chunks:
        left_bytes -= size
        if not 0 < size <= SMALL_BYTES or left_bytes < 0 or len(batch) == MAX_BATCH_CHUNKS:
            break
        batch.append((digest, size))
    return batch


def take_batch(left: collections.deque[SizedChunk]) -> list[SizedChunk]:
    """Take the next chunk off `left`, or several small ones to be fetched together."""
    return [left.popleft() for _ in range(max(len(fitting(left)), 1))]


@dataclass(slots=True)
class Batch:
    """Different small chunks that one holder was asked for."""

    holder: PeerId
    entries: Sequence[SizedChunk]
    sizes: tuple[int, ...] = ()  # of the answer: as asked for, or 0
    body: bytes = b""
    ended: bool = False  # answered, or refused
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def size_bytes(self) -> int:
        """The bytes of all chunks."""
        return sum(size for _, size in self.entries)

    @property
    def want(self) -> Want:
        """The request."""
        (digest, size), *others = self.entries
        return Want(digest, 0, size, more=b"".join(digest for digest, _ in others))

    def fill(self, piece: Piece, body: memoryview | bytes) -> bool:
        """Take the answer; return False for one that no correct holder sends.

        A holder of an older build sends the first chunk alone."""
        more = struct.unpack(f"<{len(piece.more) // 4}I", piece.more[: len(piece.more) // 4 * 4])
        sizes = (piece.size, *more, *bytes(max(len(self.entries) - 1 - len(more), 0)))
        good = piece.start == 0 and len(sizes) == len(self.entries) and sum(sizes) == len(body)
        if not good or any(
            got not in (0, size) for got, (_, size) in zip(sizes, self.entries, strict=True)
        ):
            return False
        self.sizes, self.body, self.ended = sizes, bytes(body), True
        return True

    def intact(self) -> tuple[dict[bytes, bytes], int]:
        """Return the chunks that came, by digest, and how many others differed from theirs."""
        chunks, false, at = {}, 0, 0
        for (digest, _), size in zip(self.entries, self.sizes, strict=False):
            data = self.body[at : at + size]
            at += size
            if size and digest_of(data) == digest:
                chunks[digest] = data
            else:
                false += size > 0
        return chunks, false


def is_sensible(want: Want) -> bool:
    """Return whether a correct asker could ask for this, if it is a batch."""
    whole = want.start == 0 and want.stop <= BATCH_BYTES and len(want.more) % DIGEST_BYTES == 0
    return whole or not want.more


def answer(store: Store, want: Want, first: memoryview) -> tuple[Piece, memoryview]:
    """Return the answer to a batch whose first chunk is here: as much as one piece may hold."""
    bodies, sizes, left_bytes = [first], [], BATCH_BYTES - len(first)
    for at in range(0, len(want.more), DIGEST_BYTES):
        data = store.view(want.more[at : at + DIGEST_BYTES])
        if data is None or len(data) > left_bytes:
            sizes.append(0)
        else:
            bodies.append(data)
            sizes.append(len(data))
            left_bytes -= len(data)
    piece = Piece(want.digest, 0, len(first), struct.pack(f"<{len(sizes)}I", *sizes))
    return piece, memoryview(b"".join(bodies))


def absent(entries: Mapping[bytes, int], store: Store) -> dict[bytes, int]:
    """Return the chunks that are not in the store."""
    return {digest: size for digest, size in entries.items() if digest not in store}
