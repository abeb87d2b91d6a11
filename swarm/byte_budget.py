"""Budgets of bytes shared by many tasks, which wait their turn when they are used up.

Unlike a semaphore they count bytes. One grants as much of a request as is free, in order; the other
shares its bytes evenly among users. No task starves.
"""

import asyncio
import collections
from collections.abc import Hashable


class ByteBudget:
    """A budget of `size_bytes`; everything taken must be given back."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = self.free_bytes = size_bytes
        self._waiting: collections.deque[tuple[int, int, asyncio.Future[int]]] = collections.deque()

    @property
    def idle(self) -> bool:
        """True if no task holds or awaits any of the budget."""
        return self.free_bytes == self.size_bytes and not self._waiting

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


class SharedBudget:
    """A budget of `size_bytes` for several users. Each has at most `share_bytes` of it, or one
    request, and what becomes free goes to the one that has the least."""

    def __init__(self, size_bytes: int, share_bytes: int) -> None:
        self.size_bytes = self.free_bytes = size_bytes
        self._share_bytes = share_bytes
        self._taken: collections.Counter[Hashable] = collections.Counter()
        # By user, in the order in which they began to wait.
        self._waiting: dict[Hashable, collections.deque[tuple[int, asyncio.Future[None]]]] = {}

    @property
    def idle(self) -> bool:
        """True if no task holds or awaits any of the budget."""
        return self.free_bytes == self.size_bytes and not self._waiting

    def load(self, user: Hashable) -> tuple[int, int]:
        """Return how many of a user's tasks wait, and how many bytes the others hold."""
        return len(self._waiting.get(user, ())), self._taken[user]

    async def take(self, user: Hashable, size_bytes: int) -> None:
        """Wait for `size_bytes`, in the order of this user's requests."""
        assert size_bytes <= self.size_bytes, f"{size_bytes} bytes of {self.size_bytes}"
        entry = size_bytes, asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, collections.deque()).append(entry)
        self._grant()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry[1].done() and not entry[1].cancelled():
                self.give(user, size_bytes)
            else:
                self._grant()  # what waits behind it may fit now
            raise

    def give(self, user: Hashable, size_bytes: int) -> None:
        """Return a user's bytes to the budget and wake the waiting tasks that now fit."""
        self.free_bytes += size_bytes
        self._taken[user] -= size_bytes
        if not self._taken[user]:
            del self._taken[user]
        self._grant()

    def _grant(self) -> None:
        while below := [user for user in self._waiting if self._may_have_more(user)]:
            user = min(below, key=self._taken.__getitem__)
            size_bytes, turn = self._waiting[user][0]
            if size_bytes > self.free_bytes and not turn.cancelled():
                return
            self._waiting[user].popleft()
            if not self._waiting[user]:
                del self._waiting[user]
            if not turn.cancelled():
                self.free_bytes -= size_bytes
                self._taken[user] += size_bytes
                turn.set_result(None)

    def _may_have_more(self, user: Hashable) -> bool:
        taken = self._taken[user]
        return not taken or taken + self._waiting[user][0][0] <= self._share_bytes
