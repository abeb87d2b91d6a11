"""Independent pieces of one computation, done one after the other or by several threads.

The bits never depend on which: no piece reads what another writes. Kernels and torch release the
interpreter lock, so threads gain where a piece is large.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Returned = TypeVar("Returned")


class Spread(Protocol):
    """A way to do a piece of work for each item."""

    def __call__(
        self, work: Callable[[Item], Returned], items: Sequence[Item], /
    ) -> list[Returned]:
        """Return the results in the order of the items; raise what the first failed piece
        raised."""
        ...


def in_turn(work: Callable[[Item], Returned], items: Sequence[Item]) -> list[Returned]:
    """Do all pieces in the calling thread."""
    return [work(item) for item in items]


class Threads:
    """Does pieces in `count` threads, while the calling thread waits; a piece must not spread its
    own work over the same threads."""

    def __init__(self, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, thread_name_prefix="spread")

    def __call__(
        self, work: Callable[[Item], Returned], items: Sequence[Item], /
    ) -> list[Returned]:
        """Do all pieces; without a second one, in the calling thread."""
        if len(items) < 2:
            return in_turn(work, items)
        return list(self._executor.map(work, items))

    def close(self) -> None:
        """End the threads."""
        self._executor.shutdown()


def spread_over(count: int) -> Spread:
    """Return a way to use `count` threads, the calling one if that is all."""
    return in_turn if count == 1 else Threads(count)
