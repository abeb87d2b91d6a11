"""The gate: how tests are divided, what a pure test may touch, and how failures are judged."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import threading
import time

import judge
import parts
import pytest
from purity import FORBIDDEN, Guard

from farflock.swarm.sim.virtual_time import run_virtual

PURE, REAL = {"a": False}, {"b": True}


def test_every_file_is_in_one_part_and_the_division_depends_on_names_alone(tmp_path):
    names = [f"{folder}/test_{number}.py" for folder in ("x", "y") for number in range(10)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("pass")
    chosen = parts.divided(3, tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in chosen} == set(names)
    assert set(chosen.values()) == {1, 2, 3}
    (tmp_path / names[0]).write_text("pass\n" * 100)
    assert parts.divided(3, tmp_path) == chosen


@pytest.fixture
def guard(monkeypatch):
    """A guard of its own, in place of the one that watches this test."""
    for owner, name, _ in FORBIDDEN:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
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
    now_s = 0.0

    def run(test):
        nonlocal now_s
        now_s += 6
        return 0 if test == "b" else 1

    assert judge.second_chances("abcd", 10, run, lambda: now_s) == ["b"]
    assert now_s == 12


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


def test_a_part_of_the_long_tests_searches_at_random_and_may_be_slower():
    (number, part), *_ = judge.LONG.items()
    assert judge.choice_of(f"long-{number}") == [
        *part.files,
        f"-m={part.marks}",
        f"--long={number}",
    ]
    assert "--hypothesis-profile=long" in judge.options_of(f"long-{number}")
    assert judge.options_of("pure") == ()
