"""The order in which a peer reads a source: the second and the third of three keyed orders.

In each epoch the shards have an order of their own, and are cut into groups of 1, 2, 4, 8, 8, 8 and
so on: a peer can begin as soon as it has the first shard, never has more than eight open, and knows
the next group while it reads one. The samples of a group come in an order that is keyed by the
group. So each sample comes once in an epoch.

How many samples a shard has follows from its bytes alone (packing.py). So a place is named by its
group and its number in there: no other group has to be known.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farflock.node.data.random_order import philox_key, random_order

OPEN_SHARDS = 8
_DOUBLINGS = OPEN_SHARDS.bit_length() - 1  # groups before the first of eight
_EPOCHS = 1 << 63  # that have orders of their own


class SampleStream(NamedTuple):
    """The name of one sequence of samples: all orders are keyed by it."""

    run_seed: int
    peer: str
    lane: int = 0

    def key(self, purpose: str) -> NDArray[np.uint64]:
        """Return the key of one of its orders; a purpose has no spaces, so no two texts are
        equal."""
        return philox_key(f"farflock-samples-v1 {purpose} {self.run_seed} {self.lane} {self.peer}")


class ShardOrder:
    """The order in which a stream reads a source of `shards` shards; `name` is the source's."""

    def __init__(self, stream: SampleStream, name: str, shards: int) -> None:
        assert shards > 0, "a source has shards"
        self._key, self.shards = stream.key(name), shards
        self._epoch = lru_cache(2)(self._ordered)  # what is being read, and the next

    @property
    def groups(self) -> int:
        """The number of groups in each epoch."""
        return group_of(self.shards - 1) + 1

    def group(self, epoch: int, group: int) -> list[int]:
        """Return the shards of a group, in their order."""
        first, stop = group_range(group)
        shards: list[int] = self._epoch(epoch)[first:stop].tolist()
        return shards

    def after(self, epoch: int, group: int) -> tuple[int, int]:
        """Return the epoch and the number of the group that follows."""
        return (epoch, group + 1) if group + 1 < self.groups else (epoch + 1, 0)

    def samples(self, epoch: int, group: int, count: int) -> NDArray[np.int64]:
        """Return the order of a group's `count` samples, numbered through its shards in turn."""
        return random_order(self._key, (epoch % _EPOCHS, group + 1), count)

    def _ordered(self, epoch: int) -> NDArray[np.int64]:
        return random_order(self._key, (epoch % _EPOCHS, 0), self.shards)


def group_range(group: int) -> tuple[int, int]:
    """Return the place of a group's first shard in the epoch's order, and that after its last."""
    if group < _DOUBLINGS:
        return (1 << group) - 1, (2 << group) - 1
    first = OPEN_SHARDS - 1 + (group - _DOUBLINGS) * OPEN_SHARDS
    return first, first + OPEN_SHARDS


def group_of(place: int) -> int:
    """Return the group of the shard at a place in the epoch's order."""
    if place < OPEN_SHARDS - 1:
        return (place + 1).bit_length() - 1
    return _DOUBLINGS + (place - (OPEN_SHARDS - 1)) // OPEN_SHARDS
