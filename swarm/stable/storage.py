"""The seam between a voter and its disk: a few named files of bytes that outlast its process.

What agreement rests on is written before it is told (Lamport's "stable storage"), so that a voter
that restarts still knows what it promised.
"""

from typing import Protocol


class StableStorage(Protocol):
    """Bytes by name, kept until they are replaced."""

    def read(self, name: str) -> bytes:
        """Return what was written last; empty if there is nothing."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Replace what is kept under a name; it is lasting once this returns. Raise `OSError` if
        it cannot be kept: what was there before then stays."""
        ...


class MemoryStorage:
    """Storage that outlasts a peer, but not its process: for simulations."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def read(self, name: str) -> bytes:
        """Return what was written last; empty if there is nothing."""
        return self._kept.get(name, b"")

    def write(self, name: str, content: bytes) -> None:
        """Replace what is kept under a name."""
        self._kept[name] = content
