"""Scales and codes: the limits that keep decoding finite and free of denormals, and the arithmetic,
compared with numpy."""

import numpy as np
import pytest
import torch

from farflock.compression.blocks import MAX_SCALE_BITS, MIN_SCALE_BITS, quantise, require_scales
from farflock.compression.codec import CorruptPayload


def float_of(bits):
    return np.array(bits, dtype=np.uint32).view(np.float32)[()]


@pytest.mark.parametrize("top", MAX_SCALE_BITS)
def test_the_largest_scale_is_the_largest_whose_product_is_finite(top):
    with np.errstate(over="ignore"):
        assert np.isfinite(float_of(MAX_SCALE_BITS[top]) * np.float32(top))
        assert not np.isfinite(float_of(MAX_SCALE_BITS[top] + 1) * np.float32(top))


def test_the_smallest_scale_is_the_smallest_normal_number():
    assert float_of(MIN_SCALE_BITS) == np.finfo(np.float32).tiny


@pytest.mark.parametrize("top", MAX_SCALE_BITS)
def test_scales_outside_the_limits_are_refused(top):
    good = [0, MIN_SCALE_BITS, 0x3F800000, MAX_SCALE_BITS[top]]
    assert len(require_scales(torch.tensor(good, dtype=torch.int32).view(torch.float32), top)) == 4
    minus_zero, minus_one, nan, infinity = -(2**31), -0x40800000, 0x7FC00000, 0x7F800000
    for bad in (
        1,
        MIN_SCALE_BITS - 1,
        MAX_SCALE_BITS[top] + 1,
        infinity,
        nan,
        minus_zero,
        minus_one,
    ):
        with pytest.raises(CorruptPayload, match="1 of 5 scales"):
            require_scales(torch.tensor([*good, bad], dtype=torch.int32).view(torch.float32), top)


@pytest.mark.parametrize("top", MAX_SCALE_BITS)
@pytest.mark.parametrize("kind", ["usual", "ties", "half", "any"])
def test_scales_and_codes_are_what_numpy_makes_of_the_same_formula(values, top, kind):
    x_KB = values(kind, 64 * 40, seed=5).numpy().reshape(40, 64)
    absmax_K = np.abs(x_KB).max(axis=1)
    scale_K = np.minimum(absmax_K / np.float32(top), float_of(MAX_SCALE_BITS[top]))
    scales, codes = quantise(torch.from_numpy(x_KB.reshape(-1)), 64, top)
    assert scales.numpy().tobytes() == scale_K.tobytes()
    expected = np.rint(x_KB / np.where(scale_K > 0, scale_K, np.float32(1))[:, None])
    assert np.array_equal(codes.numpy().reshape(40, 64), expected)


@pytest.mark.parametrize("top", MAX_SCALE_BITS)
def test_codes_never_leave_their_range_and_the_largest_value_gets_the_largest_code(values, top):
    for kind in ("usual", "any", "huge", "largest", "tiny"):
        for seed in range(20):
            scales, codes = quantise(values(kind, 512, seed), 8, top)
            peak = codes.view(-1, 8).abs().amax(dim=1)
            assert float(codes.abs().max()) <= top
            assert bool((peak[scales > 0] == top).all())


def test_a_block_too_small_for_a_normal_scale_becomes_zeros():
    smallest = 127 * 2.0**-126
    scales, codes = quantise(torch.tensor([smallest, -smallest, smallest / 2, -1e-40]), 2, 127)
    assert scales.tolist() == [2.0**-126, 0.0]
    assert codes.tolist() == [127, -127, 0, 0]


def test_a_short_last_block_is_filled_up_without_changing_its_scale():
    scales, codes = quantise(torch.tensor([1.1, -2.0, 0.5]), 2, 7)
    assert scales.tolist() == torch.tensor([2.0 / 7, 0.5 / 7]).tolist()
    assert codes.tolist() == [4, -7, 7, 0]
