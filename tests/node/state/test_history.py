"""A run's history can be read while it is written, survives SIGKILL, and stays in its bounds."""

import contextlib
import errno
import math
import os
import signal
import sqlite3
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.waiting import ended, until_real

from farflock.node.state import history, line_file
from farflock.node.state.history import History, HistoryUnusable

WRITER = """
import itertools, sys, time
from pathlib import Path
from farflock.node.state.history import History

with History.open(Path(sys.argv[1]), time.monotonic) as history:
    for step in itertools.count():
        history.metrics(step, loss=1.0 / (1 + step), tokens=float(step))
        if step % 50 == 0:
            history.event("round", step=step, text="x" * 300)
"""


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def committed(folder):
    with History.read(folder) as reader:
        return reader.last()


def test_numbers_come_back_by_name_with_their_latest_step(tmp_path, clock):
    with History.open(tmp_path / "run", clock) as run:
        run.metrics(1, loss=3.0, tokens=10)
        run.metrics(2, loss=2.5)
        run.flush()
        assert run.last() == {"loss": (2, 2.5), "tokens": (1, 10.0)}
        assert run.series("loss") == [(1, 3.0), (2, 2.5)]
        assert run.series("unknown") == []


def test_a_history_goes_on_where_it_was_closed(tmp_path, clock):
    for step in (1, 2):
        with History.open(tmp_path, clock) as run:
            run.metrics(step, loss=float(step))
            run.event("opened", step=step)
    with History.read(tmp_path) as reader:
        assert reader.series("loss") == [(1, 1.0), (2, 2.0)]
        assert [event["step"] for event in reader.events()] == [1, 2]


@given(values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), points=st.integers(1, 30))
def test_a_series_is_the_mean_of_equal_stretches(tmp_path_factory, values, points):
    with History.open(tmp_path_factory.mktemp("run"), Clock()) as run:
        for step, value in enumerate(values):
            run.metrics(step + 5, loss=value)
        run.flush()
        got = run.series("loss", points)
    stretches = {}
    for step, value in enumerate(values):
        stretches.setdefault(step * points // len(values), []).append((step + 5, value))
    expected = [
        (rows[0][0], math.fsum(value for _, value in rows) / len(rows))
        for rows in stretches.values()
    ]
    assert len(got) <= points
    assert [step for step, _ in got] == [step for step, _ in expected]
    assert [value for _, value in got] == pytest.approx(
        [value for _, value in expected], rel=1e-9, abs=1e-6
    )


def test_a_diverged_loss_is_kept_and_shown(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        for step, value in enumerate([1.0, math.nan, math.inf]):
            run.metrics(step, loss=value)
        run.flush()
        assert [repr(value) for _, value in run.series("loss")] == ["1.0", "nan", "inf"]
        assert math.isnan(run.series("loss", 1)[0][1])
        assert run.last()["loss"] == (2, math.inf)


def test_rows_are_committed_by_the_hundred_or_after_a_second(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        for step in range(99):
            run.metrics(step, loss=0.0)
        assert committed(tmp_path) == {}
        run.metrics(99, loss=0.0)
        assert committed(tmp_path) == {"loss": (99, 0.0)}
        run.metrics(100, loss=0.0)
        assert committed(tmp_path) == {"loss": (99, 0.0)}
        clock.now_s += 1.0
        run.metrics(101, loss=0.0)
        assert committed(tmp_path) == {"loss": (101, 0.0)}


def test_leaving_commits_what_is_noted_also_after_an_error(tmp_path, clock):
    def fail():
        with History.open(tmp_path, clock) as run:
            run.metrics(1, loss=4.0)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert committed(tmp_path) == {"loss": (1, 4.0)}


def test_the_database_is_in_the_mode_that_readers_and_crashes_do_not_harm(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        run.metrics(1, loss=1.0)
        run.flush()
        database = sqlite3.connect(tmp_path / "run.db")
        assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        database.execute("BEGIN")  # a reader in the middle of its reading does not block the writer
        assert database.execute("SELECT COUNT(*) FROM metrics").fetchone() == (1,)
        run.metrics(2, loss=1.0)
        run.flush()
        database.close()


class OnNetworkDrive(sqlite3.Connection):
    """A connection whose file system maps no memory for several processes, which WAL needs."""

    is_alone = False

    def execute(self, statement, *arguments):
        self.is_alone |= statement.endswith("EXCLUSIVE")
        is_wal = super().execute("PRAGMA journal_mode").fetchone() == ("wal",)
        if is_wal and not self.is_alone and not statement.endswith("WAL"):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMMAP
            raise error
        return super().execute(statement, *arguments)


@pytest.mark.parametrize("before", ["nothing", "a history in WAL mode"])
def test_where_no_memory_can_be_shared_the_journal_is_plain_and_a_note_says_so(
    tmp_path, clock, monkeypatch, caplog, before
):
    connect = sqlite3.connect
    if before != "nothing":
        with History.open(tmp_path, clock) as run:
            run.metrics(1, loss=3.0)
    monkeypatch.setattr(
        sqlite3, "connect", lambda at, **how: connect(at, factory=OnNetworkDrive, **how)
    )
    with History.open(tmp_path, clock) as run:
        run.metrics(2, loss=2.0)
    (note,) = caplog.messages
    assert "has a plain journal (its file system: disk I/O error)" in note
    assert "choose a --folder on a disk of this machine" in note
    database = sqlite3.connect(tmp_path / "run.db")
    assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert database.execute("SELECT MAX(step) FROM metrics").fetchone() == (2,)


def test_a_reader_cannot_write(tmp_path, clock):
    History.open(tmp_path, clock).close()
    reader = History.read(tmp_path)
    reader.metrics(1, loss=1.0)
    with pytest.raises(HistoryUnusable, match="readonly"):
        reader.close()


def test_events_carry_time_kind_and_fields(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        run.event("joined", peer="alice", members=3)
        run.event("left", peer="bob")
        assert run.events() == [
            {"time_s": 1000.0, "kind": "joined", "peer": "alice", "members": 3},
            {"time_s": 1000.0, "kind": "left", "peer": "bob"},
        ]
        assert [event["kind"] for event in run.events(1)] == ["left"]
        assert run.events(0) == []


def test_events_rotate_at_their_size_and_keep_the_latest(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(line_file, "FILE_BYTES", 1000)
    with History.open(tmp_path, clock) as run:
        for number in range(200):
            run.event("tick", number=number)
            sizes = [path.stat().st_size for path in tmp_path.glob("events*.jsonl")]
            assert max(sizes) <= 1000
            assert len(sizes) <= 2
        assert [event["number"] for event in run.events(20)] == list(range(180, 200))


def test_a_line_that_a_crash_cut_short_harms_no_other(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        run.event("first")
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"time_s": 1, "kind": "torn')
    with History.open(tmp_path, clock) as run:
        run.event("second")
        assert [event["kind"] for event in run.events()] == ["first", "second"]


def trained(folder, name):
    """The number of steps that a metric's rows stand for."""
    database = sqlite3.connect(folder / "run.db")
    with contextlib.closing(database):
        return database.execute(
            "SELECT SUM(count) FROM metrics WHERE name = ?", (name,)
        ).fetchone()[0]


@pytest.fixture
def short(monkeypatch):
    """Histories that keep 100 rows of each span and look for older ones at every commit."""
    monkeypatch.setattr(history, "KEPT", 100)
    monkeypatch.setattr(history, "ROLL", 10)
    monkeypatch.setattr(history, "ROLL_ROWS", 100)


def test_old_steps_become_means_of_stretches_and_the_table_stays_small(tmp_path, clock, short):
    with (
        History.open(tmp_path, clock) as run,
        contextlib.closing(sqlite3.connect(tmp_path / "run.db")) as reader,
    ):
        sizes = []
        for step in range(20_000):
            run.metrics(step, loss=float(step))
            if step % 1000 == 999:
                rows = reader.execute("SELECT span, COUNT(*) FROM metrics GROUP BY span").fetchall()
                sizes.append(sum(count for _, count in rows))
        assert max(sizes) < 4 * 310
        assert max(count for _, count in rows) <= 210
        assert trained(tmp_path, "loss") == 20_000
        assert run.last() == {"loss": (19_999, 19_999.0)}
        series = dict(run.series("loss", 20_000))
        assert [series[step] for step in range(19_900, 20_000)] == [
            float(step) for step in range(19_900, 20_000)
        ]
        assert series[0] == pytest.approx(999 / 2)  # the mean of the first thousand
        whole = run.series("loss", 1)
        # each step counts alike, however it is kept
        assert whole == [(0, pytest.approx(19_999 / 2))]


def test_a_number_that_is_none_stays_one_in_the_mean_of_its_stretch(tmp_path, clock, short):
    with History.open(tmp_path, clock) as run:
        for step in range(400):
            run.metrics(step, loss=math.nan if step == 15 else 1.0)
        series = dict(run.series("loss", 400))
    assert series[0] == 1.0
    assert math.isnan(series[10])


def test_a_database_of_the_version_before_is_taken_over(tmp_path, clock):
    database = sqlite3.connect(tmp_path / "run.db")
    database.executescript(
        "CREATE TABLE metrics ("
        "id INTEGER PRIMARY KEY, name TEXT NOT NULL, step INTEGER NOT NULL, time_s REAL NOT NULL,"
        " value REAL);"
        "INSERT INTO metrics (name, step, time_s, value) VALUES ('loss', 1, 5.0, 3.5);"
        "PRAGMA user_version = 1"
    )
    database.close()
    with History.open(tmp_path, clock) as run:
        run.metrics(2, loss=2.5)
        run.flush()
        assert run.series("loss") == [(1, 3.5), (2, 2.5)]


def test_a_receipt_is_a_line_of_its_own_file(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        run.event("joined")
        run.receipt(
            stream="delta",
            round=3,
            status="ok",
            participants=["a", "b"],
            sent_bytes=10,
            received_bytes=20,
        )
        assert [event["kind"] for event in run.events()] == ["joined"]
    with History.read(tmp_path) as reader:
        (receipt,) = reader.receipts()
    assert receipt == {
        "time_s": 1000.0,
        "stream": "delta",
        "round": 3,
        "status": "ok",
        "participants": ["a", "b"],
        "sent_bytes": 10,
        "received_bytes": 20,
    }


def test_an_oversized_event_is_refused_whole(tmp_path, clock):
    with History.open(tmp_path, clock) as run:
        with pytest.raises(ValueError, match=r"an event of kind 'big' has .* bytes, above 65536"):
            run.event("big", text="x" * 70_000)
        assert run.events() == []


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_no_half(tmp_path, clock, monkeypatch):
    whole = os.write
    with History.open(tmp_path, clock) as run:
        run.event("first")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda descriptor, line: whole(descriptor, line[:10]))
            with pytest.raises(HistoryUnusable, match="No space left on device"):
                run.event("second")
        run.event("third")
        assert [event["kind"] for event in run.events()] == ["first", "third"]


def refuse(*_):
    raise OSError(errno.EACCES, "Permission denied")


def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path, clock, monkeypatch):
    with History.open(tmp_path, clock) as run, monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(
            HistoryUnusable, match=r"unusable \(Permission denied\); check permissions"
        ):
            run.event("anything")


@pytest.mark.parametrize("action", ["open", "read"])
def test_a_file_that_is_no_database_is_left_as_it_is(tmp_path, clock, action):
    (tmp_path / "run.db").write_bytes(b"not a database" * 100)
    with pytest.raises(HistoryUnusable, match=r"file is not a database\); .* move run.db away"):
        History.open(tmp_path, clock) if action == "open" else History.read(tmp_path)
    assert (tmp_path / "run.db").read_bytes() == b"not a database" * 100


def test_a_database_of_a_later_version_is_left_as_it_is(tmp_path, clock):
    History.open(tmp_path, clock).close()
    database = sqlite3.connect(tmp_path / "run.db")
    database.execute("PRAGMA user_version = 3")
    database.close()
    with pytest.raises(
        HistoryUnusable, match=r"has version 3, but this version .* reads 2; use the newer version"
    ):
        History.open(tmp_path, clock)


def test_reading_a_run_that_never_was_says_so_and_makes_nothing(tmp_path):
    with pytest.raises(HistoryUnusable, match="unable to open database file"):
        History.read(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_series_of_no_points_is_refused(tmp_path, clock):
    with (
        History.open(tmp_path, clock) as run,
        pytest.raises(ValueError, match="at least one point, got 0"),
    ):
        run.series("loss", 0)


def first_line(folder):
    events = folder / "events.jsonl"
    return events.exists() and b"\n" in events.read_bytes()


@pytest.mark.net
@pytest.mark.parametrize("attempt", range(2))
def test_a_history_is_readable_while_it_is_written_and_after_sigkill(tmp_path, clock, attempt):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)
    }
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], env=environment)
    seen = -1

    def has_grown():
        nonlocal seen
        assert writer.poll() is None
        if first_line(tmp_path):
            step = committed(tmp_path).get("loss", (-1, 0.0))[0]
            assert step >= seen
            seen = step
        return seen >= 2000 * (attempt + 1)

    try:
        until_real(has_grown, "the steps of the history", every_s=0)
    finally:
        writer.send_signal(signal.SIGKILL)
        ended(writer, "the writer")
    with History.open(tmp_path, clock) as run:
        last_step = run.last()["loss"][0]
        assert last_step >= seen
        assert run.last()["tokens"] == (last_step, float(last_step))
        assert trained(tmp_path, "tokens") == last_step + 1
        steps = [event["step"] for event in run.events(1_000_000)]
        assert steps == list(range(steps[0], steps[-1] + 1, 50))
        run.metrics(last_step + 1, loss=0.5)
    assert committed(tmp_path)["loss"] == (last_step + 1, 0.5)
    assert (
        msgspec.json.decode((tmp_path / "events.jsonl").read_bytes().splitlines()[0])["kind"]
        == "round"
    )
