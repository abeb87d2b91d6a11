"""Tests specific to ecsq: codes and steps as a slow twin finds them, bits near their entropy, and
hostile lists refused."""

import math
import struct
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.codecs import decoded, encoded, round_trip

from farflock.compression import rice
from farflock.compression.codec import CorruptPayload
from farflock.compression.ecsq import Ecsq

pytestmark = pytest.mark.usefixtures("version")

COUNT = 4096
ONE = struct.pack("<H", 0x3F80)  # a step of 1


def step_of(payload):
    return struct.unpack("<f", b"\0\0" + payload[:2])[0]


def codes_of(x, step):
    """A slow twin, in fp32 as the page says."""
    step, up = np.float32(step), np.float32(5 / 16)
    return [math.floor(np.float32(abs(number)) / step + up) for number in x.numpy()]


def sure_bits(codes):
    """The maximum bytes of signs and lists, in any order."""

    def most(count, total):
        return min(count * (width + 1) + (total >> width) for width in range(17)) if count else 0

    many, few = sum(code > 0 for code in codes), sum(code > 1 for code in codes)
    excess = sum(code - 2 for code in codes if code > 1)
    return many + most(many, len(codes) - many) + most(few, many - few) + most(few, excess)


@pytest.mark.parametrize("rate", [10, 100, 250])
@pytest.mark.parametrize("count", [1, 50, COUNT, 2 * COUNT + 100])
def test_codes_are_those_of_a_slow_twin(values, rate, count):
    x = values("usual", count, seed=1)
    payload = encoded(Ecsq(rate), x)
    step, back = step_of(payload), decoded(Ecsq(rate), payload, count).tolist()
    for number, code, there in zip(x.tolist(), codes_of(x, step), back, strict=True):
        assert there == math.copysign(code * step, number)


@pytest.mark.parametrize("kind", ["usual", "half", "rare", "ties", "largest"])
@pytest.mark.parametrize("rate", [1, 31, 94, 190, 250])
def test_the_step_is_the_smallest_that_is_sure_to_keep_the_rate_up_to_the_largest_magnitude(
    values, kind, rate
):
    x = values(kind, COUNT).clamp(-(2.0**127), 2.0**127)
    step, peak = step_of(encoded(Ecsq(rate), x)), float(x.abs().max())
    if sure_bits(codes_of(x, step)) > COUNT * rate / 100:
        # nothing but the largest would have been too much
        assert step == pytest.approx(peak, rel=2.0**-8)
    elif step > peak / 1000:
        # magnitudes are told apart to 1/128
        assert sure_bits(codes_of(x, 0.97 * step)) > COUNT * rate / 100


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    st.integers(1, 250),
)
def test_any_values_keep_the_rate_or_two_bits_and_the_largest_travels(numbers, rate):
    x = torch.tensor(numbers, dtype=torch.float32)
    payload = encoded(Ecsq(rate), x)
    assert len(payload) <= 21 + math.ceil(len(x) * max(rate, 200) / 800)
    back, peak = decoded(Ecsq(rate), payload, len(x)), float(x.abs().max())
    assert (
        float((back - x.clamp(-(2.0**127), 2.0**127)).abs().max())
        <= 0.6876 * step_of(payload) + 2.0**-126
    )
    assert bool(back.any()) == (peak >= 2.0**-126)


@pytest.mark.parametrize("rate", [1, 94, 199])
def test_values_of_one_magnitude_arrive_as_they_are_and_not_as_nothing(rate):
    x = torch.tensor([0.5, -0.5]).repeat(COUNT)
    payload = encoded(Ecsq(rate), x)
    assert torch.equal(decoded(Ecsq(rate), payload, len(x)), x)
    assert 8 * len(payload) / len(x) < 2.02


def noise(kind, count=262_144):
    chance = torch.Generator().manual_seed(3)
    normal = torch.randn(count, generator=chance)
    return (
        normal
        if kind == "normal"
        else normal * torch.rand(count, generator=chance).log().neg().sqrt()
    )


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("rate", [31, 60, 94, 150, 250])
def test_bits_are_within_6_percent_of_the_codes_order_0_entropy_and_10_below_the_rate(kind, rate):
    x = noise(kind)
    payload = encoded(Ecsq(rate), x)
    counts = Counter((decoded(Ecsq(rate), payload, len(x)) / step_of(payload)).int().tolist())
    entropy = -sum(n / len(x) * math.log2(n / len(x)) for n in counts.values())
    bits = 8 * len(payload) / len(x)
    assert 1 < bits / entropy < 1.06
    assert 0.9 < bits / (rate / 100) <= 1


def test_a_bit_a_value_loses_less_than_signs_do():
    x = noise("laplace")
    error = (round_trip(Ecsq(), x) - x).square().sum() / x.square().sum()
    # the best sign and scale loses a half of Laplace values' energy
    assert float(error) < 0.31 < 0.5


def test_what_is_far_from_the_rest_arrives_within_the_bound(values):
    x = values("usual", COUNT)
    x[77] = -50.0
    step = step_of(encoded(Ecsq(250), x))
    assert abs(float(round_trip(Ecsq(250), x)[77]) + 50) <= 11 / 16 * step
    lonely = torch.zeros(COUNT)
    lonely[3000] = 1e30
    assert float(round_trip(Ecsq(), lonely)[3000]) == pytest.approx(1e30, rel=1e-3)


@pytest.mark.parametrize("rate", [31, 100])
def test_sending_the_residual_again_and_again_reaches_every_value(values, rate):
    x, sent = values("usual", COUNT), torch.zeros(COUNT)
    for _ in range(40):
        sent += round_trip(Ecsq(rate), x - sent)
    assert float((x - sent).abs().max()) < 0.01 * float(x.abs().max())


def test_the_largest_floats_are_cut_and_never_become_infinite():
    x = torch.full((COUNT,), 3.4e38)
    x[::2] *= -1
    back = round_trip(Ecsq(), x)
    assert torch.equal(back.sign(), x.sign())
    assert float(back.abs().max()) == pytest.approx(2.0**127, rel=0.01)


def test_all_zeros_cost_a_step_and_two_counts():
    assert len(encoded(Ecsq(), torch.zeros(3 * COUNT))) == 2 + 8


def payload_of(places, codes, step=ONE, many=None, few=None):
    """A payload with these codes at these places."""
    beyond = [i for i, code in enumerate(codes) if abs(code) > 1]
    out = bytearray(
        step
        + struct.pack(
            "<II", len(codes) if many is None else many, len(beyond) if few is None else few
        )
    )
    signs = sum((code < 0) << i for i, code in enumerate(codes))
    out += signs.to_bytes(-(-len(codes) // 8), "little")
    for numbers in (
        np.diff(places, prepend=-1) - 1,
        np.diff(beyond, prepend=-1) - 1,
        [abs(codes[i]) - 2 for i in beyond],
    ):
        rice.write(np.array(numbers, dtype=np.int64), out)
    return out


def test_a_payload_made_by_hand_is_read():
    back = decoded(Ecsq(), payload_of([1, 2, 9], [1, -3, 2]), 10)
    assert back.tolist() == [0, 1, -3, 0, 0, 0, 0, 0, 0, 2]


HOSTILE = [
    ("beyond the 9", payload_of([1, 2, 9], [1, -3, 2])),
    ("is beyond 4096", payload_of([0], [4097])),
    ("infinite", payload_of([0], [3], struct.pack("<H", 0x7F00))),
    ("limits", payload_of([0], [1], struct.pack("<H", 0x7F80))),
    ("limits", payload_of([0], [1], struct.pack("<H", 0x8000))),
    ("limits", payload_of([0], [1], struct.pack("<H", 0x007F))),
    ("cannot hold 10 codes for 9", payload_of([0], [1], many=10)),
    ("cannot hold 1 codes for 9 values, 2", payload_of([0], [2], few=2)),
    ("goes on", payload_of([0], [1]) + b"\0"),
]


@pytest.mark.parametrize(("reason", "payload"), HOSTILE)
def test_hostile_payloads_are_refused_with_the_reason(reason, payload):
    with pytest.raises(CorruptPayload, match=reason):
        decoded(Ecsq(), payload, 9)


def test_a_bit_after_the_last_sign_is_refused():
    payload = payload_of([0, 4], [1, -1])
    assert payload[10] == 0b10
    payload[10] |= 0b100
    with pytest.raises(CorruptPayload, match="after the last"):
        decoded(Ecsq(), payload, 9)
