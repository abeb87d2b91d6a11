"""The order of a stage server's work: backward and forward passes in turn, each kind in order of
arrival, as in one-forward-one-backward schedules (PipeDream, arXiv:1806.03377).

Either kind first would let the microbatches in flight gather into one crowd, which the stages then
serve one after the other: while one stage is done with the crowd's backward passes, the others wait
for the forward passes that wait behind them. Where no backward pass waits, several forward passes
are computed together, each with the result that it would have alone.

Passes on held-out text have a turn of their own between the two. So an evaluation goes on however
much there is to train, and holds each pass up by one of its own at most. Sans I/O."""

import collections
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Job = TypeVar("Job")
PassKind = Literal["backward", "measure", "forward"]
TURNS: tuple[PassKind, ...] = ("backward", "measure", "forward")


def _empty() -> dict[PassKind, collections.deque[Job]]:
    return {kind: collections.deque() for kind in TURNS}


@dataclass(slots=True)
class StageQueue(Generic[Job]):
    """A queue of at most `room` jobs of each kind, so that no kind crowds out another."""

    room: int
    together: int = 1
    _waiting: dict[PassKind, collections.deque[Job]] = field(default_factory=_empty)
    _next: int = 0  # the place of the kind whose turn it is

    def has_room(self, kind: PassKind) -> bool:
        """True if one more job of this kind can wait."""
        return len(self._waiting[kind]) < self.room

    def put(self, kind: PassKind, job: Job) -> None:
        """Add a job."""
        assert self.has_room(kind), "a job was admitted to a full queue"
        self._waiting[kind].append(job)

    def take(self) -> list[Job]:
        """Take the next jobs; empty if none waits. The kinds take turns, with one job each; where
        no backward job waits, up to `together` forward jobs are taken at once."""
        for place in range(self._next, self._next + len(TURNS)):
            kind = TURNS[place % len(TURNS)]
            if waiting := self._waiting[kind]:
                self._next = (place + 1) % len(TURNS)
                alone = kind != "forward" or self._waiting["backward"]
                count = min(1 if alone else self.together, len(waiting))
                return [waiting.popleft() for _ in range(count)]
        self._next = 0
        return []

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))
