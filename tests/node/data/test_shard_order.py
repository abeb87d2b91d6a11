"""A source is read in groups of 1, 2, 4, 8, 8, 8 … shards, and each sample comes once an epoch."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data import random_order
from farflock.node.data.shard_order import SampleStream, ShardOrder, group_of, group_range

SOURCE = "ab" * 32
counts = st.integers(1, 60)
epochs = st.integers(0, 2**40)


def order(shards, run_seed=1, peer="alice", lane=0, name=SOURCE):
    return ShardOrder(SampleStream(run_seed, peer, lane), name, shards)


@given(counts, epochs)
def test_the_groups_of_an_epoch_have_each_shard_once_and_double_up_to_eight(shards, epoch):
    one = order(shards)
    groups = [one.group(epoch, group) for group in range(one.groups)]
    assert sorted(chain(*groups)) == list(range(shards))
    sizes = [len(group) for group in groups]
    assert sizes[:-1] == ([1, 2, 4] + [8] * len(sizes))[: len(sizes) - 1]
    assert 1 <= sizes[-1] <= ([1, 2, 4] + [8] * len(sizes))[len(sizes) - 1]


@given(st.integers(0, 10**6))
def test_a_shards_group_is_the_one_whose_range_it_is_in(place):
    first, stop = group_range(group_of(place))
    assert first <= place < stop


@given(counts)
def test_the_next_group_is_known_without_any_shard(shards):
    one, at = order(shards), (0, 0)
    seen = [at] + [at := one.after(*at) for _ in range(2 * one.groups)]
    whole = [(epoch, group) for epoch in range(3) for group in range(one.groups)]
    assert seen == whole[: len(seen)]


@given(st.integers(1, 5), st.integers(0, 300), epochs)
def test_the_samples_of_a_group_come_once_each(group, count, epoch):
    assert sorted(order(9).samples(epoch, group, count)) == list(range(count))


def test_each_epoch_group_stream_and_source_has_an_order_of_its_own():
    def orders(epoch, group, *stream, name=SOURCE):
        one = ShardOrder(SampleStream(*stream), name, 500)
        return tuple(one.group(epoch, 9)), tuple(one.samples(epoch, group, 100).tolist())

    base = orders(0, 0, 1, "alice")
    others = [
        orders(1, 0, 1, "alice"),
        orders(0, 0, 2, "alice"),
        orders(0, 0, 1, "bob"),
        orders(0, 0, 1, "alice", 1),
        orders(0, 0, 1, "alice", name="cd" * 32),
    ]
    assert base == orders(0, 0, 1, "alice", 0)
    assert all(shards != base[0] and samples != base[1] for shards, samples in others)
    assert orders(0, 1, 1, "alice")[1] != base[1]


def test_no_two_streams_share_a_key_because_their_names_run_together():
    assert (SampleStream(1, "2 x", 3).key("a") != SampleStream(1, "x", 3).key("a")).any()
    assert (SampleStream(1, "x", 12).key("a") != SampleStream(11, "x", 2).key("a")).any()


def test_the_orders_are_those_first_written_down():
    """Another order would be another run."""
    one = order(12, run_seed=7, peer="12D3Koo")
    groups = [one.group(3, group) for group in range(one.groups)]
    assert groups == [[4], [5, 2], [1, 9, 8, 0], [10, 6, 7, 11, 3]]
    assert one.samples(3, 2, 8).tolist() == [5, 6, 7, 0, 2, 4, 1, 3]


def test_equal_numbers_keep_their_order(monkeypatch):
    """Which are so rare that no seed is known that draws them."""
    drawn = np.random.default_rng(3).integers(0, 50, 500, dtype=np.uint64)
    monkeypatch.setattr(random_order, "raw_outputs", lambda key, place, count: drawn)
    found = order(9).samples(0, 0, len(drawn))
    assert np.array_equal(found, np.lexsort((np.arange(len(drawn)), drawn)))


def first_samples(stream, shards, in_shard, count):
    """The first `count` samples of a stream, from shards of `in_shard` samples each."""
    one, at, found = ShardOrder(stream, SOURCE, shards), (0, 0), []
    while sum(map(len, found)) < count:
        group = np.array(one.group(*at))
        places = one.samples(*at, len(group) * in_shard)
        found.append(group[places // in_shard] * in_shard + places % in_shard)
        at = one.after(*at)
    return np.concatenate(found)[:count]


def drawn_plainly(rng, shards, in_shard, count):
    """As many samples, of whole shards drawn at random and of a part of eight others."""
    sizes, found = [1, 2, 4] + [8] * shards, []
    order = rng.permutation(shards)
    while sum(map(len, found)) < count:
        size = sizes[len(found)]
        group, order = order[:size], order[size:]
        samples = (group[:, None] * in_shard + np.arange(in_shard)).ravel()
        found.append(rng.permutation(samples))
    return np.concatenate(found)[:count]


def overlaps(seen, total):
    """How many samples each two peers have in common: (pairs,)."""
    has = np.zeros((len(seen), total), dtype=np.float32)
    for peer, samples in enumerate(seen):
        has[peer, samples] = 1
    return (has @ has.T)[np.triu_indices(len(seen), 1)]


def require_overlap(peers, count, shards, in_shard):
    """Peers share as many samples as independent draws do, and as evenly as drawn shards do.

    All pairs are drawn from each other's peers, so the error of their mean is taken from plain
    simulations of as many peers."""
    total = shards * in_shard
    seen = [
        first_samples(SampleStream(1, f"peer {n}"), shards, in_shard, count) for n in range(peers)
    ]
    assert all(len(set(samples.tolist())) == count for samples in seen)
    found = overlaps(seen, total)
    rng, plain = np.random.default_rng(5), []
    for _ in range(8):
        draws = [drawn_plainly(rng, shards, in_shard, count) for _ in range(peers)]
        plain.append(overlaps(draws, total))
    error = max(np.std([each.mean() for each in plain], ddof=1), found.std() / peers)
    assert abs(found.mean() - count**2 / total) <= 3 * error
    spread = np.mean([each.std() for each in plain])
    assert abs(found.std() / spread - 1) < 0.1


def test_peers_share_as_many_samples_as_by_chance():
    require_overlap(peers=120, count=1000, shards=200, in_shard=50)


@pytest.mark.long
def test_a_thousand_peers_share_as_many_of_ten_thousand_samples_as_by_chance():
    require_overlap(peers=1000, count=10_000, shards=2000, in_shard=50)
