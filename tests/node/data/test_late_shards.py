"""Shards that are late are read after those of their group that are here; each sample still comes
once in an epoch, and those of a shard that nobody has come never."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.cursor import read_cursor
from farflock.node.data.samples import NoShards, SampleReader, Text
from farflock.node.data.shard_order import SampleStream, ShardOrder

LENGTH, SHARDS, SAMPLES = 5, 20, 4
ALICE = SampleStream(1, "alice")


class Coming:
    """A source of 20 shards of four samples each. `late` says how many looks at its group a shard
    comes too late; what is in `lost` never comes."""

    name, end_of_text, sizes = "ab", None, [LENGTH * SAMPLES] * SHARDS

    def __init__(self, late=None, lost=()):
        self.late, self.lost = Counter(late or {}), set(lost)
        self.expected = []

    def read(self, number):
        assert not self.late[number], "it is here"
        assert number not in self.lost
        return np.arange(LENGTH * SAMPLES, dtype=np.uint32) + 1000 * number

    def expect(self, now, then):
        self.expected.append((tuple(now), tuple(then)))

    def here(self, wanted, *, all_of):
        gone = [number for number in wanted if number in self.lost]
        while True:
            here = [n for n in wanted if n not in gone and not self.late[n]]
            self.late -= Counter(wanted)
            missing = len(wanted) - len(gone) - len(here)
            if not missing or (here and not all_of):
                return here, gone


def drawn(source, count, start=b"", batch=2):
    """So many samples, each by its first token; and the place after each batch."""
    reader = SampleReader(Text((source,), (1.0,)), ALICE, LENGTH, start)
    found, cursors, at = [], [], reader.start
    for number in range(at, at + count, batch):
        found += reader.read(number, batch)[:, 0].tolist()
        cursors.append(reader.cursor(number + batch).encode())
    return found, cursors


ALL = SHARDS * SAMPLES
lateness = st.dictionaries(st.integers(0, SHARDS - 1), st.integers(1, 3), max_size=SHARDS)


@given(lateness)
def test_each_sample_comes_once_in_an_epoch_whatever_is_late(late):
    found, _ = drawn(Coming(late), ALL)
    assert sorted(found) == sorted(drawn(Coming(), ALL)[0])
    again, _ = drawn(Coming(late), ALL)
    assert again == found, "the same shards late, the same samples"


@given(lateness)
def test_what_is_here_in_time_changes_nothing(late):
    order = ShardOrder(ALICE, "ab", SHARDS)
    source = Coming(dict.fromkeys(late, 0))
    assert drawn(source, ALL) == drawn(Coming(), ALL)
    groups = [tuple(order.group(0, group)) for group in range(order.groups)]
    seen = list(dict.fromkeys(now for now, _ in source.expected))
    assert seen[: len(groups)] == groups
    assert all(then for _, then in source.expected), "the next group is known"


@given(lateness, st.integers(0, ALL // 2 - 1), st.sets(st.integers(0, SHARDS - 1), max_size=3))
def test_a_killed_peer_goes_on_in_the_middle_of_a_part(late, batches, lost):
    count = ALL - len(lost) * SAMPLES
    found, cursors = drawn(Coming(late, lost), count)
    assert sorted(found) == sorted(
        each for each in drawn(Coming(), ALL)[0] if each // 1000 not in lost
    )
    batches = min(batches, count // 2 - 1)
    rest, _ = drawn(Coming(lost=lost), count - 2 * (batches + 1) or 2, cursors[batches])
    seen = found[: 2 * (batches + 1)]
    if len(seen) < count:
        assert sorted(seen + rest) == sorted(found), "nothing twice, and nothing left out"


def test_the_part_that_is_under_way_is_the_same_after_a_kill():
    late = dict.fromkeys(range(0, SHARDS, 2), 2)
    found, cursors = drawn(Coming(late), ALL)
    for at, cursor in enumerate(cursors[:-1]):
        place = read_cursor(cursor, cursor[2:10], 1).places[0]
        if place.number:
            assert drawn(Coming(), 2, cursor)[0] == found[2 * at + 2 : 2 * at + 4]
    assert any(read_cursor(each, each[2:10], 1).places[0].late for each in cursors)


def test_a_number_that_is_asked_for_again_has_the_samples_of_before():
    source = Coming(dict.fromkeys(range(0, SHARDS, 3), 1))
    reader = SampleReader(Text((source,), (1.0,)), ALICE, LENGTH)
    before = [reader.read(number, 2).tolist() for number in range(0, 60, 2)]
    for number in (58, 4, 30, 0):
        assert reader.read(number, 2).tolist() == before[number // 2]


def test_asking_for_a_place_does_not_change_what_is_read_next():
    source = Coming()
    reader = SampleReader(Text((source,), (1.0,)), ALICE, LENGTH)
    for number in range(0, ALL, 10):
        reader.read(number, 10)
    expected = list(source.expected)
    assert reader.cursor(13).places[0].epoch < reader.cursor(ALL).places[0].epoch
    assert source.expected == expected


def test_if_nobody_has_anything_that_is_said():
    with pytest.raises(NoShards, match="nobody has any shard of the data ab…; wait until"):
        drawn(Coming(lost=range(SHARDS)), 2)
