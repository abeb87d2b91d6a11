"""Tests specific to int4: two codes per byte, the filler of an odd count, and the code it never
writes."""

import struct

import pytest
import torch
from worlds.codecs import decoded, encoded

from farflock.compression.codec import CorruptPayload
from farflock.compression.int4 import Int4

pytestmark = pytest.mark.usefixtures("version")


def test_the_first_of_two_values_is_in_the_low_half():
    payload = encoded(Int4(), torch.tensor([7.0, -7.0, 0.0, 3.0]))
    assert payload == struct.pack("<f", 1.0) + bytes([0x1F, 0xB8])
    assert decoded(Int4(), payload, 4).tolist() == [7.0, -7.0, 0.0, 3.0]


def test_an_odd_count_ends_with_code_zero_and_no_other_filler_is_taken():
    payload = encoded(Int4(), torch.tensor([7.0, -7.0, 1.0]))
    assert payload[-1] == 0x89
    for filler in {*range(16)} - {8}:
        payload[-1] = filler << 4 | 9
        with pytest.raises(CorruptPayload):
            decoded(Int4(), payload, 3)


def test_every_byte_of_codes_is_decoded_as_written_or_refused():
    scale = struct.pack("<f", 0.5)
    for byte in range(256):
        low, high = byte & 15, byte >> 4
        if low and high:
            assert decoded(Int4(), scale + bytes([byte]), 2).tolist() == [
                (low - 8) / 2,
                (high - 8) / 2,
            ]
            continue
        with pytest.raises(CorruptPayload, match="stored code 0"):
            decoded(Int4(), scale + bytes([byte]), 2)


def test_absmax_over_14_alone_would_be_a_false_promise_and_the_stated_bound_is_not(values):
    x = ((values("usual", 64 * 999).view(torch.int32) % 14 - 7).float() + 0.5).view(-1, 64)
    x[:, 0] = 7
    x = (x * values("usual", 999, seed=1).abs()[:, None]).reshape(-1)
    error = (
        (decoded(Int4(), encoded(Int4(), x), len(x)).double() - x.double())
        .abs()
        .view(-1, 64)
        .amax(dim=1)
    )
    ratio = float((error / (x.view(-1, 64).abs().amax(dim=1).double() / 14)).max())
    assert 1 < ratio <= 1 + 2.0**-18


def test_the_mean_of_blocks_survives(values):
    x = values("usual", 64 * 1000)
    drift = (
        (decoded(Int4(), encoded(Int4(), x), len(x)).double() - x.double())
        .view(1000, 64)
        .mean(dim=1)
    )
    step = x.view(1000, 64).abs().amax(dim=1).double() / 7
    assert abs(float((drift / step).mean())) < 5 / (12 * 64 * 1000) ** 0.5
