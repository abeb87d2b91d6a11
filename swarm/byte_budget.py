"""A budget of bytes shared by many tasks, which wait their turn in order when it is used up.

Unlike a semaphore it counts bytes, grants as much of a request as is free, and starves no task.
"""

import asyncio
import collections


class ByteBudget:
    """A budget of `size_bytes`; everything taken must be given back."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.free_bytes = size_bytes
        self._waiting: collections.deque[tuple[int, int, asyncio.Future[int]]] = collections.deque()

    @property
    def idle(self) -> bool:
        """True if no task holds or awaits any of the budget."""
        return self.free_bytes == self.size_bytes and not self._waiting

    @property
    def waiting(self) -> int:
        """The number of tasks that await some of the budget."""
        return len(self._waiting)

    async def take(self, min_bytes: int, max_bytes: int, *, ahead: bool = False) -> int:
        """Wait for at least `min_bytes`, take up to `max_bytes`, and return the number taken.

        With `ahead` the task goes first: work in progress ends before new work begins."""
        assert min_bytes <= min(max_bytes, self.size_bytes), (
            f"{min_bytes} bytes of {self.size_bytes}"
        )
        if (ahead or not self._waiting) and min_bytes <= self.free_bytes:
            return self._grant(max_bytes)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        add = self._waiting.appendleft if ahead else self._waiting.append
        add((min_bytes, max_bytes, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(turn.result())
            else:
                self._waiting = collections.deque(
                    entry for entry in self._waiting if entry[2] is not turn
                )
                self.give(0)  # a smaller request further back may fit now
            raise

    def give(self, taken_bytes: int) -> None:
        """Return `taken_bytes` to the budget and wake the waiting tasks that now fit."""
        self.free_bytes += taken_bytes
        while self._waiting and (
            self._waiting[0][0] <= self.free_bytes or self._waiting[0][2].cancelled()
        ):
            _, max_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(self._grant(max_bytes))

    def _grant(self, max_bytes: int) -> int:
        granted = min(max_bytes, self.free_bytes)
        self.free_bytes -= granted
        return granted
