"""A node's place in its samples, on disk: a killed node goes on from there.

The file has the run's id (32 hex digits) and a cursor (node/data/cursor.py).
"""

from pathlib import Path

from farflock.node.data.cursor import MAX_CURSOR_BYTES
from farflock.node.durable import write_durably

FILE_NAME = "samples.cursor"
_RUN_CHARS = 32


class SamplePosition:
    """The position of the node with this folder in a run."""

    def __init__(self, folder: Path, run: str) -> None:
        self._path, self._run = folder / FILE_NAME, run.encode()

    def read(self) -> bytes:
        """Return the cursor; nothing if there is none, or that of another run."""
        try:
            with self._path.open("rb") as file:
                raw = file.read(_RUN_CHARS + MAX_CURSOR_BYTES + 1)
        except FileNotFoundError:
            return b""
        return raw[_RUN_CHARS:] if raw[:_RUN_CHARS] == self._run else b""

    def write(self, cursor: bytes) -> None:
        """Keep the cursor, and wait until it is on the disk."""
        write_durably(self._path, self._run + cursor)
