"""The order of a stage server's work: backward passes first, each kind in order of arrival.

A backward pass frees memory all along the pipeline and shortens the round trip; a forward pass
adds to the work in flight. Several waiting forward passes are computed together, each with the
result that it would have alone. Sans I/O."""

import collections
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Job = TypeVar("Job")


@dataclass(slots=True)
class StageQueue(Generic[Job]):
    """A queue of at most `room` jobs of each kind, so that neither kind crowds out the other.
    Forward jobs are taken up to `together` at once."""

    room: int
    together: int = 1
    _forward: collections.deque[Job] = field(default_factory=collections.deque)
    _backward: collections.deque[Job] = field(default_factory=collections.deque)

    def has_room(self, *, backward: bool) -> bool:
        """True if one more job of this kind can wait."""
        return len(self._backward if backward else self._forward) < self.room

    def put(self, job: Job, *, backward: bool) -> None:
        """Add a job."""
        assert self.has_room(backward=backward), "a job was admitted to a full queue"
        (self._backward if backward else self._forward).append(job)

    def take(self) -> list[Job]:
        """Take one backward job, else up to `together` forward jobs; empty if none waits."""
        if self._backward:
            return [self._backward.popleft()]
        count = min(self.together, len(self._forward))
        return [self._forward.popleft() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._forward) + len(self._backward)
