"""Tests specific to top-k in 2 bits: which values are kept, the best two levels, the size, and
hostile positions."""

import itertools
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.codecs import decoded, encoded, round_trip

from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.sparse2 import TopK2
from farflock.compression.topk import TopK

pytestmark = pytest.mark.usefixtures("version")


def largest(numbers, k, chunk):
    """A slow twin: positions of the largest magnitudes of each chunk, the first among equals."""
    kept = []
    for start in range(0, len(numbers), chunk):
        stop = min(start + chunk, len(numbers))
        count = max(1, math.floor((stop - start) * k / chunk + 0.5))
        kept += sorted(sorted(range(start, stop), key=lambda i: (-abs(numbers[i]), i))[:count])
    return kept


def best_error(sizes):
    """The least squared error that two levels can have, by trying every cut of the sorted
    magnitudes."""
    sizes = sorted(sizes)
    groups = [(sizes[:cut], sizes[cut:]) for cut in range(1, len(sizes) + 1)]
    return min(sum(np.var(part) * len(part) for part in pair if part) for pair in groups)


@given(
    st.lists(st.integers(-4, 4).filter(bool), max_size=70),
    st.sampled_from([(1, 2), (3, 10), (5, 16), (8, 17), (2, 64), (16, 33)]),
)
def test_exactly_the_largest_are_kept_and_of_equals_the_first(numbers, shape):
    back = round_trip(TopK2(*shape), torch.tensor(numbers, dtype=torch.float32))
    assert back.nonzero().flatten().tolist() == largest(numbers, *shape)


@pytest.mark.parametrize("kind", ["usual", "ties", "rare"])
def test_whole_chunks_keep_what_plain_top_k_keeps(values, kind):
    x = values(kind, 3 * 4096)
    assert torch.equal(round_trip(TopK2(), x) != 0, round_trip(TopK(), x) != 0)


@pytest.mark.parametrize(
    ("size", "kept"), [(1, 1), (31, 1), (95, 1), (96, 2), (2048, 32), (4095, 64)]
)
def test_a_short_chunk_keeps_its_share_and_at_least_one(values, size, kept):
    assert int((round_trip(TopK2(), values("usual", 4096 + size))[4096:] != 0).sum()) == kept


def test_two_values_of_different_size_travel_as_they_are():
    x = torch.zeros(4096)
    x[[5, 900]] = torch.tensor([-3.0, 0.5])
    assert torch.equal(round_trip(TopK2(2, 4096), x), x)


@pytest.mark.parametrize("kind", ["usual", "ties", "huge", "rare"])
@pytest.mark.parametrize("shape", [(2, 4), (7, 64), (64, 4096)])
def test_no_other_two_levels_have_less_squared_error(values, kind, shape):
    k, chunk = shape
    x = values(kind, 5 * chunk).view(5, chunk)
    back = round_trip(TopK2(*shape), x.reshape(-1)).view(5, chunk)
    for row, arrived in zip(x.double(), back.double(), strict=True):
        kept = largest(row.tolist(), k, chunk)
        error = float((row[kept] - arrived[kept]).square().sum())
        rounding = k * (float(row.abs().max()) * 2.0**-8) ** 2  # of the levels to bf16
        assert error <= best_error(row[kept].abs().tolist()) * (1 + 1e-5) + rounding


def test_signs_survive_and_a_chunk_has_two_magnitudes_at_most(values):
    x = values("usual", 4 * 4096)
    back = round_trip(TopK2(), x)
    kept = back != 0
    assert torch.equal(back[kept].sign(), x[kept].sign())
    assert all(len(row[row != 0].abs().unique()) <= 2 for row in back.view(4, 4096))


def test_scaling_by_a_power_of_two_scales_what_arrives(values):
    x = values("usual", 3 * 4096 + 77)
    assert torch.equal(round_trip(TopK2(), x * 2.0**-40), round_trip(TopK2(), x) * 2.0**-40)


def test_sending_the_residual_again_and_again_reaches_every_value(values):
    x, sent = values("usual", 4096), torch.zeros(4096)
    for _ in range(400):
        sent += round_trip(TopK2(), x - sent)
    assert float((x - sent).abs().max()) < 0.02 * float(x.abs().max())


def test_sixty_four_of_4096_take_at_most_158_thousandths_of_a_bit_a_value(values):
    x = values("usual", 262_144)
    bits = 8 * len(encoded(TopK2(), x)) / len(x)
    limit = (math.log2(math.comb(4096, 64)) + 2 * 64) / 4096
    assert limit < bits <= 0.158


def test_no_positions_take_more_than_max_bytes():
    c = TopK2(16, 64)
    x = torch.zeros(64 * 40)
    for places in (range(16), range(48, 64), range(0, 64, 4), [*range(15), 63]):
        at = torch.tensor(
            [64 * chunk + place for chunk, place in itertools.product(range(40), places)]
        )
        assert len(encoded(c, x.index_fill(0, at, 1.0))) <= c.max_bytes(len(x))


def test_not_finite_values_are_counted_before_any_are_dropped(values):
    x = values("usual", 100)
    x[3], x[50] = float("nan"), float("inf")
    with pytest.raises(UnencodableTensor, match="2 of 100"):
        encoded(TopK2(1, 50), x)


def payload_of(gaps, levels=(0x3F80, 0x4000), codes=0):
    """A payload of one chunk, with this list of gaps in unary."""
    unary = sum(1 << (sum(gaps[: i + 1]) + i) for i in range(len(gaps)))
    size = -(-(sum(gaps) + len(gaps)) // 8)
    body = struct.pack("<2H", *levels) + codes.to_bytes(-(-2 * len(gaps) // 8), "little")
    return body + b"\x00" + unary.to_bytes(size, "little")


def test_positions_outside_their_chunk_or_the_tensor_are_refused():
    c = TopK2(3, 10)
    assert decoded(c, payload_of([0, 3, 4]), 10).nonzero().flatten().tolist() == [0, 4, 9]
    with pytest.raises(CorruptPayload, match="stay in their chunk"):
        decoded(c, payload_of([0, 3, 5]), 10)
    assert decoded(c, payload_of([5, 0]), 7).nonzero().flatten().tolist() == [5, 6]
    with pytest.raises(CorruptPayload, match="stay in their chunk"):
        decoded(c, payload_of([5, 1]), 7)


@pytest.mark.parametrize("level", [0x7F80, 0x7FC0, 0x8000, 0xFFFF])
def test_a_level_that_is_negative_or_not_finite_is_refused(level):
    for levels in ((level, 0), (0, level)):
        with pytest.raises(CorruptPayload, match="level"):
            decoded(TopK2(3, 10), payload_of([0, 0, 0], levels), 10)


def test_codes_choose_sign_and_level_plane_by_plane():
    # signs of the first two, upper level of the last two
    payload = payload_of([0, 0, 0], codes=0b110_011)
    assert decoded(TopK2(3, 10), payload, 10)[:3].tolist() == [-1.0, -2.0, 2.0]


def test_a_byte_too_many_and_a_set_filling_bit_are_refused():
    good = payload_of([0, 3, 4])
    for hostile in (good + b"\x00", good + b"\x01", good[:4] + b"\x40" + good[5:]):
        with pytest.raises(CorruptPayload):
            decoded(TopK2(3, 10), hostile, 10)
