"""A run's local history: numbers (sqlite `run.db`), events and applied rounds (`*.jsonl`).

The live view, `status` and the page read them from other processes while a run writes, and a killed
run leaves them readable: sqlite in WAL mode (where the file system can) with NORMAL durability, one
write per line. All are
bounded: line files are rotated, and means over `ROLL` steps replace old numbers.
"""

import logging
import math
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from farflock.node.state.line_file import LineFile

DATABASE, EVENTS, RECEIPTS = "run.db", "events.jsonl", "receipts.jsonl"
LINE_BYTES = 64 << 10
COMMIT_ROWS = 100
COMMIT_S = 1.0
KEPT = 10_000  # newest steps, and newest spans of each length, that are kept unmerged
ROLL = 100  # older rows per mean
ROLL_ROWS = 5_000  # new rows between two roll-ups
_SCHEMA_VERSION = 2
_BUSY_S = 5.0
_NO_WAL = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL)  # shared memory or its locks are missing
_SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS metrics (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    step INTEGER NOT NULL,
    time_s REAL NOT NULL,
    value REAL,
    span INTEGER NOT NULL DEFAULT 1,
    count INTEGER NOT NULL DEFAULT 1
);
CREATE INDEX IF NOT EXISTS metrics_by_name ON metrics (name, step);
PRAGMA user_version = {_SCHEMA_VERSION};
COMMIT;
"""
_WIDEN = """
BEGIN;
ALTER TABLE metrics ADD COLUMN span INTEGER NOT NULL DEFAULT 1;
ALTER TABLE metrics ADD COLUMN count INTEGER NOT NULL DEFAULT 1;
COMMIT;
"""
_MEAN = "CASE WHEN COUNT(*) = COUNT(value) THEN SUM(value * count) / SUM(count) END"

log = logging.getLogger(__name__)


class HistoryUnusable(Exception):
    """The history cannot be opened, read or written; the message names the remedy."""


class History:
    """One run's history, made by `open` (one writer) or `read` (any number of readers).

    Only one thread may use it. Metrics are committed every `COMMIT_ROWS` rows or once a second,
    whichever is first, so a SIGKILL loses at most the last second; events are written at once.
    `close` commits; use it as a context manager.
    """

    def __init__(
        self, folder: Path, database: sqlite3.Connection, clock: Callable[[], float]
    ) -> None:
        self._folder = folder
        self._database = database
        self._clock = clock
        self._rows: list[tuple[str, int, float, float]] = []
        self._unrolled = 0
        self._committed_s = clock()

    @classmethod
    def open(cls, folder: Path, clock: Callable[[], float]) -> "History":
        """Open or create a history for writing; `clock` returns the wall time (s) for its rows."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            database = _prepared(folder)
            for name in (EVENTS, RECEIPTS):
                LineFile(folder / name).mend()
        except (OSError, sqlite3.Error) as error:
            raise _unusable(folder, error) from error
        return cls(folder, database, clock)

    @classmethod
    def read(cls, folder: Path) -> "History":
        """Open a history for queries only, even while another process writes it."""
        try:
            database = _connect(f"{(folder / DATABASE).absolute().as_uri()}?mode=ro")
            _require_version(folder, database)
        except sqlite3.Error as error:
            raise _unusable(folder, error) from error
        return cls(folder, database, lambda: 0.0)

    def metrics(self, step: int, **values: float) -> None:
        """Record one step's numbers. NaN is recorded too, since a diverged loss is worth
        knowing."""
        now_s = self._clock()
        self._rows.extend((name, step, now_s, float(value)) for name, value in values.items())
        if len(self._rows) >= COMMIT_ROWS or now_s - self._committed_s >= COMMIT_S:
            self.flush()

    def event(self, kind: str, **fields: Any) -> None:  # noqa: ANN401 - any JSON value
        """Append at most 64 kB of JSON as a line to events.jsonl; raise `ValueError` if it is
        longer."""
        self._write_line(f"an event of kind {kind!r}", EVENTS, {"kind": kind, **fields})

    def receipt(self, **fields: Any) -> None:  # noqa: ANN401 - any JSON value
        """Append an applied round to receipts.jsonl, with the same bounds as events."""
        self._write_line("a receipt", RECEIPTS, fields)

    def _write_line(self, what: str, name: str, fields: dict[str, Any]) -> None:
        line = msgspec.json.encode({"time_s": self._clock(), **fields}) + b"\n"
        if len(line) > LINE_BYTES:
            raise ValueError(
                f"{what} has {len(line)} bytes, above {LINE_BYTES}; shorten its fields"
            )
        try:
            LineFile(self._folder / name).append(line)
        except OSError as error:
            raise _unusable(self._folder, error) from error

    def flush(self) -> None:
        """Commit the metrics; raise `HistoryUnusable` if that fails (the rows are then dropped)."""
        rows, self._rows = self._rows, []
        self._committed_s = self._clock()
        try:
            with self._database:
                self._database.executemany(
                    "INSERT INTO metrics (name, step, time_s, value) VALUES (?, ?, ?, ?)", rows
                )
                self._unrolled += len(rows)
                if self._unrolled >= ROLL_ROWS:
                    self._unrolled = 0
                    self._roll_up()
        except sqlite3.Error as error:
            raise _unusable(self._folder, error) from error

    def _roll_up(self) -> None:
        """Replace rows older than the newest `KEPT` of their span by means of `ROLL` rows, and
        old means in the same way, so that the table grows with the logarithm of the steps. This
        is part of the caller's transaction."""
        newest = "SELECT name, span, MAX(step) FROM metrics GROUP BY name, span"
        for name, span, last in self._database.execute(newest).fetchall():
            wide = span * ROLL
            old = {
                "name": name,
                "span": span,
                "wide": wide,
                "edge": (last - KEPT * span) // wide * wide,
            }
            self._database.execute(
                f"INSERT INTO metrics (name, step, time_s, value, span, count) "
                f"SELECT name, MIN(step), MAX(time_s), {_MEAN}, :wide, SUM(count) FROM metrics "
                f"WHERE name = :name AND span = :span AND step < :edge GROUP BY step / :wide",
                old,
            )
            self._database.execute(
                "DELETE FROM metrics WHERE name = :name AND span = :span AND step < :edge", old
            )

    def last(self) -> dict[str, tuple[int, float]]:
        """Return the step and value of each metric's latest committed row."""
        rows = self._query(
            "SELECT name, step, value FROM metrics "
            "WHERE id IN (SELECT MAX(id) FROM metrics WHERE span = 1 GROUP BY name)",
            (),
        )
        return {name: (step, _number(value)) for name, step, value in rows}

    def series(self, name: str, points: int = 500) -> list[tuple[int, float]]:
        """Return a metric as at most `points` points: (first step, mean) of equal spans of steps.

        There are fewer points where only means of longer spans are kept.
        """
        if points < 1:
            raise ValueError(f"a series has at least one point, got {points}")
        rows = self._query(
            "WITH ends AS ("
            "SELECT MIN(step) AS low, MAX(step) AS high FROM metrics WHERE name = :name) "
            f"SELECT MIN(step), {_MEAN} FROM metrics, ends "
            "WHERE name = :name GROUP BY (step - low) * :points / (high - low + 1) ORDER BY 1",
            {"name": name, "points": points},
        )
        return [(step, _number(value)) for step, value in rows]

    def events(self, last: int = 20) -> list[dict[str, Any]]:
        """Return the latest events, oldest first, without lines that a crash cut short."""
        return self._lines(EVENTS, last)

    def receipts(self, last: int = 20) -> list[dict[str, Any]]:
        """Return the latest applied rounds, oldest first, in the same form as events."""
        return self._lines(RECEIPTS, last)

    def _lines(self, name: str, last: int) -> list[dict[str, Any]]:
        try:
            lines = LineFile(self._folder / name).lines()
        except OSError as error:
            raise _unusable(self._folder, error) from error
        found = [event for line in lines[-2 * last - 2 :] if (event := _event(line)) is not None]
        return found[-last:] if last > 0 else []

    def close(self) -> None:
        """Commit and close; nothing may be recorded afterwards."""
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


def _prepared(folder: Path) -> sqlite3.Connection:
    """Return the database in WAL mode; where the file system cannot map the memory that its users
    share then, as on network drives, with a plain journal."""
    uri = f"{(folder / DATABASE).absolute().as_uri()}?mode=rwc"
    database = _connect(uri)
    try:
        _prepare(folder, database, "WAL")
    except sqlite3.OperationalError as error:
        database.close()
        if error.sqlite_errorcode & 0xFF not in _NO_WAL:
            raise
        database = _connect(uri)
        database.execute("PRAGMA locking_mode = EXCLUSIVE")  # nothing is shared: it can be read
        database.execute("PRAGMA journal_mode = DELETE")
        database.execute("PRAGMA locking_mode = NORMAL")
        _prepare(folder, database, "DELETE")
        log.warning(
            "the history in %s has a plain journal (its file system: %s), so other programs may"
            " wait for the node; choose a --folder on a disk of this machine to avoid that",
            folder,
            error,
        )
    return database


def _prepare(folder: Path, database: sqlite3.Connection, journal: str) -> None:
    _require_version(folder, database)
    database.execute(f"PRAGMA journal_mode = {journal}")
    database.execute("PRAGMA synchronous = NORMAL")
    if database.execute("PRAGMA user_version").fetchone()[0] == 1:
        database.executescript(_WIDEN)
    database.executescript(_SCHEMA)


def _require_version(folder: Path, database: sqlite3.Connection) -> None:
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version > _SCHEMA_VERSION:
        raise HistoryUnusable(
            f"{folder / DATABASE} has version {version}, but this version of Farflock reads "
            f"{_SCHEMA_VERSION}; use the newer version"
        )


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        log.debug("left out a broken line of %d bytes", len(line))
        return None


def _number(value: float | None) -> float:
    """Return a stored value; NULL is how sqlite stores NaN."""
    return math.nan if value is None else value


def _unusable(folder: Path, error: Exception) -> HistoryUnusable:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return HistoryUnusable(
        f"the history in {folder} is unusable ({reason}); "
        f"check permissions and space, or move {DATABASE} away"
    )
