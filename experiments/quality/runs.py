"""Finished runs as lines of one file, published next to the page and resumable on another machine.

A line is a run: its key (which covers the code that it ran through), when it ended, the job, and
the outcome. So a measurement that takes hours can continue elsewhere, and a reader can check a
table's numbers.
"""

import os
import time
from pathlib import Path

import msgspec

from farflock.experiments.reproduce.job import AnyJob, Outcome, key
from farflock.node.errors import Usage

START = b'{"key":'  # of each line


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the file."""

    key: str
    ended: float
    job: AnyJob
    outcome: Outcome


class RunsFile:
    """Runs in a file of JSON lines, written by one process; raise `Usage` for any other content.

    A line cut short by a crash is dropped at the next write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, Entry] = {}
        content = path.read_bytes() if path.exists() else b""
        *lines, cut = content.split(b"\n")
        for number, line in enumerate(lines, 1):
            self._read(number, line)
        if cut and not cut.startswith(START[: len(cut)]):
            raise _another(path, len(lines) + 1)
        self._size = len(content) - len(cut)

    def _read(self, number: int, line: bytes) -> None:
        try:
            entry = msgspec.json.decode(line, type=Entry)
        except msgspec.MsgspecError as error:
            raise _another(self._path, number) from error
        self._entries[entry.key] = entry

    def find(self, job: AnyJob) -> Outcome | None:
        """Return the outcome of exactly this job, or None."""
        entry = self._entries.get(key(job))
        return None if entry is None else entry.outcome

    def keep(self, job: AnyJob, outcome: Outcome) -> None:
        """Append an outcome, and return once it is on the disk."""
        entry = Entry(key=key(job), ended=round(time.time(), 3), job=job, outcome=outcome)
        line = msgspec.json.encode(entry) + b"\n"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "r+b" if self._path.exists() else "wb") as file:
            file.truncate(self._size)
            file.seek(self._size)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._size += len(line)
        self._entries[entry.key] = entry

    def kept_at(self, job: AnyJob) -> float:
        """Return the time at which a job in the file ended, in seconds since 1970."""
        return self._entries[key(job)].ended


def _another(path: Path, number: int) -> Usage:
    return Usage(
        str(path),
        f"line {number} is not a finished run",
        "name a file that `--runs` wrote, or a new one",
    )
