"""A reader gives the samples that the slow, obvious way gives, wherever it starts."""

import itertools
import weakref
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.prepared import prepared

from farflock.node.data import samples
from farflock.node.data.cursor import BadCursor, Cursor, SourcePlace
from farflock.node.data.index import BadIndex
from farflock.node.data.mixture import BadMixture, Mixture
from farflock.node.data.packing import sample_starts
from farflock.node.data.samples import (
    FolderShards,
    SampleReader,
    Text,
    TooShort,
    text_in_memory,
)
from farflock.node.data.shard_order import SampleStream, ShardOrder

END, LENGTH = 0, 9
ALICE = SampleStream(1, "alice")


class Shards:
    """A source in memory, which counts what is read; each token tells where it stands."""

    def __init__(self, name, *sizes, documents=7):
        self.name, self.end_of_text, self.sizes, self.read_counts = name, END, sizes, Counter()
        self._first = int(name, 36) * 10**6
        self._documents, self._open = documents, []

    def read(self, number):
        self.read_counts[number] += 1
        tokens = np.arange(self.sizes[number], dtype=np.uint32) + number * 10**4 + self._first
        tokens[self._documents - 1 :: self._documents] = END
        tokens[-1:] = END
        self._open.append(weakref.ref(tokens))
        return tokens

    def open_shards(self):
        return sum(each() is not None for each in self._open)


def read_shards(text):
    return sum(source.read_counts.total() for source in text.sources)


def two():
    return Text((Shards("a", *range(20, 33)), Shards("b", 200, 31, 5, 64)), (0.7, 0.3))


def plainly(text, stream, length, count):
    """All samples one after the other: every shard of a group, every sample, in their orders."""

    def of(source):
        order = ShardOrder(stream, source.name, len(source.sizes))
        for epoch in itertools.count():
            for group in range(order.groups):
                found = []
                for shard in order.group(epoch, group):
                    tokens = source.read(shard)
                    starts = sample_starts(tokens, END, length)
                    found += [tokens[start : start + length].tolist() for start in starts]
                yield from (found[place] for place in order.samples(epoch, group, len(found)))

    walks = [of(source) for source in text.sources]
    mixture = Mixture(text.weights, stream.key("mixture"))
    return [next(walks[mixture.source(number)]) for number in range(count)]


PLAIN = plainly(two(), ALICE, LENGTH, 2500)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_samples_in_turn_are_those_of_the_plain_way(sizes):
    reader, at = SampleReader(two(), ALICE, LENGTH), 0
    for count in sizes:
        assert reader.read(at, count).tolist() == PLAIN[at : at + count]
        at += count


@given(st.lists(st.tuples(st.integers(0, 2400), st.integers(1, 100)), min_size=1, max_size=6))
def test_a_sample_depends_on_its_number_alone(places):
    reader = SampleReader(two(), ALICE, LENGTH)
    for first, count in places:
        assert reader.read(first, count).tolist() == PLAIN[first : first + count]


@given(st.integers(0, 2300), st.integers(1, 100))
def test_another_life_goes_on_from_a_cursor_with_nothing_of_the_past(first, count):
    cursor = SampleReader(two(), ALICE, LENGTH).cursor(first).encode()
    text = two()
    reader = SampleReader(text, ALICE, LENGTH, cursor)
    assert reader.start == first
    assert reader.read(first, count).tolist() == PLAIN[first : first + count]
    assert read_shards(text) <= 8 * (4 + count // 8), "about what these samples take"


def test_the_place_after_what_was_read_costs_nothing():
    text = two()
    reader = SampleReader(text, ALICE, LENGTH)
    reader.read(0, 500)
    before = read_shards(text)
    cursor = reader.cursor(500)
    assert read_shards(text) == before
    assert cursor == SampleReader(two(), ALICE, LENGTH).cursor(500)


def test_only_the_newest_places_are_kept(monkeypatch):
    monkeypatch.setattr(samples, "KEPT_CURSORS", 3)
    start = SampleReader(two(), ALICE, LENGTH).cursor(7).encode()
    text = two()
    reader = SampleReader(text, ALICE, LENGTH, start)
    for first in range(7, 100, 3):
        reader.read(first, 3)
    before = read_shards(text)
    assert [reader.cursor(place).drawn for place in (0, 7, 94, 97, 100)] == [0, 7, 94, 97, 100]
    assert read_shards(text) == before
    reader.cursor(91)
    assert read_shards(text) > before
    assert reader.read(10, 30).tolist() == PLAIN[10:40]
    assert reader.read(2, 3).tolist() == PLAIN[2:5]


def test_each_sample_of_a_source_comes_once_an_epoch():
    text = Text((Shards("a", *range(20, 43)),), (1.0,))
    in_epoch = sum(
        len(sample_starts(text.sources[0].read(n), END, LENGTH)) for n in range(len(range(20, 43)))
    )
    seen = SampleReader(text, ALICE, LENGTH).read(0, 3 * in_epoch).tolist()
    epochs = [seen[at : at + in_epoch] for at in range(0, len(seen), in_epoch)]
    assert all(len(set(map(tuple, epoch))) == in_epoch for epoch in epochs)
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]


def test_eight_shards_are_open_and_the_first_sample_needs_one():
    source = Shards("a", *[50] * 40)
    reader = SampleReader(Text((source,), (1.0,)), ALICE, LENGTH)
    reader.read(0, 1)
    assert source.read_counts.total() == 1
    held = []
    for number in range(1, 220):
        reader.read(number, 1)
        held.append(source.open_shards())
    assert sorted(set(held)) == [0, 1, 2, 4, 8], "they go with the last sample of their group"


def test_peers_in_one_process_share_what_is_open_and_keep_nothing_that_is_not():
    source = Shards("a", 50)
    text = Text((source,), (1.0,))
    one, other = (SampleReader(text, SampleStream(1, peer), LENGTH) for peer in ("alice", "bob"))
    assert one.read(0, 5).tolist() != other.read(0, 5).tolist()
    assert source.read_counts.total() == 1
    del one, other
    assert source.open_shards() == 0


def test_tokens_in_memory_are_one_shard_that_is_named_by_its_content():
    tokens = np.arange(1, 100, dtype=np.uint16)
    one, other = text_in_memory(tokens), text_in_memory(tokens + 1)
    rows = SampleReader(one, ALICE, LENGTH).read(0, 11)
    assert sorted(rows[:, 0].tolist()) == list(range(1, 100, LENGTH))
    assert one.sources[0].name == text_in_memory(tokens.copy()).sources[0].name
    assert one.sources[0].name != other.sources[0].name


def test_a_shard_without_a_sample_is_passed_over():
    source = Shards("a", 5, 5, 5, 5, 30, 5, 5, 5, 5, 5, 5)
    rows = SampleReader(Text((source,), (1.0,)), ALICE, LENGTH).read(0, 30)
    assert set(rows[rows != END] // 10**4 % 100) == {4}


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        (Text((Shards("a", 8, 3),), (1.0,)), TooShort, "no shard of the data a has 9 tokens"),
        (Text((), ()), BadMixture, "the data has 0 sources; name one to 14"),
        (Text((Shards("a", 20),) * 15, (1.0,) * 15), BadMixture, "has 15 sources"),
        (Text((Shards("a", 20),), (0.0,)), BadMixture, "use a positive number"),
    ],
    ids=range(4),
)
def test_data_that_cannot_be_drawn_from_are_refused(text, error, sentence):
    with pytest.raises(error, match=sentence):
        SampleReader(text, ALICE, LENGTH)


@pytest.mark.parametrize(
    "other",
    [
        (two(), SampleStream(2, "alice"), LENGTH),
        (two(), SampleStream(1, "bob"), LENGTH),
        (two(), SampleStream(1, "alice", 1), LENGTH),
        (two(), ALICE, LENGTH + 1),
        (Text(two().sources, (0.6, 0.4)), ALICE, LENGTH),
        (Text((Shards("a", 20), Shards("c", 20)), (0.7, 0.3)), ALICE, LENGTH),
    ],
    ids=range(6),
)
def test_the_cursor_of_other_samples_is_refused(other):
    cursor = SampleReader(*other).cursor(5).encode()
    with pytest.raises(BadCursor, match="of another run, or of other data"):
        SampleReader(two(), ALICE, LENGTH, cursor)


@pytest.mark.parametrize("place", [SourcePlace(0, 99, 0), SourcePlace(0, 1, 10**6)])
def test_a_cursor_beyond_the_end_is_refused(place):
    reader = SampleReader(two(), ALICE, LENGTH)
    lie = Cursor(reader.fingerprint, 3, (place, place)).encode()
    with pytest.raises(BadCursor, match="is beyond its end; move it away"):
        SampleReader(two(), ALICE, LENGTH, lie).read(3, 9)


def test_a_prepared_folder_is_read_in_place_and_a_damaged_shard_is_named(small, texts, tmp_path):
    content = prepared(texts, tmp_path / "out", held_out=0.1).content
    text = Text((FolderShards(content),), (1.0,))
    reader = SampleReader(text, ALICE, 65)
    rows = reader.read(0, 300)
    assert rows.shape == (300, 65)
    everything = b"".join(
        content.read("train", n).astype(np.uint8).tobytes() for n in range(content.shards("train"))
    )
    assert all(bytes(row.tolist()) in everything for row in rows)
    del reader  # what it has open would be shared
    place = content.place("train", 0)
    with place.path.open("r+b") as file:
        file.seek(place.offset + 5)
        file.write(b"?")
    with pytest.raises(BadIndex, match=r"is damaged at byte .*; copy the file again") as caught:
        SampleReader(text, ALICE, 65).read(0, 300)
    assert "\n" not in str(caught.value)
