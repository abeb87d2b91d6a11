"""A run's local history: numbers in `run.db` (sqlite), events in `events.jsonl`.

The live view, `status` and the page read both from other processes while a run writes them, and a run that is
killed leaves them readable: sqlite in WAL mode with NORMAL durability, and one write a line for the events.
"""

import errno
import logging
import math
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

DATABASE = "run.db"
EVENTS = "events.jsonl"
OLDER_EVENTS = "events.1.jsonl"
EVENTS_FILE_BYTES = 16 << 20  # then it becomes OLDER_EVENTS: the two together never exceed twice this
EVENT_BYTES = 64 << 10
COMMIT_ROWS = 100
COMMIT_S = 1.0
_SCHEMA_VERSION = 1
_BUSY_S = 5.0
_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS metrics (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, step INTEGER NOT NULL, time_s REAL NOT NULL, value REAL
);
CREATE INDEX IF NOT EXISTS metrics_by_name ON metrics (name, step);
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""

log = logging.getLogger(__name__)


class HistoryUnusable(Exception):
    """The history cannot be opened, read or written; the message is one sentence with the remedy."""


class History:
    """One run's history; made by `open` (one writer) or `read` (any number of readers). Belongs to one
    thread.

    Metrics are committed by hundreds or once a second, whichever is first, so SIGKILL costs at most the last
    second; events are written at once. `close` commits; use it as a context manager.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection, clock: Callable[[], float]) -> None:
        self._folder = folder
        self._database = database
        self._clock = clock
        self._rows: list[tuple[str, int, float, float]] = []
        self._committed_s = clock()

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float]) -> "History":
        """Open a history for writing, or begin one; `clock` gives the seconds that its rows carry (wall
        time).
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            database = _connect(f"{(folder / DATABASE).absolute().as_uri()}?mode=rwc")
            _prepare(folder, database)
            _end_last_line(folder / EVENTS)
        except (OSError, sqlite3.Error) as error:
            raise _unusable(folder, error) from error
        return cls(folder, database, clock)

    @classmethod
    def read(cls, folder: Path) -> "History":
        """Open a history for queries alone, also while another process writes it."""
        try:
            database = _connect(f"{(folder / DATABASE).absolute().as_uri()}?mode=ro")
            _require_version(folder, database)
        except sqlite3.Error as error:
            raise _unusable(folder, error) from error
        return cls(folder, database, lambda: 0.0)

    def metrics(self, step: int, **values: float) -> None:
        """Note numbers of one step; NaN is kept (a diverged loss is news)."""
        now_s = self._clock()
        self._rows.extend((name, step, now_s, float(value)) for name, value in values.items())
        if len(self._rows) >= COMMIT_ROWS or now_s - self._committed_s >= COMMIT_S:
            self.flush()

    def event(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON value
        """Append one line to events.jsonl, at most 64 kB of JSON; raise `ValueError` if it is longer."""
        line = msgspec.json.encode({"time_s": self._clock(), "kind": kind, **fields}) + b"\n"
        if len(line) > EVENT_BYTES:
            raise ValueError(
                f"an event of kind {kind!r} has {len(line)} bytes, above {EVENT_BYTES}; shorten its fields"
            )
        path = self._folder / EVENTS
        try:
            if path.exists() and path.stat().st_size + len(line) > EVENTS_FILE_BYTES:
                os.replace(path, self._folder / OLDER_EVENTS)
            _append(path, line)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def flush(self) -> None:
        """Commit what is noted; raise `HistoryUnusable` if it cannot be (the rows are then dropped)."""
        rows, self._rows = self._rows, []
        self._committed_s = self._clock()
        try:
            with self._database:
                self._database.executemany("INSERT INTO metrics (name, step, time_s, value) VALUES (?, ?, ?, ?)", rows)
        except sqlite3.Error as error:
            raise _unusable(self._folder, error) from error

    def last(self) -> dict[str, tuple[int, float]]:
        """Step and value of each metric's latest committed row."""
        rows = self._query(
            "SELECT name, step, value FROM metrics WHERE id IN (SELECT MAX(id) FROM metrics GROUP BY name)",
            (),
        )
        return {name: (step, _number(value)) for name, step, value in rows}

    def series(self, name: str, points: int = 500) -> list[tuple[int, float]]:
        """A metric over steps in at most `points` points: (first step, mean value) of equal stretches of
        steps.
        """
        if points < 1:
            raise ValueError(f"a series has at least one point, got {points}")
        rows = self._query(
            "WITH ends AS (SELECT MIN(step) AS low, MAX(step) AS high FROM metrics WHERE name = :name) "
            "SELECT MIN(step), CASE WHEN COUNT(*) = COUNT(value) THEN AVG(value) END FROM metrics, ends "
            "WHERE name = :name GROUP BY (step - low) * :points / (high - low + 1) ORDER BY 1",
            {"name": name, "points": points},
        )
        return [(step, _number(value)) for step, value in rows]

    def events(self, last: int = 20) -> list[dict[str, Any]]:
        """The latest events, oldest first; lines that a crash cut short are left out."""
        lines: list[bytes] = []
        for name in (OLDER_EVENTS, EVENTS):
            try:
                lines += (self._folder / name).read_bytes().splitlines()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _unusable(self._folder, error) from error
        found = [event for line in lines[-2 * last - 2 :] if (event := _event(line)) is not None]
        return found[-last:] if last > 0 else []

    def close(self) -> None:
        """Commit and close; nothing may be noted afterwards."""
        try:
            if self._rows:
                self.flush()
        finally:
            self._database.close()

    def __enter__(self) -> "History":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _query(self, statement: str, arguments: Any) -> list[Any]:  # noqa: ANN401 - sqlite's own types
        try:
            return self._database.execute(statement, arguments).fetchall()
        except sqlite3.Error as error:
            raise _unusable(self._folder, error) from error


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, timeout=_BUSY_S)


def _prepare(folder: Path, database: sqlite3.Connection) -> None:
    _require_version(folder, database)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    database.executescript(_SCHEMA)


def _require_version(folder: Path, database: sqlite3.Connection) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > _SCHEMA_VERSION:
        raise HistoryUnusable(
            f"{folder / DATABASE} has version {version}, this program knows {_SCHEMA_VERSION}; use the newer program"
        )


def _append(path: Path, line: bytes) -> None:
    """Add a whole line in one write, or nothing: a disk that fills up must not leave half of one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if os.write(descriptor, line) < len(line):
            os.ftruncate(descriptor, size_bytes)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(descriptor)


def _end_last_line(path: Path) -> None:
    """After a crash in the middle of a line: end it, so that the next event stands on its own."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        log.debug("left out a broken line of %d bytes in %s", len(line), EVENTS)
        return None


def _number(value: float | None) -> float:
    """sqlite stores NaN as NULL."""
    return math.nan if value is None else value


def _unusable(folder: Path, error: Exception) -> HistoryUnusable:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return HistoryUnusable(
        f"the history in {folder} is unusable ({reason}); check permissions and space, or move {DATABASE} away"
    )
