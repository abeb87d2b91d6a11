"""A peer's samples, read from shards: a pure function of the stream and of their numbers.

    number -> source            mixture.py
    source -> epoch, group      shard_order.py, up to eight shards at a time
    group  -> shard, sample     packing.py

Reading in turn is cheap: one group of each source is in memory. A cursor (cursor.py) leads to any
place without what comes before it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from farflock.node.data.cursor import (
    FINGERPRINT_BYTES,
    MAX_SOURCES,
    BadCursor,
    Cursor,
    SourcePlace,
    read_cursor,
)
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.mixture import BadMixture, Mixture, shares_of
from farflock.node.data.packing import sample_starts
from farflock.node.data.shard_order import SampleStream, ShardOrder
from farflock.node.tokens.tokenizer import TokenIds

KEPT_CURSORS = 4096  # of the newest places: some rounds' worth


class TooShort(ValueError):
    """A source without a sample of the wanted length; the message names the remedy."""


class ShardSource(Protocol):
    """A source of shards: what it is called, where its documents end, and its tokens. Equal ones
    have equal hashes and shards."""

    @property
    def name(self) -> str:
        """A name without spaces: the root."""
        ...

    @property
    def end_of_text(self) -> int | None: ...
    @property
    def sizes(self) -> Sequence[int]:
        """The tokens of each shard."""
        ...

    def read(self, number: int) -> TokenIds:
        """Return the tokens of a shard; raise an error with a remedy if they are not here."""
        ...


@dataclass(frozen=True, slots=True)
class FolderShards:
    """The shards of a prepared folder that are trained on."""

    content: PreparedFolder

    @property
    def name(self) -> str:
        """The root of the data."""
        return self.content.root

    @property
    def end_of_text(self) -> int:
        """The token that ends documents."""
        return self.content.index.end_of_text

    @property
    def sizes(self) -> Sequence[int]:
        """The tokens of each shard."""
        return self.content.sizes("train")

    def read(self, number: int) -> TokenIds:
        """Return the tokens of a shard; raise `BadIndex` if it is damaged."""
        return self.content.read("train", number)


class TokensInMemory:
    """Tokens in memory as one shard of one document; its name is their hash."""

    end_of_text = None

    def __init__(self, tokens: TokenIds) -> None:
        self._tokens = tokens
        self.name, self.sizes = blake3(tokens.tobytes()).hexdigest(), (len(tokens),)

    def read(self, number: int) -> TokenIds:
        """Return the tokens."""
        return self._tokens


class Text(NamedTuple):
    """The data of a run to train on: its sources, and the weight of each."""

    sources: tuple[ShardSource, ...]
    weights: tuple[float, ...]


def text_in_memory(tokens: TokenIds) -> Text:
    """Return tokens (n,) as a text of one source."""
    return Text((TokensInMemory(tokens),), (1.0,))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class _Shard:
    """A shard that is open: its tokens, and where its samples start."""

    tokens: TokenIds
    starts: NDArray[np.int64]


# All peers of a simulation read one text: they share what is open in any of them.
_OPEN = WeakValueDictionary[tuple[ShardSource, int, int], _Shard]()


def _opened(source: ShardSource, number: int, length: int) -> _Shard:
    """Return a shard of a source, for samples of `length` tokens."""
    place = source, number, length
    found = _OPEN.get(place)
    if found is None:
        tokens = source.read(number)
        found = _Shard(tokens, sample_starts(tokens, source.end_of_text, length))
        _OPEN[place] = found
    return found


class _Group(NamedTuple):
    """A group of shards that is open, and the order of its samples."""

    shards: list[_Shard]
    before: NDArray[np.int64]  # samples up to the end of each shard
    order: NDArray[np.int64]

    def sample(self, index: int, length: int) -> TokenIds:
        number = int(self.order[index])
        shard = int(np.searchsorted(self.before, number, side="right"))
        in_shard = number - int(self.before[shard])  # negative: from the end of its starts
        start = int(self.shards[shard].starts[in_shard])
        return self.shards[shard].tokens[start : start + length]


class _SourceReader:
    """One source's samples in turn, from a place on."""

    def __init__(
        self, source: ShardSource, stream: SampleStream, length: int, place: SourcePlace
    ) -> None:
        self._source, self._length = source, length
        self._order = ShardOrder(stream, source.name, len(source.sizes))
        if place.group >= self._order.groups:
            raise _outside()
        self._epoch, self._number, self._index = place
        self._group: _Group | None = None

    @property
    def place(self) -> SourcePlace:
        """The next sample."""
        return SourcePlace(self._epoch, self._number, self._index)

    def next(self) -> TokenIds:
        """Return the next sample, a view of `length` tokens."""
        group = self._opened()
        self._index += 1
        return group.sample(self._index - 1, self._length)

    def skip(self, count: int) -> None:
        """Pass over samples."""
        while count:
            step = min(count, len(self._opened().order) - self._index)
            self._index, count = self._index + step, count - step

    def _opened(self) -> _Group:
        """Return the group of the next sample."""
        while True:
            if self._group is None:
                self._group = self._open()
            if self._index < len(self._group.order):
                return self._group
            if self._index > len(self._group.order):
                raise _outside()
            self._epoch, self._number = self._order.after(self._epoch, self._number)
            self._group, self._index = None, 0  # its shards go before the next ones come

    def _open(self) -> _Group:
        numbers = self._order.group(self._epoch, self._number)
        shards = [_opened(self._source, number, self._length) for number in numbers]
        before = np.cumsum([len(each.starts) for each in shards])
        order = self._order.samples(self._epoch, self._number, int(before[-1]))
        return _Group(shards, before, order)


class SampleReader:
    """The samples of one stream, each of `length` tokens.

    Raise `BadMixture` or `TooShort` for sources that cannot be drawn from. `start` is where most
    reading begins, as `cursor` gives it; raise `BadCursor` if it is that of other samples."""

    def __init__(self, text: Text, stream: SampleStream, length: int, start: bytes = b"") -> None:
        _require_samples(text, length)
        self._text, self._stream, self.length = text, stream, length
        self._mixture = Mixture(text.weights, stream.key("mixture"))
        self.fingerprint = _fingerprint(text, stream, length)
        sources = len(text.sources)
        first = Cursor(self.fingerprint, 0, (SourcePlace(),) * sources)
        self._start = read_cursor(start, self.fingerprint, sources) if start else first
        self._fixed = {0: first, self._start.drawn: self._start}
        self._newest = OrderedDict[int, Cursor]()
        self._at = self._start.drawn
        self._readers = self._readers_at(self._start.places)

    @property
    def start(self) -> int:
        """The number of the sample at which reading begins."""
        return self._start.drawn

    def read(self, first: int, count: int) -> NDArray[np.integer]:
        """Return `count` samples from number `first` on: (count, length)."""
        if first != self._at:
            self._move(first)
        rows = [
            self._readers[self._mixture.source(number)].next()
            for number in range(first, first + count)
        ]
        self._at = first + count
        self._keep(self._cursor())
        return np.stack(rows)

    def cursor(self, number: int) -> Cursor:
        """Return the place of a sample. It costs nothing for a place at which a call of `read`
        ended lately; any thread may ask."""
        known = self._newest.get(number) or self._fixed.get(number)
        return known if known is not None else self._reached(number)

    def _reached(self, number: int) -> Cursor:
        """Return the place of a sample that is reached from the nearest known one before it."""
        nearest = self._nearest(number)
        readers = self._readers_at(nearest.places)
        self._skip(readers, nearest.drawn, number)
        return Cursor(self.fingerprint, number, tuple(reader.place for reader in readers))

    def _nearest(self, number: int) -> Cursor:
        known = dict(tuple(self._newest.items())) | self._fixed  # another thread may read on
        return known[max(place for place in known if place <= number)]

    def _move(self, number: int) -> None:
        """Go on reading at a sample: from here, if no known place is nearer."""
        nearest = self._nearest(number)
        if not nearest.drawn <= self._at <= number:
            self._seek(nearest)
        self._skip(self._readers, self._at, number)
        self._at = number

    def _seek(self, cursor: Cursor) -> None:
        self._at, self._readers = cursor.drawn, self._readers_at(cursor.places)

    def _skip(self, readers: "list[_SourceReader]", first: int, stop: int) -> None:
        for reader, count in zip(readers, self._mixture.drawn(first, stop), strict=True):
            reader.skip(count)

    def _readers_at(self, places: Sequence[SourcePlace]) -> list[_SourceReader]:
        return [
            _SourceReader(source, self._stream, self.length, place)
            for source, place in zip(self._text.sources, places, strict=True)
        ]

    def _cursor(self) -> Cursor:
        return Cursor(self.fingerprint, self._at, tuple(reader.place for reader in self._readers))

    def _keep(self, cursor: Cursor) -> None:
        self._newest[cursor.drawn] = cursor
        if len(self._newest) > KEPT_CURSORS:
            self._newest.popitem(last=False)


def _require_samples(text: Text, length: int) -> None:
    if not 0 < len(text.sources) <= MAX_SOURCES:
        raise BadMixture(
            f"the data has {len(text.sources)} sources; name one to {MAX_SOURCES}, or prepare some "
            "of them together"
        )
    for source in text.sources:
        if max(source.sizes, default=0) < length:
            raise TooShort(
                f"no shard of the data {source.name[:16]} has {length:,} tokens, which a sequence "
                "and its next token take; prepare more text, or train on shorter sequences"
            )


def _fingerprint(text: Text, stream: SampleStream, length: int) -> bytes:
    """Return what a cursor is checked by: a hash of all that the samples depend on."""
    names = [source.name for source in text.sources]
    given = repr((1, *stream, names, shares_of(text.weights), length))
    return blake3(given.encode()).digest(length=FINGERPRINT_BYTES)


def _outside() -> BadCursor:
    return BadCursor(
        "the position in the data is beyond its end; move it away to start at the first sample"
    )
