"""What a stage server has to do, in which order: backward passes before forward ones, each kind first come first served.

A backward pass frees memory all along the pipeline and shortens the round trip; a forward pass takes more in. Forward passes
that wait are done several at once: their results are those of each alone. Sans I/O.
"""

import collections
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")


@dataclass(slots=True)
class StageQueue(Generic[Job]):
    """At most `room` jobs of each kind, so that neither keeps the other out; up to `together` forward ones at once."""

    room: int
    together: int = 1
    _forward: collections.deque[Job] = field(default_factory=collections.deque)
    _backward: collections.deque[Job] = field(default_factory=collections.deque)

    def has_room(self, *, backward: bool) -> bool:
        """Whether one more job of a kind may wait."""
        return len(self._backward if backward else self._forward) < self.room

    def put(self, job: Job, *, backward: bool) -> None:
        """One more job."""
        assert self.has_room(backward=backward), "a job that was not to be admitted"
        (self._backward if backward else self._forward).append(job)

    def take(self) -> list[Job]:
        """What to do next: one backward pass, or a few forward ones; nothing if nothing waits."""
        if self._backward:
            return [self._backward.popleft()]
        count = min(self.together, len(self._forward))
        return [self._forward.popleft() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._forward) + len(self._backward)
