"""Each block of a thousand samples holds each source's share, in an order of its own."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data.mixture import BadMixture, Mixture, block_counts, shares_of
from farflock.node.data.shard_order import SampleStream

KEY = SampleStream(7, "alice").key("mixture")
mixes = st.lists(st.integers(1, 10**5).map(lambda n: n / 997), min_size=1, max_size=14)


def slow_counts(shares, blocks):
    """Largest remainder, carried over, in whole millionths of a thousandth."""
    carried, found = [0] * len(shares), []
    for _ in range(blocks):
        due = [share * 1000 + rest for share, rest in zip(shares, carried, strict=True)]
        counts = [max(0, each // 10**6) for each in due]
        while sum(counts) < 1000:
            left = [each - count * 10**6 for each, count in zip(due, counts, strict=True)]
            counts[left.index(max(left))] += 1
        while sum(counts) > 1000:
            left = [
                each - count * 10**6 if count else math.inf
                for each, count in zip(due, counts, strict=True)
            ]
            last = max(place for place, each in enumerate(left) if each == min(left))
            counts[last] -= 1
        carried = [each - count * 10**6 for each, count in zip(due, counts, strict=True)]
        found.append(counts)
    return found


@given(mixes)
def test_blocks_hold_what_the_slow_way_gives_and_then_recur(weights):
    shares = shares_of(weights)
    counts = block_counts(shares)
    assert counts.tolist() == slow_counts(shares, 1000)
    assert (counts.sum(axis=1) == 1000).all()
    due = np.cumsum(np.broadcast_to(np.array(shares) / 1000, counts.shape), axis=0)
    assert abs(np.cumsum(counts, axis=0) - due).max() < 2


@given(mixes, st.integers(0, 5000))
def test_of_any_ten_blocks_each_source_has_its_share_within_a_hundredth(weights, first):
    shares = shares_of(weights)
    found = Mixture(weights, KEY).drawn(first * 1000, (first + 10) * 1000)
    for share, count in zip(shares, found, strict=True):
        assert abs(count - share / 100) <= max(2, share / 10_000)


def test_of_any_ten_thousand_samples_in_turn_each_source_has_its_share_within_a_hundredth():
    weights = (0.5, 0.3, 0.15, 0.05)
    mixture = Mixture(weights, KEY)
    drawn = np.array([mixture.source(number) for number in range(30_000)])
    for source, weight in enumerate(weights):
        seen = np.concatenate([[0], np.cumsum(drawn == source)])
        assert abs(seen[10_000:] - seen[:-10_000] - 10_000 * weight).max() <= 100


@given(mixes, st.integers(0, 10**7), st.integers(0, 2500))
def test_how_many_are_drawn_is_what_counting_gives(weights, first, count):
    mixture = Mixture(weights, KEY)
    one_by_one = Counter(mixture.source(number) for number in range(first, first + count))
    assert mixture.drawn(first, first + count) == [one_by_one[n] for n in range(len(weights))]


def test_each_block_and_each_stream_has_an_order_of_its_own():
    def block(number, *stream):
        mixture = Mixture((1, 1), SampleStream(*stream).key("mixture"))
        return [mixture.source(number * 1000 + place) for place in range(1000)]

    blocks = [
        block(0, 1, "alice"),
        block(1, 1, "alice"),
        block(0, 2, "alice"),
        block(0, 1, "bob"),
        block(0, 1, "alice", 1),
    ]
    assert len(set(map(tuple, blocks))) == 5
    assert block(0, 1, "alice") == blocks[0]


def test_one_source_has_all():
    assert Mixture([3.0], KEY).drawn(17, 12_345) == [12_328]


@pytest.mark.parametrize("weights", [[0.0], [1.0, -1.0], [math.inf], [math.nan]])
def test_weights_that_are_not_positive_are_refused(weights):
    with pytest.raises(BadMixture, match="use a positive number"):
        Mixture(weights, KEY)


def test_a_share_below_a_millionth_is_refused():
    with pytest.raises(BadMixture, match="less than a millionth"):
        Mixture([1, 1e-7], KEY)
    assert shares_of([1, 1e-6]) == (999_999, 1)


@given(mixes)
def test_shares_are_the_weights_to_the_millionth(weights):
    whole = sum(map(Fraction, weights))
    assert sum(shares_of(weights)) == 10**6
    for share, weight in zip(shares_of(weights), weights, strict=True):
        assert abs(share - Fraction(weight) / whole * 10**6) < 1
