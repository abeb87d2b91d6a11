"""Tests specific to FP4: levels are powers of two, the nearest by absolute difference is taken, and
0 has one code."""

import struct

import pytest
import torch
from worlds.codecs import decoded, encoded, round_trip

from farflock.compression.codec import CorruptPayload
from farflock.compression.fp4 import Fp4

pytestmark = pytest.mark.usefixtures("version")

LEVELS = [0.0, *(2.0**e for e in range(-6, 1))]


def nearest(numbers, block):
    """A slow twin: for each number the nearest signed level of its block, or the larger of two
    equally near ones."""
    out = []
    for start in range(0, len(numbers), block):
        part = numbers[start : start + block]
        scale = max(abs(number) for number in part)
        for number in part:
            best = min(LEVELS, key=lambda level: (abs(abs(number) - level * scale), -level))
            out.append(best * scale if number > 0 else -best * scale)
    return out


@pytest.mark.parametrize("block", [2, 6, 64, 256])
def test_every_value_becomes_the_nearest_level_of_its_block(values, block):
    x = values("usual", 1000)
    assert round_trip(Fp4(block), x).tolist() == nearest(x.tolist(), block)


def test_a_value_half_way_between_two_levels_goes_to_the_larger():
    ties = [1.0, 0.75, 0.375, 3 / 128, 1 / 128, 1 / 128 - 2.0**-30, -1 / 128, -0.75]
    back = round_trip(Fp4(), torch.tensor(ties))
    assert back.tolist() == [1.0, 1.0, 0.5, 1 / 32, 1 / 64, 0.0, -1 / 64, -1.0]


def test_the_levels_themselves_travel_exactly_at_any_size():
    levels = torch.tensor([sign * level for level in LEVELS for sign in (1, -1)])
    for scale in (1.0, 3.14159, 1e-30, 2.0**-120, 3.4028235e38):
        x = levels * torch.tensor(scale)
        assert torch.equal(round_trip(Fp4(16), x), x)


def test_the_largest_magnitude_of_a_block_survives_unchanged(values):
    x = values("usual", 256 * 40).view(40, 256)
    back = round_trip(Fp4(), x.reshape(-1)).view(40, 256)
    at = x.abs().argmax(dim=1, keepdim=True)
    assert torch.equal(back.gather(1, at), x.gather(1, at))


def test_a_code_is_a_sign_and_an_exponent_and_the_first_is_in_the_low_half():
    payload = encoded(Fp4(), torch.tensor([64.0, -1.0, 0.0, -32.0]))
    assert payload == struct.pack("<f", 1.0) + bytes([0x97, 0xE0])


def test_scaling_by_a_power_of_two_scales_what_arrives(values):
    x = values("usual", 700)
    assert torch.equal(round_trip(Fp4(), x * 2.0**-40), round_trip(Fp4(), x) * 2.0**-40)


def test_every_byte_of_codes_is_decoded_as_written_or_refused():
    scale = struct.pack("<f", 0.5)
    for byte in range(256):
        halves = [byte & 15, byte >> 4]
        if 8 in halves:
            with pytest.raises(CorruptPayload, match="negative 0"):
                decoded(Fp4(), scale + bytes([byte]), 2)
            continue
        expected = [(-1) ** (h >> 3) * (2.0 ** ((h & 7) - 1) if h & 7 else 0.0) / 2 for h in halves]
        assert decoded(Fp4(), scale + bytes([byte]), 2).tolist() == expected


def test_an_odd_count_ends_with_code_zero_and_no_other_filler_is_taken():
    payload = encoded(Fp4(), torch.tensor([64.0, -64.0, 1.0]))
    assert payload[-1] == 0x01
    for filler in range(1, 16):
        with pytest.raises(CorruptPayload):
            decoded(Fp4(), payload[:-1] + bytes([filler << 4 | 1]), 3)


def test_a_scale_whose_64_fold_is_infinite_is_refused():
    for bits, good in (
        (0x7C7FFFFF, True),
        (0x7C800000, False),
        (0x007FFFFF, False),
        (0x80000000, False),
    ):
        payload = struct.pack("<I", bits) + b"\x07"
        if good:
            assert float(decoded(Fp4(), payload, 1)) == float(torch.finfo(torch.float32).max)
            continue
        with pytest.raises(CorruptPayload, match="scales"):
            decoded(Fp4(), payload, 1)


def test_normal_values_arrive_a_few_percent_short_and_no_more():
    x = torch.randn(256 * 400, generator=torch.Generator().manual_seed(1))
    back = round_trip(Fp4(), x)
    assert 0.95 < float((back * x).sum() / (x * x).sum()) < 1
    assert float((back - x).square().sum() / x.square().sum()) < 0.045
