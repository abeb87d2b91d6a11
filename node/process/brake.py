"""A brake on a node's training, so that a short demo does not end before its newcomer has joined.

The parent process names a file in the environment. While the file exists, each local step takes at
least as many seconds as the file says; the node still answers its peers.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

BRAKE = "FARFLOCK_BRAKE"  # the file's path
LOOK_EVERY_S = 0.1
MAX_STEP_S = 120.0  # above what a demo waits for its newcomer; then a held node goes on

Pause = Callable[[], Awaitable[None]]


def brake_of(stopping: Callable[[], bool]) -> "Brake | None":
    """Return the brake that the environment names, if any."""
    named = os.environ.get(BRAKE)
    return None if named is None else Brake(Path(named), stopping)


def with_brake(pause: Pause, stopping: Callable[[], bool]) -> Pause:
    """Return `pause`, which is awaited between steps, with the brake added if the environment
    names one."""
    if (brake := brake_of(stopping)) is None:
        return pause

    async def both() -> None:
        await pause()
        await brake.pause()

    return both


class Brake:
    """The brake of one node."""

    def __init__(self, file: Path, stopping: Callable[[], bool]) -> None:
        self._file, self._stopping = file, stopping
        self._stepped_s = time.monotonic()

    async def pause(self) -> None:
        """Wait until this step has taken the seconds in the file, or the node is to stop."""
        while (left_s := self._left_s()) > 0.0:  # noqa: ASYNC110 - another process writes the file
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))
        self._stepped_s = time.monotonic()

    def _left_s(self) -> float:
        """Return how many seconds the current step still has to last."""
        if self._stopping():
            return 0.0
        return self._stepped_s + min(self._seconds(), MAX_STEP_S) - time.monotonic()

    def may_begin(self, count: int) -> bool:
        """Return whether one of the `count` of a step may begin now, and count it if so."""
        if time.monotonic() - self._stepped_s < min(self._seconds() / count, MAX_STEP_S):
            return False
        self._stepped_s = time.monotonic()
        return True

    def _seconds(self) -> float:
        with contextlib.suppress(OSError, ValueError):
            return float(self._file.read_text())
        return 0.0
