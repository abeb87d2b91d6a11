"""Random outputs are those of the published generator, and an order is a permutation of them."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.model.random_order import philox_key, random_order, raw_outputs

words = st.integers(0, 2**64 - 1)


def philox(counter, key):
    """Philox4x64-10 as in its paper, in Python's integers."""
    for turn in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * counter[0], 2**64)
        high1, low1 = divmod(0xCA5A826395121157 * counter[2], 2**64)
        bumped = [
            (key[0] + turn * 0x9E3779B97F4A7C15) % 2**64,
            (key[1] + turn * 0xBB67AE8584CAA73B) % 2**64,
        ]
        counter = [high1 ^ counter[1] ^ bumped[0], low1, high0 ^ counter[3] ^ bumped[1], low0]
    return counter


@given(st.text(max_size=30), words, words, st.integers(0, 13))
def test_outputs_are_those_of_the_published_generator(purpose, first, second, count):
    digest = hashlib.sha256(purpose.encode()).digest()
    key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]
    blocks = [philox([block, 0, first, second], key) for block in range(1, 5)]
    expected = [output for block in blocks for output in block][:count]
    assert raw_outputs(philox_key(purpose), (first, second), count).tolist() == expected


@given(st.text(max_size=30), words, words, st.integers(0, 300))
def test_an_order_has_each_number_once_and_sorts_the_outputs(purpose, first, second, count):
    key, place = philox_key(purpose), (first, second)
    order = random_order(key, place, count)
    assert sorted(order.tolist()) == list(range(count))
    assert (np.diff(raw_outputs(key, place, count)[order].astype(object)) >= 0).all()


@pytest.mark.parametrize("place", [(-1, 0), (0, 2**64)])
def test_a_place_out_of_range_is_not_wrapped(place):
    with pytest.raises(OverflowError):
        raw_outputs(philox_key("x"), place, 1)
