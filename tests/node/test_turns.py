"""One process at a time works in a folder; who waits says for whom, and not for ever."""

import fcntl
import logging
import os

import pytest

from farflock.node.durable import locked
from farflock.node.turns import FILE_NAME, STUCK_S, TELL_S, TurnNeverCame, in_turn


class Clock:
    """Time that passes as it is slept, with what happens meanwhile."""

    def __init__(self, *events):
        self.now_s, self.events = 0.0, sorted(events, key=lambda event: event[0])

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        while self.events and self.events[0][0] <= self.now_s:
            self.events.pop(0)[1]()


@pytest.fixture
def other(tmp_path):
    """Another process at work in a folder; call it to end it."""
    place = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(place, fcntl.LOCK_EX)
    (tmp_path / FILE_NAME).write_text("4711\n")
    gone = []

    def go():
        if not gone:
            gone.append(os.close(place))

    yield go
    go()


def wait(folder, clock):
    with in_turn(folder, clock, clock.sleep):
        assert (folder / FILE_NAME).read_text() == f"{os.getpid()}\n"
        with pytest.raises(BlockingIOError), locked(folder):
            pass


def test_a_free_folder_is_taken_at_once_and_is_free_again_afterwards(tmp_path, caplog):
    clock = Clock()
    wait(tmp_path, clock)
    wait(tmp_path, clock)
    assert clock.now_s == 0
    assert not caplog.records


def test_a_long_wait_is_said_once_with_the_process_and_the_folder(tmp_path, other, caplog):
    clock = Clock((TELL_S + 20, other))
    with caplog.at_level(logging.WARNING):
        wait(tmp_path, clock)
    assert [each.message for each in caplog.records] == [
        f"waiting for process 4711, which works in {tmp_path}"
    ]
    assert clock.now_s == pytest.approx(TELL_S + 20)


def test_a_short_wait_is_not_worth_a_word(tmp_path, other, caplog):
    wait(tmp_path, Clock((TELL_S / 2, other)))
    assert not caplog.records


def test_who_gets_on_is_waited_for_as_long_as_that_takes(tmp_path, other):
    def touch(ns):
        return lambda: os.utime(tmp_path / FILE_NAME, ns=(ns, ns))

    times = [STUCK_S * 0.9 * (n + 1) for n in range(5)]
    events = [(at_s, touch(n + 1)) for n, at_s in enumerate(times)]
    clock = Clock(*events, (times[-1] + 1, other))
    wait(tmp_path, clock)
    assert clock.now_s > 4 * STUCK_S


def test_who_does_not_get_on_is_named_and_waited_for_no_longer(tmp_path, other):
    clock = Clock()
    with pytest.raises(TurnNeverCame, match="process 4711 has worked there for 60 s"):
        wait(tmp_path, clock)
    assert clock.now_s == pytest.approx(STUCK_S, abs=1.0)


def test_a_file_that_names_no_process_is_not_repeated(tmp_path, other):
    (tmp_path / FILE_NAME).write_bytes(b"\xff\x1b[2J" * 1000)
    with pytest.raises(TurnNeverCame, match="another process has worked"):
        wait(tmp_path, Clock())


def test_long_work_shows_that_it_gets_on(tmp_path):
    with in_turn(tmp_path) as getting_on:
        os.utime(tmp_path / FILE_NAME, (1.0, 1.0))
        getting_on()
        assert (tmp_path / FILE_NAME).stat().st_mtime > 1.0
