"""Graceful stops of long-running commands: the first request stops gracefully, the second at once.

Ctrl-C, SIGTERM (from `farflock leave`, a service manager, the demo) and a closing terminal are
requests. A node finishes its step, stops waiting for peers, saves and says goodbye; a node that
does not train yet is cancelled.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

LEASH = "FARFLOCK_LEASH"  # if set, stop when standard input ends, that is, when the parent does
SLOW_STOP_S = 20.0  # then the node says that it still stops
STOP_TIMEOUT_S = 600.0  # then it is cancelled without saving: checkpoints of large models take long
ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

T = TypeVar("T")

log = logging.getLogger(__name__)


class GracefulStop:
    """The signals of one process while its event loop runs; the first one calls `gently`, if
    that is set."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.gently: Callable[[], None] | None = None

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
        else:
            self.gently()
            loop = asyncio.get_running_loop()
            loop.call_later(SLOW_STOP_S, _say_slow)
            loop.call_later(STOP_TIMEOUT_S, owner.cancel)


def _say_slow() -> None:
    log.warning(
        "still stopping: the step, the checkpoint and a goodbye come first; stop it once more to"
        " quit at once, without saving"
    )


def run_until_asked(ending: GracefulStop, work: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
    """Run `work` on its own event loop; return None if a signal ended it before it had a result."""
    return asyncio.run(ending.watch(work()))
