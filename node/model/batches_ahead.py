"""Batches made ahead of need in a thread of their own, for a trainer that must not wait for data.

A trainer of a pipeline draws its batches where it also talks to the servers of stages: so a batch
that needs a shard from the disk, or one that is still on its way, is made elsewhere, and drawn once
it is here.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from farflock.node.data.coming_shards import ReadingStopped
from farflock.node.data.samples import ComingShards, Text
from farflock.node.model.data import Batches

AHEAD = 2  # batches that are made before they are asked for
KEPT = 4  # batches that were made

_Batch = tuple[Tensor, Tensor]


class BatchesAhead:
    """A stream of batches, of which the next ones are made in a thread."""

    def __init__(self, inner: Batches) -> None:
        self._inner, self._lock = inner, threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
        self._made: dict[int, Future[_Batch]] = {}  # the oldest first

    @property
    def batch_size(self) -> int:
        """The number of sequences."""
        return self._inner.batch_size

    @property
    def seq(self) -> int:
        """The tokens of a sequence."""
        return self._inner.seq

    def is_ready(self, step: int) -> bool:
        """Return whether a batch is made; else it, and those after it, are being made. Raise what
        that ended with."""
        for ahead in range(step, step + AHEAD):
            if ahead not in self._made:
                self._made[ahead] = self._thread.submit(self._make, ahead)
        while len(self._made) > KEPT:
            del self._made[next(iter(self._made))]
        made = self._made[step]
        error = made.exception() if made.done() else None
        if error is not None and not isinstance(error, ReadingStopped):
            raise error
        return made.done() and error is None

    def batch(self, step: int) -> _Batch:
        """Return a step's inputs and next tokens, both int64 (batch_size, seq)."""
        made = self._made.get(step)
        return self._make(step) if made is None else made.result()

    def samples(self, step: int) -> tuple[int, ...]:
        """Return the batch's recurring samples, numbered from 0."""
        return self._inner.samples(step)

    def cursor(self, step: int) -> bytes:
        """Return the place of a batch."""
        return self._inner.cursor(step)

    def _make(self, step: int) -> _Batch:
        with self._lock:
            return self._inner.batch(step)


def ahead_of(batches: Batches, text: Text) -> Batches | BatchesAhead:
    """Return the batches of a text, made ahead of need if its shards come while it is read."""
    coming = any(isinstance(each, ComingShards) for each in text.sources)
    return BatchesAhead(batches) if coming else batches


def is_ready(batches: Batches | BatchesAhead, step: int) -> bool:
    """Return whether a batch can be drawn at once."""
    return not isinstance(batches, BatchesAhead) or batches.is_ready(step)
