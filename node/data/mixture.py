"""The source of each of a peer's samples: the first of three keyed orders.

Samples come in blocks of 1,000. A block holds each source's share by largest remainder, and what a
source got too much or too little is carried to the next block. So after any number of blocks a
source has at most one or two samples more or less than its share. The order in a block is keyed by
the block.

Shares are rounded to millionths. So after 1,000 blocks each source is due a whole number, and
counting begins anew: the counts of any block are found without all blocks before it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from farflock.node.data.random_order import random_order

BLOCK_SAMPLES = 1000
WHOLE = 1_000_000  # of the whole, in which shares are counted
_CYCLE = WHOLE // BLOCK_SAMPLES  # blocks after which counts recur
_BLOCKS = 1 << 63  # that have an order of their own

_Places = NDArray[np.int64]


class BadMixture(ValueError):
    """Weights that nothing can be drawn by; the message names the remedy."""


class Mixture:
    """The source of each sample of one stream, by `weights` that need not add up to 1.

    `key` is the stream's. Raise `BadMixture` for weights that are not positive, or that are less
    than a millionth of the whole."""

    def __init__(self, weights: Sequence[float], key: NDArray[np.uint64]) -> None:
        self._key = key
        self._counts = block_counts(shares_of(weights))
        self._block = lru_cache(2)(self._ordered)  # what is being read, and the next

    def source(self, number: int) -> int:
        """Return the source of a sample, by its number in the stream."""
        block, place = divmod(number, BLOCK_SAMPLES)
        return int(self._block(block)[place])

    def drawn(self, first: int, stop: int) -> list[int]:
        """Return how many samples of each source are among those from `first` to below `stop`."""
        counts: list[int] = (self._before(stop) - self._before(first)).tolist()
        return counts

    def _before(self, number: int) -> _Places:
        block, place = divmod(number, BLOCK_SAMPLES)
        cycles, rest = divmod(block, _CYCLE)
        whole: _Places = cycles * self._counts.sum(axis=0) + self._counts[:rest].sum(axis=0)
        begun = np.bincount(self._block(block)[:place], minlength=len(whole))
        return whole + begun

    def _ordered(self, block: int) -> _Places:
        sources = np.repeat(np.arange(self._counts.shape[1]), self._counts[block % _CYCLE])
        return sources[random_order(self._key, (block % _BLOCKS, 0), BLOCK_SAMPLES)]


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return each weight's share in millionths, by largest remainder; they add up to a million."""
    for weight in weights:
        if not 0 < weight < math.inf:
            raise BadMixture(f"a source has the weight {weight}; use a positive number")
    exact = [Fraction(weight) for weight in weights]
    unit = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * unit) for each in exact]
    shares = _divided([each * WHOLE for each in whole], sum(whole), WHOLE)
    if not all(shares):
        raise BadMixture(
            "a source has less than a millionth of all samples; give it more, or leave it out"
        )
    return tuple(shares)


@lru_cache(maxsize=16)
def block_counts(shares: tuple[int, ...]) -> _Places:
    """Return how many samples of each source the blocks have until they recur: (1000, sources)."""
    carried, counts = [0] * len(shares), list[list[int]]()  # in millionths of a sample
    for _ in range(_CYCLE):
        due = [share * BLOCK_SAMPLES + rest for share, rest in zip(shares, carried, strict=True)]
        counts.append(_divided(due, WHOLE, BLOCK_SAMPLES))
        carried = [each - count * WHOLE for each, count in zip(due, counts[-1], strict=True)]
    return np.array(counts, dtype=np.int64)


def _divided(due: Sequence[int], unit: int, total: int) -> list[int]:
    """Return non-negative counts of units that add up to `total`, as what is `due` does: rounded
    down, and one more for the largest remainders. Of equal ones, the first source comes first."""
    counts = [max(0, each // unit) for each in due]
    left = [each - count * unit for each, count in zip(due, counts, strict=True)]
    by_left = sorted(range(len(due)), key=lambda place: -left[place])
    missing = total - sum(counts)
    if missing >= 0:
        for place in by_left[:missing]:
            counts[place] += 1
    else:  # sources had too much of the blocks before, and cannot get less than nothing
        for place in [each for each in reversed(by_left) if counts[each]][:-missing]:
            counts[place] -= 1
    return counts
