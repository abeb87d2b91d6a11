"""A folder that one process at a time works in: the others wait for their turn, and say for whom.

Who works there has its process's number in the file `in-use`, and touches that as it gets on.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from farflock.node.durable import locked

FILE_NAME = "in-use"
LOOK_S = 0.1  # between two attempts
TELL_S = 2.0  # of waiting, after which it is said
STUCK_S = 60.0  # without progress of who works there

log = logging.getLogger(__name__)


class TurnNeverCame(OSError):
    """The process that works in a folder does not get on; `strerror` says which, and for how
    long."""


@contextlib.contextmanager
def in_turn(
    folder: Path,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Callable[[], None]]:
    """Keep out other processes that take turns in the folder, and wait until they have gone. Yield
    what long work calls as it gets on. Raise `TurnNeverCame` if another process holds the folder
    without getting on for `STUCK_S`, and `NoLocks` as `locked` does."""
    file = folder / FILE_NAME
    with contextlib.ExitStack() as stack:
        _wait(folder, stack, clock, sleep)
        with contextlib.suppress(OSError):  # a full disk: nobody is told who works here
            file.write_text(f"{os.getpid()}\n")
        stack.callback(_remove, file)

        def getting_on() -> None:
            with contextlib.suppress(OSError):
                os.utime(file)

        yield getting_on


def _wait(
    folder: Path,
    stack: contextlib.ExitStack,
    clock: Callable[[], float],
    sleep: Callable[[float], object],
) -> None:
    """Lock the folder until the stack unwinds."""
    began_s = moved_s = clock()
    seen, told = _trace(folder), False
    while True:
        with contextlib.suppress(BlockingIOError):
            stack.enter_context(locked(folder))
            return
        now_s, trace = clock(), _trace(folder)
        if trace != seen:
            seen, moved_s = trace, now_s
        if now_s - moved_s >= STUCK_S:
            why = f"{_holder(trace)} has worked there for {STUCK_S:.0f} s without getting on"
            raise TurnNeverCame(0, f"{why}; wait until it ends, or end it")
        if not told and now_s - began_s >= TELL_S:
            told = True
            log.warning("waiting for %s, which works in %s", _holder(trace), folder)
        sleep(LOOK_S)


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):
        file.unlink()


def _trace(folder: Path) -> tuple[str, int]:
    """Return what changes as another process gets on: its number, and when it last did."""
    file = folder / FILE_NAME
    try:
        with file.open() as opened:
            return opened.read(20).strip(), file.stat().st_mtime_ns
    except (OSError, UnicodeDecodeError):
        return "", 0


def _holder(trace: tuple[str, int]) -> str:
    return f"process {trace[0]}" if trace[0].isdecimal() else "another process"
