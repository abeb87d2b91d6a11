"""A watch on virtual time: a task that goes on without waiting for anything keeps the clock from
moving, for ever, and its loop never has a turn in which to notice."""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

LIMIT_S = 60.0  # of computing; what a simulation computes at one moment takes a second at most


class Standstill(BaseException):
    """The clock has stood still for long. This is no `Exception`, which the task that spins might
    catch."""


@contextlib.contextmanager
def moving_clock(limit_s: float = LIMIT_S) -> Iterator[None]:
    """In this block, raise `Standstill` once the running loop's clock shows the same time for
    `limit_s` of computing or, at most, twice as long. Other threads than the main one, and systems
    without such timers, are not watched."""
    if sys.platform == "win32" or threading.current_thread() is not threading.main_thread():
        yield
        return
    seen_s: float | None = None

    def look(number: int, frame: FrameType | None) -> None:
        nonlocal seen_s
        before_s, seen_s = seen_s, _shown_s()
        if seen_s is not None and seen_s == before_s:
            shows = f"the clock shows {seen_s:g} s for {limit_s:g} s of computing"
            raise Standstill(f"{shows}, in {_place(frame)}; let that wait for something")

    before = signal.signal(signal.SIGVTALRM, look)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _shown_s() -> float | None:
    """Return what the running loop's clock shows; None where no loop runs."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return None


def _place(frame: FrameType | None) -> str:
    """Return the function that runs, and its line."""
    if frame is None:
        return "an unknown place"
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"
