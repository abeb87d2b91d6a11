"""Graceful stops of long-running commands: the first request stops gracefully, the second at once.

Ctrl-C, SIGTERM (from `farflock leave`, a service manager, the demo) and a closing terminal are
requests. A node says goodbye, finishes its step and saves (node/assembly/leaving.py); one that does
not train yet is cancelled.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

LEASH = "FARFLOCK_LEASH"  # if set, stop when standard input ends, that is, when the parent does
UNBEGUN_S = 5.0  # for what a cancelled command has to put away, where nothing is to be saved
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SHOW_CURSOR = "\x1b[?25h"

T = TypeVar("T")

log = logging.getLogger(__name__)


class GracefulStop:
    """The signals of one process while its event loop runs; the first one calls `gently`, if
    that is set."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.gently: Callable[[], None] | None = None
        self.last_words: Callable[[], int] | None = None  # returns the exit code
        self._cut: threading.Timer | None = None

    async def watch(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if a signal ended it first."""
        loop, owner = asyncio.get_running_loop(), asyncio.current_task()
        assert owner is not None
        for number in ASKING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                loop.add_signal_handler(number, self._ask, number, owner)
        if LEASH in os.environ:
            loop.add_reader(sys.stdin.fileno(), self._let_go, owner)
        try:
            return await work
        except asyncio.CancelledError:
            if self.asked is None:
                raise
        except Exception as error:
            # Outside Linux a terminal's Ctrl-C also reaches the directory's daemon, so failures
            # are expected.
            if self.asked is None or self.gently is not None:
                raise
            log.debug("failed after it was asked to stop: %s", error)
        owner.uncancel()
        return None

    def end_within(self, seconds: float) -> None:
        """If a signal has asked for the end, end the process after this long with its last words,
        whatever its threads still do: one may be in a step of minutes, or wait for a disk."""
        if self.last_words is not None and self.asked is not None and self._cut is None:
            self._cut = threading.Timer(seconds, cut_off, (self.last_words,))
            self._cut.daemon = True
            self._cut.start()

    def __enter__(self) -> "GracefulStop":
        return self

    def __exit__(self, *_: object) -> None:
        """All was put away in time."""
        if self._cut is not None:
            self._cut.cancel()

    def _let_go(self, owner: "asyncio.Task[Any]") -> None:
        """Treat the end of standard input (the leash) like a closing terminal."""
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        self._ask(signal.SIGHUP, owner)

    def _ask(self, number: signal.Signals, owner: "asyncio.Task[Any]") -> None:
        if self.asked is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked = number
        if self.gently is None:
            owner.cancel()
            self.end_within(UNBEGUN_S)
        else:
            self.gently()


def cut_off(last_words: Callable[[], int]) -> None:
    """End the process at once, with its last words and the exit code that they return."""
    code = last_words()
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)  # which the live view has hidden
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader, or a terminal, that is gone
            stream.flush()
    os._exit(code)


def run_until_asked(ending: GracefulStop, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """Run `work` on its own event loop; return None if a signal ended it before it had a result."""
    return asyncio.run(ending.watch(work()))
