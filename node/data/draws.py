"""The sample that a peer trains on, as a pure function of (run seed, peer, number).

A peer's numbers come in blocks of 1,024. In each block, each source has a fixed count of places,
in a random order:

    number -> block, place     -> source, and the k of the source's k-th draw
    k      -> epoch, place     the source's windows, all of them in each epoch
    place  -> shard, window    the shards in a random order, and each one's windows

No window comes twice in an epoch of its source. A shard is used up before the next is begun, so
that a peer needs few at a time. All orders are the peer's own, so no draw depends on the others, on
a life before, or on numbers that were left out.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from farflock.node.model.random_order import philox_key, random_order

BLOCK_DRAWS = 1024  # the mixture is exact in each: weights are rounded to 1/1024
_KEPT_ORDERS = 2  # of shards, windows and blocks: what is being used, and the next
_EPOCHS = 1 << 63  # epochs and blocks have so many orders, and then recur


class BadDraws(ValueError):
    """Sources or weights that nothing can be drawn from; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A window of a source: `window` of the source's shard number `shard`, in this epoch."""

    source: str
    shard: int
    window: int
    epoch: int


class Draws:
    """The draws of one peer. `tokens` has the tokens of each shard of each source, in the index's
    order; a window has `length` tokens. `mix` has the sources' weights, without which all windows
    weigh alike."""

    def __init__(
        self,
        tokens: Mapping[str, Sequence[int]],
        length: int,
        run_seed: int,
        peer: str,
        mix: Mapping[str, float] | None = None,
    ) -> None:
        assert length > 0, "a window has tokens"
        windows = {
            source: np.asarray(shards, dtype=np.int64) // length
            for source, shards in tokens.items()
        }
        weights = _weights({source: int(each.sum()) for source, each in windows.items()}, mix)
        drawn = windows if mix is None else [name for name, weight in weights.items() if weight]
        _require_windows(windows, drawn, length)
        self._counts = block_places(weights)
        self._names = list(self._counts)
        self._sources = {
            source: _SourceDraws(windows[source], run_seed, peer, source) for source in self._names
        }
        self._key = philox_key(f"farflock-data-mixture-v1 {run_seed} {peer}")
        self._block = lru_cache(_KEPT_ORDERS)(self._shuffled)

    def draw(self, number: int) -> Drawn:
        """Return the sample of a number, from 0 on."""
        place, of_source = self._source_at(number)
        source = self._names[place]
        shard, window, epoch = self._sources[source].at(of_source)
        return Drawn(source, shard, window, epoch)

    def shards_needed(self, first: int, count: int) -> list[tuple[str, int]]:
        """Return the source and the place of each shard that numbers `first` to `first + count` - 1
        draw from, in the order of first need.

        Only as many blocks are drawn as there are shards, however large `count` is."""
        found = []
        for place, source in enumerate(self._names):
            begin, end = self._before(place, first), self._before(place, first + count)
            for of_source, shard in self._sources[source].shards_between(begin, end):
                found.append((self._number(place, of_source), source, shard))
        return [(source, shard) for _, source, shard in sorted(found)]

    def _shuffled(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the source at each place of a block, and how many of it come before."""
        counts = list(self._counts.values())
        order = random_order(self._key, (block % _EPOCHS, 0), BLOCK_DRAWS)
        sources = np.repeat(np.arange(len(counts)), counts)[order]
        earlier = np.empty_like(sources)
        for place, count in enumerate(counts):
            earlier[sources == place] = np.arange(count)
        return sources, earlier

    def _source_at(self, number: int) -> tuple[int, int]:
        """Return the place of the source of a number, and how many of its draws come before."""
        if number < 0:
            raise BadDraws(f"sample {number} is asked for; number them from 0")
        block, at = divmod(number, BLOCK_DRAWS)
        sources, earlier = self._block(block)
        place = int(sources[at])
        return place, block * self._counts[self._names[place]] + int(earlier[at])

    def _before(self, place: int, number: int) -> int:
        """Return how many draws of a source come before a number."""
        block, at = divmod(number, BLOCK_DRAWS)
        within = int(np.count_nonzero(self._block(block)[0][:at] == place)) if at else 0
        return block * self._counts[self._names[place]] + within

    def _number(self, place: int, of_source: int) -> int:
        """Return the number of a draw of a source."""
        block, earlier = divmod(of_source, self._counts[self._names[place]])
        return block * BLOCK_DRAWS + int(np.flatnonzero(self._block(block)[0] == place)[earlier])


class _SourceDraws:
    """The draws from one source, whose shards have these numbers of windows."""

    def __init__(self, windows: NDArray[np.int64], run_seed: int, peer: str, source: str) -> None:
        # names of sources have no spaces, so that no two lists of parts give one text
        self._key = philox_key(f"farflock-data-windows-v1 {run_seed} {peer} {source}")
        self._shards = np.flatnonzero(windows)
        self._windows = windows[self._shards]
        self._total = int(windows.sum())
        self._epoch = lru_cache(_KEPT_ORDERS)(self._order_of_shards)
        self._shard = lru_cache(_KEPT_ORDERS)(self._order_of_windows)

    def at(self, draw: int) -> tuple[int, int, int]:
        """Return the shard, the window and the epoch of a draw."""
        epoch, place = divmod(draw, self._total)
        order, ends = self._epoch(epoch)
        turn = int(np.searchsorted(ends, place, side="right"))
        shard = int(order[turn])
        before = int(ends[turn] - self._windows[shard])
        window = int(self._shard(epoch, shard)[place - before])
        return int(self._shards[shard]), window, epoch

    def shards_between(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the first draw from `begin` on that needs a shard, and the shard, until `end`."""
        known = set[int]()
        while begin < end and len(known) < len(self._shards):
            epoch, place = divmod(begin, self._total)
            order, ends = self._epoch(epoch)
            turn = int(np.searchsorted(ends, place, side="right"))
            shard = int(self._shards[order[turn]])
            if shard not in known:
                known.add(shard)
                yield begin, shard
            begin = epoch * self._total + int(ends[turn])

    def _order_of_shards(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the shards' order in an epoch, and how many windows there are up to each one's
        end."""
        order = random_order(self._key, (epoch % _EPOCHS, 0), len(self._shards))
        return order, np.cumsum(self._windows[order])

    def _order_of_windows(self, epoch: int, shard: int) -> NDArray[np.int64]:
        place = epoch % _EPOCHS, int(self._shards[shard]) + 1
        return random_order(self._key, place, int(self._windows[shard]))


def block_places(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """Return how many places of a block each source with a weight has.

    They are divided by largest remainder (of equal ones, the first source comes first), except that
    a source whose share is less than one place has one."""
    rest, places = {source: weight for source, weight in weights.items() if weight}, BLOCK_DRAWS
    assert 0 < len(rest) <= BLOCK_DRAWS, "there is a source, and a place for each"
    counts = dict.fromkeys(rest, 1)
    while small := _below_one_place(rest, places):
        places -= len(small)
        rest = {source: weight for source, weight in rest.items() if source not in small}
    total = sum(rest.values())
    shares = {source: weight * places / total for source, weight in rest.items()}
    counts.update((source, math.floor(share)) for source, share in shares.items())
    by_remainder = sorted(shares, key=lambda source: counts[source] - shares[source])
    for source in by_remainder[: BLOCK_DRAWS - sum(counts.values())]:
        counts[source] += 1
    return counts


def _below_one_place(weights: Mapping[str, Fraction], places: int) -> set[str]:
    total = sum(weights.values())
    return {source for source, weight in weights.items() if weight * places < total}


def _weights(windows: Mapping[str, int], mix: Mapping[str, float] | None) -> dict[str, Fraction]:
    """Return the exact weight of each source, in order; raise `BadDraws` for an impossible mix."""
    if mix is None:
        return {source: Fraction(count) for source, count in windows.items()}
    if unknown := sorted(mix.keys() - windows.keys()):
        raise BadDraws(
            f"the mix names {', '.join(unknown)}, and the data has {', '.join(windows)}; "
            "name sources of the data"
        )
    for source, weight in mix.items():
        if not 0 <= weight < math.inf:
            raise BadDraws(f"the weight of {source} is {weight}; use 0 or a positive number")
    weights = {source: Fraction(mix.get(source, 0)) for source in windows}
    if not any(weights.values()):
        raise BadDraws("no source of the mix has a weight; give one source a positive number")
    return weights


def _require_windows(
    windows: Mapping[str, NDArray[np.int64]], drawn: Iterable[str], length: int
) -> None:
    """Raise `BadDraws` unless each source that is to be drawn from has a window."""
    if len(windows) > BLOCK_DRAWS:
        raise BadDraws(
            f"the data has {len(windows)} sources, and a mixture at most {BLOCK_DRAWS}; join some"
        )
    for source in drawn:
        if not windows[source].any():
            raise BadDraws(
                f"no shard of {source} has {length} tokens, which a sequence and its next token "
                "take; prepare more text, train on shorter sequences, or leave the source out of "
                "the mix"
            )
