"""A peer's chunks, named by the hash of their bytes: in memory, or as views of mapped files."""

from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Protocol

from blake3 import blake3

Chunk = bytes | memoryview  # in memory, or a view of a mapped file
Shelve = Callable[[Sequence[Chunk]], Awaitable[Sequence[Chunk]]]  # moves chunks to a file


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    """Return the name of a chunk: the BLAKE3 hash of its bytes."""
    return blake3(data).digest()


def is_intact(data: bytes | bytearray, digest: bytes) -> bool:
    """True if `data` is the chunk named `digest`."""
    return digest_of(data) == digest


class KeptChunks(Protocol):
    """Chunks of one state that stay on a disk until it has been taken over. Calls may be slow."""

    def get(self, digest: bytes, size: int, /) -> bytes | None:
        """Return a chunk as it was kept, perhaps damaged; None if it is not there."""
        ...

    def put(self, digest: bytes, body: memoryview, /) -> None:
        """Keep a chunk, if there is room."""
        ...

    def keep_only(self, digests: Collection[bytes], /) -> None:
        """Forget all other chunks."""
        ...


class Store:
    """Chunks in memory, or views of mapped files: kept while pinned, then as long as the budget
    allows (oldest go first)."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._chunks: dict[bytes, Chunk] = {}
        self._loose: dict[bytes, None] = {}  # chunks that nobody has pinned, the oldest first
        # How many users pin each chunk: a number, since garbage collections would visit sets.
        self._pins: dict[bytes, int] = {}
        self._pinned_by: dict[Hashable, dict[bytes, None]] = {}  # in order of pinning
        self.size_bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._chunks

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, digest: bytes) -> bytes | None:
        """Return the chunk, or None."""
        found = self._chunks.get(digest)
        return bytes(found) if isinstance(found, memoryview) else found

    def view(self, digest: bytes) -> memoryview | None:
        """Return the chunk as it is stored, or None."""
        found = self._chunks.get(digest)
        return None if found is None else memoryview(found)

    def put(self, data: Chunk, pin: Hashable, verified: bytes | None = None) -> bytes:
        """Keep a chunk at least until `pin` is released; return its digest (or `verified`)."""
        digest = verified or digest_of(data)
        if digest not in self._chunks:
            self._chunks[digest] = data
            self.size_bytes += len(data)
        self.pin(digest, pin)
        self._trim()
        return digest

    async def move(self, pin: Hashable, shelve: Shelve) -> None:
        """Let `shelve` move the chunks of this user out of memory."""
        await self.move_together((pin,), shelve)

    async def move_together(self, pins: Sequence[Hashable], shelve: Shelve) -> None:
        """Let `shelve` move the chunks of these users out of memory, at once."""
        digests = (digest for pin in pins for digest in self.pinned(pin))
        here = {digest: self._chunks[digest] for digest in digests if digest in self}
        moves = await shelve(list(here.values())) if here else ()
        for digest, moved in zip(here, moves, strict=True):
            if digest in self:  # it may have been dropped meanwhile
                self._chunks[digest] = moved

    def pin(self, digest: bytes, pin: Hashable) -> None:
        """Keep a chunk for one more user."""
        mine = self._pinned_by.setdefault(pin, {})
        if digest not in mine:
            mine[digest] = None
            self._pins[digest] = self._pins.get(digest, 0) + 1
            self._loose.pop(digest, None)

    def pins_it(self, digest: bytes, pin: Hashable) -> bool:
        """Return whether this user keeps a chunk."""
        return digest in self._pinned_by.get(pin, ())

    def release(self, pin: Hashable) -> None:
        """Drop all pins of this user; its chunks stay while there is room."""
        self.keep_only((), pin)

    def forget(self, pin: Hashable) -> None:
        """Drop all pins of this user, and its chunks that nobody else has pinned."""
        digests = self.pinned(pin)
        self.release(pin)
        for digest in digests:
            if self._loose.pop(digest, self) is None:
                self.size_bytes -= len(self._chunks.pop(digest))

    @property
    def pins(self) -> tuple[Hashable, ...]:
        """The users that keep any chunk."""
        return tuple(self._pinned_by)

    def pinned(self, pin: Hashable) -> tuple[bytes, ...]:
        """Return the digests of the chunks that this user keeps, in the order of pinning."""
        return tuple(self._pinned_by.get(pin, ()))

    def pinned_bytes(self, pin: Hashable) -> int:
        """Return the size of the chunks here that this user keeps."""
        return sum(len(self._chunks.get(digest, b"")) for digest in self.pinned(pin))

    @property
    def pinned_chunks(self) -> int:
        """The number of chunks that any user has pinned, here already or not."""
        return len(self._pins)

    def keep_only(self, digests: Collection[bytes], pin: Hashable) -> None:
        """Drop this user's pins on all other chunks; those stay while there is room."""
        pinned, wanted = self._pinned_by.pop(pin, {}), set(digests)
        if kept := {digest: None for digest in pinned if digest in wanted}:
            self._pinned_by[pin] = kept
        for digest in (digest for digest in pinned if digest not in kept):
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                if digest in self._chunks:
                    self._loose[digest] = None
        self._trim()

    def _trim(self) -> None:
        while self._loose and self.size_bytes > self.budget_bytes:
            digest = next(iter(self._loose))
            del self._loose[digest]
            self.size_bytes -= len(self._chunks.pop(digest))
