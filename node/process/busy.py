"""A worker that knows for how long its thread has computed: the time that a node uses."""

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from farflock.swarm.compute import Worker

T = TypeVar("T")


class TimedWorker:
    """The worker that trains, or that serves a stage. On a device, a step lasts until its loss is
    known, or that of the step before."""

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._clock = Worker(name), clock
        # (seconds of finished work, when the running work began), in one piece for other threads
        self._spent: tuple[float, float | None] = 0.0, None

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread; return its result or raise its exception."""
        return await self._worker(partial(self._timed, work))

    @property
    def busy_s(self) -> float:
        """Seconds that the thread has computed so far."""
        done_s, began_s = self._spent
        return done_s if began_s is None else done_s + self._clock() - began_s

    def _timed(self, work: Callable[[], T]) -> T:
        self._spent = self._spent[0], self._clock()
        try:
            return work()
        finally:
            self._spent = self.busy_s, None
