"""Shared randomness: the published vectors, the same bits everywhere, and draws with the promised
distributions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.optimizers.parts.philox import below, permutation, philox, words

# Random123's kat_vectors, lines "philox4x32 10": counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]
UINT32, UINT64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


def hexes(text):
    return [int(word, 16) for word in text.split()]


def slow_philox(counter, key):
    """The paper's text in Python's own integers: S-boxes 0xD2511F53 and 0xCD9E8D57, Weyl keys,
    ten rounds."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_it_gives_the_published_vectors(counter, key, expected):
    given_counter = tuple(np.array([word], np.uint64) for word in hexes(counter))
    assert [int(word[0]) for word in philox(given_counter, tuple(hexes(key)))] == hexes(expected)
    assert slow_philox(hexes(counter), hexes(key)) == hexes(expected)


@given(UINT64, UINT32, UINT64, st.integers(0, 40))
@settings(max_examples=50, deadline=None)
def test_words_are_the_generator_at_the_documented_counters(seed, stream, round_number, count):
    expected = []
    for place in range(-(-count // 4)):
        counter = (place, stream, round_number % 2**32, round_number // 2**32)
        expected += slow_philox(counter, (seed % 2**32, seed // 2**32))
    drawn = words(seed, stream, round_number, count)
    assert drawn.dtype == torch.int64
    assert drawn.tolist() == expected[:count]


def test_a_longer_draw_begins_with_a_shorter_one_across_batches():
    long = words(7, 1, 2, 200_001)
    assert torch.equal(words(7, 1, 2, 100_003), long[:100_003])
    assert long.unique().numel() > 199_980  # 200,001 of 2^32: about five repeat


def test_seed_stream_and_round_each_change_all_draws():
    base = words(1, 1, 1, 64)
    for other in (
        words(2, 1, 1, 64),
        words(1, 2, 1, 64),
        words(1, 1, 2, 64),
        words(1, 1, 1 + 2**32, 64),
    ):
        assert not bool((base == other).any())


def test_words_are_uniform():
    drawn = words(3, 0, 0, 1 << 16).double() / 2**32
    assert abs(float(drawn.mean()) - 0.5) < 4 / (12**0.5 * 256)
    counts = torch.histc(drawn, 64, 0, 1)
    chi_squared = float(((counts - 1024) ** 2 / 1024).sum())
    assert 25 < chi_squared < 115  # 63 degrees of freedom: 1e-5 tails


@given(st.integers(1, 2**31), UINT64)
@settings(max_examples=50, deadline=None)
def test_bounded_draws_stay_below_their_bound(bound, seed):
    drawn = below(bound, seed, 0, 0, 100)
    assert 0 <= int(drawn.min()) <= int(drawn.max()) < bound


def test_bounded_draws_reach_every_value():
    assert below(10, 5, 0, 0, 1000).unique().tolist() == list(range(10))


@given(UINT64, UINT32, UINT64, st.integers(0, 300))
@settings(max_examples=30, deadline=None)
def test_a_permutation_holds_each_place_once(seed, stream, round_number, count):
    assert sorted(permutation(seed, stream, round_number, count).tolist()) == list(range(count))


def test_permutations_differ_between_rounds_and_spread_every_place():
    drawn = torch.stack([permutation(1, 0, number, 8) for number in range(2000)])
    counts = torch.stack([(drawn == place).sum(0) for place in range(8)]).double()
    assert bool(((counts - 250).abs() < 5 * 250**0.5).all())


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: words(-1, 0, 0, 1), "seed -1"),
        (lambda: words(0, 2**32, 0, 1), "stream 4294967296"),
        (lambda: words(0, 0, -1, 1), "round -1"),
        (lambda: words(0, 0, 0, 2**34), "count"),
        (lambda: below(0, 0, 0, 0, 1), "bound of 0"),
    ],
)
def test_what_does_not_fit_is_refused(call, named):
    with pytest.raises(ValueError, match=named):
        call()
