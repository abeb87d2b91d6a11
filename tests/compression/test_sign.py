"""Tests specific to sign: one bit per value, the block's mean magnitude, and a sum that no machine
rounds differently."""

import math
import struct

import pytest
import torch
from worlds.codecs import decoded, encoded

from farflock.compression.blocks import mean_magnitudes
from farflock.compression.codec import CorruptPayload
from farflock.compression.sign import Sign

pytestmark = pytest.mark.usefixtures("version")


def test_bits_mark_the_values_below_zero_lowest_bit_first():
    payload = encoded(Sign(), torch.tensor([1.0, -2.0, 0.0, -0.0, -3.0]))
    assert payload[4:] == bytes([0b10010])
    (scale,) = struct.unpack("<f", payload[:4])
    assert scale == pytest.approx(6 / 5, rel=1e-6)
    assert decoded(Sign(), payload, 5).tolist() == [scale, -scale, scale, scale, -scale]


@pytest.mark.parametrize("kind", ["usual", "any", "huge", "ties", "rare", "largest"])
@pytest.mark.parametrize("block", [1, 7, 256, 4096])
def test_the_scale_is_the_mean_magnitude_also_of_a_short_last_block(values, kind, block):
    x = values(kind, 3 * block + block // 2)
    scales = mean_magnitudes(x, block).tolist()
    parts = [x[start : start + block].abs().tolist() for start in range(0, len(x), block)]
    assert len(scales) == len(parts)
    for scale, part in zip(scales, parts, strict=True):
        assert abs(scale - math.fsum(part) / len(part)) <= max(part) * 2.0**-23 + 2.0**-126


def test_the_mean_does_not_depend_on_the_order_of_values(values):
    x = values("usual", 4096)
    shuffled = x[torch.randperm(4096, generator=torch.Generator().manual_seed(5))]
    assert torch.equal(mean_magnitudes(x, 4096), mean_magnitudes(shuffled, 4096))


def test_no_other_scale_has_a_smaller_squared_error(values):
    x = values("usual", 256)
    back = decoded(Sign(), encoded(Sign(), x), 256)
    error = float((back - x).square().sum())
    for factor in (0.98, 1.02):
        assert float((back * factor - x).square().sum()) > error


def test_a_bit_after_the_last_value_is_refused():
    payload = encoded(Sign(), torch.tensor([1.0, -1.0, 1.0]))
    for bit in range(3, 8):
        with pytest.raises(CorruptPayload, match="after the last of 3"):
            decoded(Sign(), payload[:-1] + bytes([payload[-1] | 1 << bit]), 3)


@pytest.mark.parametrize("bits", [0x007FFFFF, 0x80000000, 0xBF800000, 0x7F800000, 0x7FC00000])
def test_a_scale_that_is_denormal_negative_or_not_finite_is_refused(bits):
    with pytest.raises(CorruptPayload, match="scales"):
        decoded(Sign(), struct.pack("<I", bits) + b"\x01", 1)


def test_a_block_of_denormal_size_is_sent_as_nothing(values):
    x = values("denormal", 100)
    assert torch.equal(decoded(Sign(), encoded(Sign(), x), 100), torch.zeros(100))


def test_the_usual_size_is_a_bit_and_an_eighth(values):
    assert len(encoded(Sign(), values("usual", 262_144))) * 8 / 262_144 == 1.125
