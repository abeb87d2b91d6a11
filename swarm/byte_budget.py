"""A budget of bytes that many tasks share: who finds it used up waits its turn, in order.

Semaphores count ones; a window counts bytes, hands out as much of what was asked for as is free, and starves nobody.
"""

import asyncio
import collections


class ByteBudget:
    """`size_bytes` in all; what is taken must be given back."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.free_bytes = size_bytes
        self._waiting: collections.deque[tuple[int, int, asyncio.Future[int]]] = collections.deque()

    @property
    def idle(self) -> bool:
        """True if nobody has or wants any of it."""
        return self.free_bytes == self.size_bytes and not self._waiting

    async def take(self, least_bytes: int, most_bytes: int, *, ahead: bool = False) -> int:
        """Wait for at least `least_bytes` (at most the whole window) and take up to `most_bytes`; returns how many.

        `ahead` of all who wait goes who has had a part already: what was begun ends before something new begins."""
        assert least_bytes <= min(most_bytes, self.size_bytes), f"{least_bytes} bytes of {self.size_bytes}"
        if (ahead or not self._waiting) and least_bytes <= self.free_bytes:
            return self._grant(most_bytes)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        add = self._waiting.appendleft if ahead else self._waiting.append
        add((least_bytes, most_bytes, turn))
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(turn.result())
            else:
                self._waiting = collections.deque(entry for entry in self._waiting if entry[2] is not turn)
                self.give(0)  # who stood behind may fit
            raise

    def give(self, taken_bytes: int) -> None:
        """Give back; the next in line go on as far as it reaches."""
        self.free_bytes += taken_bytes
        while self._waiting and (self._waiting[0][0] <= self.free_bytes or self._waiting[0][2].cancelled()):
            _, most_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():
                turn.set_result(self._grant(most_bytes))

    def _grant(self, most_bytes: int) -> int:
        granted = min(most_bytes, self.free_bytes)
        self.free_bytes -= granted
        return granted
