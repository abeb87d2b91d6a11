"""The order of a stage server's work: backward and forward passes in turn, each kind in order of
arrival, as in one-forward-one-backward schedules (PipeDream, arXiv:1806.03377).

Either kind first would let the microbatches in flight gather into one crowd, which the stages then
serve one after the other: while one stage is done with the crowd's backward passes, the others wait
for the forward passes that wait behind them. Where no backward pass waits, several forward passes
are computed together, each with the result that it would have alone. Sans I/O."""

import collections
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from farflock.swarm.links import PeerId

Job = TypeVar("Job")


@dataclass(slots=True)
class StageQueue(Generic[Job]):
    """A queue of at most `room` jobs of each kind, so that neither kind crowds out the other, but
    for the first job of each caller, so that none is crowded out by others."""

    room: int
    together: int = 1
    _forward: collections.deque[tuple[PeerId, Job]] = field(default_factory=collections.deque)
    _backward: collections.deque[tuple[PeerId, Job]] = field(default_factory=collections.deque)
    _was_backward: bool = False  # the job taken last

    def has_room(self, caller: PeerId, *, backward: bool) -> bool:
        """True if one more job of this kind and caller can wait."""
        jobs = self._backward if backward else self._forward
        return len(jobs) < self.room or all(other != caller for other, _ in jobs)

    def put(self, caller: PeerId, job: Job, *, backward: bool) -> None:
        """Add a job."""
        assert self.has_room(caller, backward=backward), "a job was admitted to a full queue"
        (self._backward if backward else self._forward).append((caller, job))

    def take(self) -> list[Job]:
        """Take the next jobs; empty if none waits. One backward job and one forward job take
        turns; where no backward job waits, up to `together` forward jobs are taken at once."""
        if self._backward and not (self._forward and self._was_backward):
            self._was_backward = True
            return [self._backward.popleft()[1]]
        self._was_backward = False
        count = min(1 if self._backward else self.together, len(self._forward))
        return [self._forward.popleft()[1] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._forward) + len(self._backward)
