"""Files of lines that stay bounded, and that neither a crash nor a full disk spoils."""

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

FILE_BYTES = 16 << 20  # then a file replaces its older one, so both stay below twice this


@dataclass(frozen=True, slots=True)
class LineFile:
    """One file, such as `events.jsonl`, and its older one, `events.1.jsonl`. Each begins with the
    line `head`, if there is one. Only one process may append; any may read."""

    path: Path
    head: bytes = b""

    @property
    def older(self) -> Path:
        """The path of the older file."""
        return self.path.with_suffix(f".1{self.path.suffix}")

    def mend(self) -> None:
        """End a line that a crash cut short, so that the next one stands alone; a file with another
        head becomes the older one."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        with self.path.open("r+b") as file:
            is_ours = file.read(len(self.head)) == self.head
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        if not is_ours:
            os.replace(self.path, self.older)

    def append(self, line: bytes) -> None:
        """Append a line, which ends with a line break; raise `OSError` if there is no room."""
        if self._size() + len(line) > FILE_BYTES:
            os.replace(self.path, self.older)
        _append(self.path, line if self._size() else self.head + line)

    def lines(self) -> list[bytes]:
        """Return the lines of both files, the older ones first, heads among them."""
        found: list[bytes] = []
        for path in (self.older, self.path):
            with contextlib.suppress(FileNotFoundError):  # the writer may rename one meanwhile
                found += path.read_bytes().splitlines()
        return found

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0


def _append(path: Path, lines: bytes) -> None:
    """Append whole lines in one write, or nothing: a full disk must not leave half a line."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if os.write(descriptor, lines) < len(lines):
            os.ftruncate(descriptor, size_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)
