"""Signals end long work: gently where it knows how, at once on the second, never if ignored."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from worlds.waiting import ended, in_time, line_of

from farflock.node.process.signals import ASKING, GracefulStop, run_until_asked

pytestmark = pytest.mark.net

STUBBORN = """
import asyncio, sys
from farflock.node.process.signals import GracefulStop, run_until_asked

async def work():
    ending.gently = lambda: print("asked", flush=True)
    print("begun", flush=True)
    await asyncio.sleep(3600)

ending = GracefulStop()
run_until_asked(ending, work)
"""


@pytest.fixture(autouse=True)
def heard():
    """SIGHUP, too, is not ignored from the start, as it is under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def send(number):
    os.kill(os.getpid(), number)


def test_uninterrupted_work_gives_its_result():
    async def work():
        await asyncio.sleep(0)
        return 7

    ending = GracefulStop()
    assert run_until_asked(ending, work) == 7
    assert ending.asked is None


@pytest.mark.parametrize("number", ASKING)
def test_a_signal_breaks_off_what_does_not_know_how_to_end(number):
    cleaned = []

    async def work():
        try:
            send(number)
            await asyncio.sleep(3600)
        finally:
            cleaned.append(True)

    ending = GracefulStop()
    assert run_until_asked(ending, work) is None
    assert ending.asked == number
    assert cleaned


def test_what_fails_after_the_signal_is_its_doing():
    """The directory's daemon gets a terminal's Ctrl-C too, and its end fails every waiting call."""

    async def work():
        send(signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            raise OSError("the daemon ended") from None

    ending = GracefulStop()
    assert run_until_asked(ending, work) is None
    assert ending.asked == signal.SIGINT


def test_an_error_before_the_end_is_asked_for_or_during_the_save_is_raised():
    async def fails():
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"):
        run_until_asked(GracefulStop(), fails)

    async def saves():
        stop = asyncio.Event()
        ending.gently = stop.set
        send(signal.SIGTERM)
        await in_time(stop.wait(), "the signal")
        raise OSError("no disk")

    ending = GracefulStop()
    with pytest.raises(OSError, match="no disk"):
        run_until_asked(ending, saves)


def test_a_signal_asks_gently_where_it_can_and_the_result_comes():
    async def work():
        stop = asyncio.Event()
        ending.gently = stop.set
        send(signal.SIGTERM)
        await in_time(stop.wait(), "the signal")
        return "saved"

    ending = GracefulStop()
    assert run_until_asked(ending, work) == "saved"
    assert ending.asked == signal.SIGTERM


def test_work_that_is_cancelled_without_a_signal_raises_the_cancellation():
    async def work():
        asyncio.current_task().cancel()
        await asyncio.sleep(1)

    with pytest.raises(asyncio.CancelledError):
        run_until_asked(GracefulStop(), work)


def test_a_signal_that_the_program_was_told_to_ignore_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:

        async def work():
            send(signal.SIGHUP)
            await asyncio.sleep(0.05)
            return "went on"

        ending = GracefulStop()
        assert run_until_asked(ending, work) == "went on"
        assert ending.asked is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(second):
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True)
    try:
        assert line_of(process, "its beginning") == "begun\n"
        process.send_signal(signal.SIGINT)
        assert line_of(process, "its answer") == "asked\n"
        process.send_signal(second)
        assert ended(process, "the process") == -second
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
