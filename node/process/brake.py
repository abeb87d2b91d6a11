"""Brakes on a node's training: its share of the processor, and one that its parent process holds.

A short demo must not end before its newcomer has joined. So the parent process names a file in the
environment; while it exists, each local step takes at least as many seconds as the file says, and
the node still answers its peers.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

BRAKE = "FARFLOCK_BRAKE"  # the file's path
LOOK_EVERY_S = 0.1
SAVED_S = 0.5  # of time that was not used, so that a node which waited does not catch up with it
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


def with_share(
    pause: Pause, share: float | None, threads: int, stopping: Callable[[], bool]
) -> Pause:
    """Return `pause`, with the processor's share added if there is one."""
    if not share or share >= 1.0:
        return pause
    limit = CpuShare(share, threads, stopping)

    async def both() -> None:
        await pause()
        await limit.pause()

    return both


class CpuShare:
    """Pauses between steps until the process has used no more than its share of its threads' time.
    It holds over several steps: none is interrupted."""

    def __init__(
        self,
        share: float,
        threads: int,
        stopping: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.process_time,
    ) -> None:
        self._rate, self._stopping = share * threads, stopping
        self._clock, self._used = clock, used
        self._began_s, self._before_s = clock(), used()

    async def pause(self) -> None:
        """Wait for as long as the process is ahead of its share, or until the node is to stop."""
        while (left_s := self._left_s()) > 0.0 and not self._stopping():  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, LOOK_EVERY_S))

    def _left_s(self) -> float:
        """Return the seconds by which the process is ahead."""
        due_s = self._began_s + (self._used() - self._before_s) / self._rate
        left_s = due_s - self._clock()
        self._began_s += max(0.0, -left_s - SAVED_S)
        return left_s


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
