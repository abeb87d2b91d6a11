"""The micro-batches in which a device computes a batch: their size, and the gradients around them.

The manifest's batch says what a step learns from; how much of it is computed at once is the
machine's choice, and changes the result by rounding only. (A pipeline's microbatches are another
matter: those travel, and have ids.)
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn


@dataclass(slots=True)
class MicroBatches:
    """The micro-batches of a batch of `batch` sequences, and their size; None: all at once."""

    batch: int
    size: int | None = None

    @property
    def at_once(self) -> int:
        """The number of sequences that are computed at once."""
        return self.batch if self.size is None else min(self.size, self.batch)

    def __iter__(self) -> Iterator[slice]:
        """Yield the rows of each; those of the last may be fewer."""
        for start in range(0, self.batch, self.at_once):
            yield slice(start, min(start + self.at_once, self.batch))

    def halve(self) -> bool:
        """Halve the size; return False if it is 1 already."""
        before = self.at_once
        self.size = max(before // 2, 1)
        return before > 1


@contextmanager
def set_aside(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let the block begin without gradients, then add those of before to what it leaves.

    Methods such as DDP let gradients of several steps add up. If the block raises, they are what
    they were, and what the block left is gone."""
    parameters = list(parameters)
    earlier = [(one, one.grad) for one in parameters if one.grad is not None]
    drop_gradients(parameters)
    try:
        yield
    except BaseException:
        drop_gradients(parameters)
        for one, grad in earlier:
            one.grad = grad
        raise
    for one, grad in earlier:
        one.grad = grad if one.grad is None else grad.add_(one.grad)


def drop_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Free all gradients."""
    for one in parameters:
        one.grad = None
