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
from typing import NamedTuple, Protocol, runtime_checkable
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
KEPT_PASSES = 64  # of groups that were read in several, of each source


class TooShort(ValueError):
    """A source without a sample of the wanted length; the message names the remedy."""


class NoShards(ValueError):
    """A source of which nobody has anything; the message names the remedy."""


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


@runtime_checkable
class ComingShards(Protocol):
    """A source's further methods if its shards come while it is read."""

    def expect(self, now: Sequence[int], then: Sequence[int]) -> None:
        """Note which shards are read next, and which after them."""
        ...

    def here(self, wanted: Sequence[int], *, all_of: bool) -> tuple[list[int], list[int]]:
        """Wait until one of these shards is here, or all of them; return those that are, and those
        that are given up because nobody has them."""
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
    """A group of shards that is open, or the part of it that is here, and the order of its
    samples."""

    shards: list[_Shard]
    before: NDArray[np.int64]  # samples up to the end of each shard
    order: NDArray[np.int64]

    def sample(self, index: int, length: int) -> TokenIds:
        number = int(self.order[index])
        shard = int(np.searchsorted(self.before, number, side="right"))
        in_shard = number - int(self.before[shard])  # negative: from the end of its starts
        start = int(self.shards[shard].starts[in_shard])
        return self.shards[shard].tokens[start : start + length]


_Passes = dict[tuple[int, int, int], int]  # epoch, group, shards done: those that were late


class _SourceReader:
    """One source's samples in turn, from a place on. `passes` are those that were begun before;
    one that `expects` says what it reads next."""

    def __init__(
        self,
        source: ShardSource,
        stream: SampleStream,
        length: int,
        place: SourcePlace,
        passes: _Passes,
        expects: bool,
    ) -> None:
        self._source, self._length, self.place, self._passes = source, length, place, passes
        self._expects = expects
        self._coming = source if isinstance(source, ComingShards) else None
        self._order = ShardOrder(stream, source.name, len(source.sizes))
        if place.group >= self._order.groups or not self._left(place):
            raise _outside()
        self._group: _Group | None = None
        if place.number or place.late:
            passes[place.epoch, place.group, place.done] = place.late

    def next(self) -> TokenIds:
        """Return the next sample, a view of `length` tokens."""
        group = self._opened()
        sample = group.sample(self.place.number, self._length)
        self._go(1, group)
        return sample

    def skip(self, count: int) -> None:
        """Pass over samples."""
        while count:
            group = self._opened()
            step = min(count, len(group.order) - self.place.number)
            self._go(step, group)
            count -= step

    def expect(self) -> None:
        """Say which shards are read next: the rest of this group, and the one that follows it."""
        if self._coming is not None and self._expects:
            shards = self._order.group(self.place.epoch, self.place.group)
            now = [shards[bit] for bit in self._left(self.place)]
            then = self._order.group(*self._order.after(self.place.epoch, self.place.group))
            self._coming.expect(now, then)

    def _go(self, step: int, group: _Group) -> None:
        """Move on in the open group, and out of it after its last sample."""
        self.place = self.place._replace(number=self.place.number + step)
        if self.place.number == len(group.order):
            self._end_pass()

    def _end_pass(self) -> None:
        """Go on with the shards of the group that were late, or else with the next group."""
        place, self._group = self.place, None  # its shards go before the next ones come
        if place.late:
            shards = len(self._order.group(place.epoch, place.group))
            done = (1 << shards) - 1 & ~place.late
            self.place = place._replace(number=0, done=done, late=0)
        else:
            self.place = SourcePlace(*self._order.after(place.epoch, place.group))

    def _opened(self) -> _Group:
        """Return the group of the next sample."""
        tries = 0
        while self._group is None:
            if tries > 2 * self._order.groups:
                raise NoShards(
                    f"nobody has any shard of the data {self._source.name[:16]}…; wait until a "
                    "member with them is back, or name a copy of their folder with --data"
                )
            tries += 1
            self._group = self._open()
            shards = 0 if self._group is None else len(self._group.order)
            if self.place.number > shards and self._coming is None:
                raise _outside()
            if self.place.number >= shards:
                self._end_pass()
        return self._group

    def _open(self) -> _Group | None:
        """Open what is here of the group; return None if nobody has anything of it."""
        shards = self._order.group(self.place.epoch, self.place.group)
        bits = self._left(self.place) if self._coming is None else self._here(shards)
        if not bits:
            return None
        opened = [_opened(self._source, shards[bit], self._length) for bit in bits]
        before = np.cumsum([len(each.starts) for each in opened])
        order = self._order.samples(self.place.epoch, self.place.group, int(before[-1]))
        return _Group(opened, before, order)

    def _here(self, shards: Sequence[int]) -> list[int]:
        """Wait for shards of the group; return the bits of those that are read now. A pass that
        was begun before reads the same shards again, as far as anybody has them."""
        assert self._coming is not None, "all shards are here"
        self.expect()
        place, left = self.place, self._left(self.place)
        begun = self._passes.get((place.epoch, place.group, place.done))
        rest = [bit for bit in left if not (begun or 0) >> bit & 1]
        here, gone = self._coming.here([shards[bit] for bit in rest], all_of=begun is not None)
        if begun is None:
            begun = sum(1 << bit for bit in rest if shards[bit] not in {*here, *gone})
            self._passes[place.epoch, place.group, place.done] = begun
            if len(self._passes) > KEPT_PASSES:
                del self._passes[next(iter(self._passes))]
        self.place = place._replace(late=begun)
        return [bit for bit in rest if shards[bit] in here]

    def _left(self, place: SourcePlace) -> list[int]:
        """Return the bits of the shards of a place's group that were in no pass before."""
        shards = len(self._order.group(place.epoch, place.group))
        return [bit for bit in range(shards) if not place.done >> bit & 1]


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
        self._passes = [_Passes() for _ in text.sources]
        self._readers = self._readers_at(self._start.places)
        for reader in self._readers:
            reader.expect()

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
        # What this thread reads is not what the one that trains reads next.
        readers = self._readers_at(nearest.places, expects=False)
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

    def _readers_at(
        self, places: Sequence[SourcePlace], *, expects: bool = True
    ) -> list[_SourceReader]:
        return [
            _SourceReader(source, self._stream, self.length, place, passes, expects)
            for source, place, passes in zip(self._text.sources, places, self._passes, strict=True)
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
