"""No sink can stop training: one that fails, hangs or is full says so once, and others go on."""

import errno
import os
import threading

import pytest
from worlds.measured import measured, origin_in
from worlds.waiting import until_real

from farflock.node.sinks import feed
from farflock.node.sinks.feed import MAX_WAITING, Feeds

pytestmark = pytest.mark.net  # the sinks' threads are real


class Shelf:
    """A sink that keeps what it gets; `fails` says at which steps it raises."""

    def __init__(self, fails=lambda step: False):
        self.steps, self.opened, self.closed = [], 0, 0
        self._fails = fails

    def open(self, origin):
        self.opened += 1
        self.origin = origin
        return self

    def write(self, measures):
        if self._fails(measures.step):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/disk/file")
        self.steps.append(measures.step)

    def close(self):
        self.closed += 1


class Hanging(Shelf):
    """A sink that takes nothing before it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def write(self, measures):
        self.let_go.wait()
        super().write(measures)


def always(sinks, steps, every_s=0.0):
    """Feed sinks with measures of these steps, a second apart, to the end."""
    now_s = [0.0]
    feeds = Feeds({name: sink.open for name, sink in sinks.items()}, every_s, lambda: now_s[0])
    for step in steps:
        feeds.write(origin_in("folder"), measured(step))
        now_s[0] += 1.0
    feeds.close()


def test_each_sink_gets_all_in_order_and_is_closed(caplog):
    sinks = {"one": Shelf(), "other": Shelf()}
    always(sinks, range(20))
    for sink in sinks.values():
        assert sink.steps == list(range(20))
        assert (sink.opened, sink.closed, sink.origin) == (1, 1, origin_in("folder"))
    assert not caplog.messages


def test_measures_come_every_few_seconds_and_the_last_ones_always():
    sink = Shelf()
    always({"one": sink}, range(18), every_s=5.0)
    assert sink.steps == [0, 5, 10, 15, 17]


def test_a_node_that_measures_nothing_opens_nothing():
    sink = Shelf()
    always({"one": sink}, [])
    assert not sink.opened


def test_a_sink_that_hangs_holds_nobody_up_and_what_it_misses_is_said_once(caplog):
    hanging, other = Hanging(), Shelf()
    feeds = Feeds({"slow": hanging.open, "other": other.open}, 0.0)
    steps = range(MAX_WAITING + 10)
    for step in steps:
        feeds.write(origin_in("folder"), measured(step))
        until_real(lambda step=step: len(other.steps) > step, "the other's measures", every_s=0.0)
    hanging.let_go.set()
    feeds.close()
    assert other.steps == list(steps)
    assert hanging.steps == list(range(MAX_WAITING + 1))
    assert caplog.messages == [
        "slow does not get all measures, training goes on: it is too slow, and some are left out"
    ]


def test_the_end_of_a_sink_that_hangs_is_said_if_nothing_was_said_before(caplog, monkeypatch):
    monkeypatch.setattr(feed, "CLOSE_TIMEOUT_S", 0.0)
    hanging = Hanging()
    always({"slow": hanging}, range(2))
    assert [said.partition(": ")[2] for said in caplog.messages] == [
        "it has not taken the last ones in time"
    ]
    hanging.let_go.set()


def test_a_full_disk_is_said_once_and_the_sink_comes_back_when_there_is_room(caplog):
    failing, other = Shelf(lambda step: 3 <= step < 10), Shelf()
    always({"file": failing, "other": other}, range(40))
    assert caplog.messages == [
        "file does not get all measures, training goes on: /disk/file: No space left on device;"
        " free some space on that disk and start again; no file was overwritten"
    ]
    # tried at 3, at 6 after two were left out, and at 11 after four
    assert failing.steps == [0, 1, 2, *range(11, 40)]
    assert (failing.opened, failing.closed) == (3, 3)
    assert other.steps == list(range(40))


def test_a_sink_that_fails_for_long_is_tried_less_and_less(monkeypatch):
    monkeypatch.setattr(feed, "MAX_LEFT_OUT", 8)
    tried = []
    sink = Shelf(lambda step: tried.append(step) or True)
    always({"file": sink}, range(50))
    assert tried == [0, 3, 8, 17, 26, 35, 44]


def test_a_sink_that_cannot_be_opened_or_that_has_a_bug_ends_nothing(caplog):
    class Broken(Shelf):
        def open(self, origin):
            raise ZeroDivisionError("their mistake")

    always({"broken": Broken()}, range(9))
    (said,) = caplog.messages
    assert said.endswith(": ZeroDivisionError: their mistake")


def test_a_sink_that_fails_as_it_closes_says_so(caplog):
    class Full(Shelf):
        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device", "/disk/file")

    always({"file": Full()}, range(2))
    assert "No space left" in caplog.text
