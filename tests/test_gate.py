"""The gate: how tests are divided, what a pure test may touch, and how failures are judged."""

import asyncio
import collections
import contextlib
import json
import os
import secrets
import socket
import subprocess
import threading
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import judge
import parts
import purity
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from purity import FORBIDDEN, Guard
from worlds.waiting import LIMIT_S, alive, until_real

from farflock.swarm.sim.virtual_time import run_virtual

PURE, REAL = {"a": False}, {"b": True}


@pytest.fixture
def files(tmp_path):
    """A folder of 20 empty test files, and their paths in it."""
    names = [f"{folder}/test_{number}.py" for folder in ("x", "y") for number in range(10)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path, names


def test_every_file_is_in_one_part_whatever_it_contains(files):
    folder, names = files
    chosen = parts.divided(3, parts.files(folder), {})
    assert {path.relative_to(folder).as_posix() for path in chosen} == set(names)
    assert sorted(collections.Counter(chosen.values()).items()) == [(1, 7), (2, 7), (3, 6)]
    (folder / names[0]).write_text("pass\n" * 100)
    assert parts.divided(3, parts.files(folder), {}) == chosen


def test_parts_take_about_the_same_time(files):
    folder, names = files
    seconds = {name: 1.0 + number**2 for number, name in enumerate(names)}
    chosen = parts.divided(3, parts.files(folder), seconds)
    sums = collections.Counter()
    for path, part in chosen.items():
        sums[part] += seconds[path.relative_to(folder).as_posix()]
    assert max(sums.values()) < 1.1 * min(sums.values())


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("def test_a(): pass", {"pure"}),
        ("pytestmark = pytest.mark.net", {"real"}),
        ("pytestmark = [pytest.mark.net, pytest.mark.ci_more]", {"real", "ci-more"}),
        ('pytestmark = pytest.mark.usefixtures("a")  # not mark.long', {"pure"}),
        ("@pytest.mark.net\ndef test_a(): pass", {"pure", "real"}),
        ("@pytest.mark.ci_more\ndef test_a(): pass", {"pure", "ci-more"}),
        ("pytestmark = pytest.mark.long", set()),
    ],
)
def test_a_part_reads_only_files_that_may_have_tests_of_it(text, has):
    assert {part for part in judge.GATE if parts.may_have(text, part)} == has


@pytest.mark.parametrize("mark", ["net", "ci_more"])
def test_a_mark_that_its_file_does_not_name_cannot_be_collected(tmp_path, mark):
    path = tmp_path / "test_a.py"
    path.write_text("from elsewhere import marks")
    item = SimpleNamespace(nodeid="a", path=path, get_closest_marker=lambda name: name == mark)
    assert f"write out `mark.{mark}`" in parts.fault_of(item)


def test_tests_of_one_function_share_its_seconds():
    names = {"a[0]": "a", "a[1]": "a", "a[2]": "a", "b": "b", "c": "c"}
    chosen = parts.divided(2, names, {"a": 9, "b": 5})
    assert chosen == {"b": 1, "a[0]": 2, "a[1]": 2, "a[2]": 1, "c": 2}


def test_what_was_measured_is_recorded_by_file_and_other_tables_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "SECONDS", tmp_path / "seconds.toml")
    parts.SECONDS.write_text('[real]\n"net/test_c.py" = 3\n')
    measured = {"tests/a/test_a.py::one": 1.2, "tests/a/test_a.py::two": 1.4, "tests/b.py::x": 0.4}
    parts.record("pure", measured)
    assert parts.recorded("pure") == {"a/test_a.py": 3}
    assert parts.recorded("real") == {"net/test_c.py": 3}
    assert not parts.recorded("other")
    parts.record("long-2", {"tests/a/test_a.py::one[0]": 1.2, "tests/a/test_a.py::one[1]": 1.4})
    assert parts.recorded("long-2") == {"a/test_a.py::one": 3}


def test_each_file_of_the_committed_table_exists():
    tables = tomllib.loads(parts.SECONDS.read_text())
    assert judge.GATE.keys() <= tables.keys() <= judge.PARTS.keys()
    named = {parts.file_of(name) for table in tables.values() for name in table}
    assert not [path for path in named if not (parts.TESTS / path).exists()]


@pytest.fixture
def guard(monkeypatch):
    """A guard of its own, in place of the one that watches this test."""
    for each in FORBIDDEN:
        monkeypatch.setattr(each.owner, each.name, getattr(each.owner, each.name).__wrapped__)
    return Guard()


def sleep_in_a_helper():
    time.sleep(0.1)


def run_a_loop():
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        loop.run_forever()


@pytest.mark.parametrize(
    ("touch", "what"),
    [
        (sleep_in_a_helper, "time.sleep"),
        (lambda: socket.socket().bind(("", 0)), "socket.bind"),
        (lambda: subprocess.run(["true"]), "subprocess.Popen"),
        (lambda: os.fork(), "os.fork"),
        (run_a_loop, "an event loop in real time"),
        (lambda: secrets.randbits(62), "secrets.randbits"),
        (lambda: Ed25519PrivateKey.generate(), "a drawn key"),
    ],
)
def test_a_pure_test_that_touches_the_world_fails_there_and_is_told_what(guard, touch, what):
    with pytest.raises(pytest.fail.Exception, match=what), guard.watching():
        touch()


def test_a_touch_that_is_swallowed_counts(guard):
    def swallow():
        with contextlib.suppress(pytest.fail.Exception):
            sleep_in_a_helper()

    with pytest.raises(pytest.fail.Exception, match=r"time\.sleep"), guard.watching():
        swallow()


def test_a_touch_in_another_thread_ends_a_test_that_waits_for_it(guard):
    def work():
        with contextlib.suppress(pytest.fail.Exception):
            sleep_in_a_helper()

    with pytest.raises(pytest.fail.Exception, match=r"time\.sleep"), guard.watching():
        threading.Thread(target=work).start()
        threading.Event().wait()


def test_a_thread_that_outlives_its_test_is_found_and_one_that_ends_is_not(guard, monkeypatch):
    monkeypatch.setattr(purity, "THREAD_ENDS_S", 0.1)
    guard.begin()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(threading.get_ident).result()
    guard.end()
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait, name="forgotten")
    thread.start()
    try:
        with pytest.raises(pytest.fail.Exception, match="threads behind: forgotten; end them"):
            guard.end()
    finally:
        ended.set()
        thread.join()


def test_virtual_time_is_no_touch_nor_is_what_comes_between_tests(guard):
    with guard.watching():
        run_virtual(asyncio.sleep(3600))
    sleep_in_a_helper()


@pytest.mark.parametrize(
    ("failed", "passed", "is_strict", "line", "is_green"),
    [
        (PURE, [], False, "red: a", False),
        (REAL, [], False, "red: b", False),
        (PURE, ["a"], False, "not deterministic: a", True),
        (PURE, ["a"], True, "not deterministic: a", False),
        (REAL, ["b"], True, "unstable: b", True),
    ],
)
def test_what_passes_the_second_time_is_told_and_only_what_the_commit_did_is_red(
    failed, passed, is_strict, line, is_green
):
    assert judge.verdict(failed, passed, is_strict) == ([line], is_green)


def test_second_chances_end_with_their_time_and_what_is_not_reached_stays_failed():
    now_s, limits = 0.0, {}

    def run(test, limit_s):
        nonlocal now_s
        limits[test] = limit_s
        now_s += min(6, limit_s)
        return None if limit_s < 6 else 0 if test in "bc" else 1

    assert judge.second_chances("abcd", 16, run, lambda: now_s) == ["b"]
    assert limits == {"a": 16, "b": 10, "c": 4}
    assert now_s == 16


@pytest.mark.net
def test_a_command_whose_time_is_over_cleans_up_and_ends_with_all_that_it_had_started(tmp_path):
    child = tmp_path / "child"
    # A shell that hears of the end, with a child that does not: it ignores SIGINT.
    script = (
        "trap 'touch $0.cleaned; exit' INT; "
        "sleep 600 & echo $! > $0.partial; mv $0.partial $0; wait"
    )
    assert judge.limited(["sh", "-c", "exit 3"], LIMIT_S) == 3
    for limit_s in (0.5, 5.0, 50.0):  # a slow machine may not come to start the child
        assert judge.limited(["sh", "-c", script, str(child)], limit_s) is None
        if child.exists():
            break
    until_real(lambda: not alive(int(child.read_text())), "the end of the child")
    assert child.with_suffix(".cleaned").exists()


def test_outcomes_are_read_from_the_reports_of_all_phases(tmp_path):
    entries = [
        ("a", "setup", "passed", ""),
        ("a", "call", "failed", ""),
        ("a", "teardown", "passed", ""),
        ("b", "setup", "skipped", "Skipped: no ip"),
        ("c", "setup", "skipped", f"Skipped: {parts.LATE}"),
        ("d", "call", "passed", ""),
    ]
    report = tmp_path / "report"
    report.write_text(
        "\n".join(
            json.dumps(
                {
                    "test": test,
                    "when": when,
                    "outcome": outcome,
                    "seconds": 1.5,
                    "is_real": test == "a",
                    "why": why,
                }
            )
            for test, when, outcome, why in entries
        )
    )
    outcomes = judge.Outcomes()
    outcomes.read(report)
    assert outcomes.failed == {"a": True}
    assert outcomes.late == ["c"]
    assert (outcomes.passed, outcomes.seconds["a"]) == (1, 4.5)
