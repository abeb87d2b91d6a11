"""Tests specific to fp16 and bf16: rounding, the ends of their ranges, and what is refused."""

import struct

import pytest
import torch
from worlds.codecs import round_trip

from farflock.compression.codec import Context, CorruptPayload
from farflock.compression.floats import Half

pytestmark = pytest.mark.usefixtures("version")


def returned(name, *numbers):
    """Return these numbers after a round trip."""
    return round_trip(Half(name), torch.tensor(numbers, dtype=torch.float32)).tolist()


def test_rounding_is_to_nearest_and_ties_go_to_even():
    assert returned("fp16", 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20) == [
        1.0,
        1 + 2**-9,
        1 + 2**-10,
    ]
    assert returned("bf16", 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20) == [
        1.0,
        1 + 2**-6,
        1 + 2**-7,
    ]


def test_fp16_keeps_values_beyond_its_range_at_its_largest():
    assert returned("fp16", 65504, 65519, 65520, 1e30, -1e30, 3.4028235e38) == [
        65504,
        65504,
        65504,
        65504,
        -65504,
        65504,
    ]


def test_bf16_keeps_values_that_would_round_to_infinity_at_its_largest():
    largest = (2 - 2**-7) * 2.0**127
    assert returned("bf16", 3.4028235e38, -3.4028235e38, largest) == [largest, -largest, largest]


def test_fp16_has_denormals_down_to_its_smallest():
    assert returned("fp16", 2**-24, 2**-25, 3 * 2**-25, 2**-26) == [2**-24, 0.0, 2**-23, 0.0]


@pytest.mark.parametrize(("name", "infinity"), [("fp16", 0x7C00), ("bf16", 0x7F80)])
def test_patterns_of_16_bits_are_decoded_exactly_or_refused(name, infinity):
    for pattern in (
        high << 8 | low for high in range(256) for low in (0x00, 0x01, 0x7F, 0x80, 0xFF)
    ):
        payload, out = struct.pack("<H", pattern), torch.empty(1)
        if pattern & infinity == infinity:
            with pytest.raises(CorruptPayload, match="NaN or infinity"):
                Half(name).decode(payload, Context(), out)
            continue
        Half(name).decode(payload, Context(), out)
        expected = (
            struct.unpack("<e", payload)
            if name == "fp16"
            else struct.unpack("<f", b"\x00\x00" + payload)
        )
        assert out.tolist() == list(expected)


def test_one_bad_value_among_many_is_found(values):
    x = values("usual", 10_000)
    for name, bad in (("fp16", b"\x01\xfc"), ("bf16", b"\x80\xff")):
        payload = bytearray()
        Half(name).encode(x, Context(), payload)
        payload[2 * 7777 : 2 * 7778] = bad
        with pytest.raises(CorruptPayload):
            Half(name).decode(payload, Context(), torch.empty(10_000))
