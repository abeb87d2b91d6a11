"""What is special about ecsq: codes as a slow twin finds them, bits near their entropy, hostile lists refused."""

import math
import struct
from collections import Counter

import numpy as np
import pytest
import torch

from farflock.compression import rice
from farflock.compression.codec import Context, CorruptPayload
from farflock.compression.ecsq import BLOCK, Ecsq

ONE = struct.pack("<H", 0x3F80)  # a step of 1


def encoded(c, x):
    out = bytearray()
    c.encode(x, Context(), out)
    return out


def decoded(c, payload, count):
    out = torch.full((count,), float("nan"))
    c.decode(payload, Context(), out)
    return out


def through(c, x):
    return decoded(c, encoded(c, x), len(x))


def steps_of(payload, count):
    blocks = -(-count // BLOCK)
    return [struct.unpack("<f", b"\0\0" + payload[2 * block : 2 * block + 2])[0] for block in range(blocks)]


@pytest.mark.parametrize("percent", [100, 240, 700])
@pytest.mark.parametrize("count", [1, 50, BLOCK, 2 * BLOCK + 100])
def test_codes_are_those_of_a_slow_twin(values, percent, count):
    x = values("usual", count, seed=1)
    payload = encoded(Ecsq(percent), x)
    steps, back = steps_of(payload, count), decoded(Ecsq(percent), payload, count).tolist()
    for i, number in enumerate(x.tolist()):
        step = steps[i // BLOCK]
        assert back[i] == math.copysign(math.floor(abs(number) / step + 5 / 16) * step, number)


@pytest.mark.parametrize("percent", [100, 190, 240, 2000])
def test_the_step_is_the_named_share_of_the_mean_magnitude_up_to_the_largest(values, percent):
    x = values("usual", 2 * BLOCK + 300)
    for step, part in zip(steps_of(encoded(Ecsq(percent), x), len(x)), x.split(BLOCK), strict=True):
        wanted = min(percent / 100 * float(part.abs().double().mean()), float(part.abs().max()))
        assert step == pytest.approx(wanted, rel=2.0**-8)


@pytest.mark.parametrize("percent", [100, 240, 2000])
def test_values_of_one_magnitude_arrive_as_they_are_and_not_as_nothing(percent):
    x = torch.tensor([0.5, -0.5]).repeat(BLOCK)
    assert torch.equal(through(Ecsq(percent), x), x)


def noise(kind, count=262_144):
    chance = torch.Generator().manual_seed(3)
    normal = torch.randn(count, generator=chance)
    return normal if kind == "normal" else normal * torch.rand(count, generator=chance).log().neg().sqrt()


@pytest.mark.parametrize("kind", ["normal", "laplace"])
@pytest.mark.parametrize("percent", [100, 150, 200, 240, 300, 400])
def test_bits_are_within_6_percent_of_the_codes_order_0_entropy(kind, percent):
    x = noise(kind)
    payload = encoded(Ecsq(percent), x)
    steps = torch.tensor(steps_of(payload, len(x))).repeat_interleave(BLOCK)
    counts = Counter((decoded(Ecsq(percent), payload, len(x)) / steps).int().tolist())
    entropy = -sum(n / len(x) * math.log2(n / len(x)) for n in counts.values())
    assert 1 < 8 * len(payload) / len(x) / entropy < 1.06


def test_the_usual_step_takes_about_a_bit_and_loses_less_than_signs_do():
    x = noise("laplace")
    payload = encoded(Ecsq(), x)
    assert 8 * len(payload) / len(x) < 1.05
    error = (decoded(Ecsq(), payload, len(x)) - x).square().sum() / x.square().sum()
    assert float(error) < 0.3 < 0.5  # the best sign and scale loses a half of Laplace values' energy


def test_what_is_far_from_the_rest_arrives_within_the_bound(values):
    x = values("usual", BLOCK)
    x[77] = -50.0
    step = steps_of(encoded(Ecsq(100), x), BLOCK)[0]
    assert abs(float(through(Ecsq(100), x)[77]) + 50) <= 11 / 16 * step
    lonely = torch.zeros(BLOCK)
    lonely[3000] = 1e30
    assert float(through(Ecsq(100), lonely)[3000]) == pytest.approx(1e30, rel=1e-3)


def test_sending_the_residual_again_and_again_reaches_every_value(values):
    x, sent = values("usual", BLOCK), torch.zeros(BLOCK)
    for _ in range(40):
        sent += through(Ecsq(), x - sent)
    assert float((x - sent).abs().max()) < 0.01 * float(x.abs().max())


def test_the_largest_floats_are_cut_and_never_become_infinite():
    x = torch.full((BLOCK,), 3.4e38)
    x[::2] *= -1
    back = through(Ecsq(100), x)
    assert torch.equal(back.sign(), x.sign())
    assert float(back.abs().max()) == pytest.approx(2.0**127, rel=0.01)


def test_all_zeros_cost_a_step_and_two_counts():
    assert len(encoded(Ecsq(), torch.zeros(3 * BLOCK))) == 3 * 2 + 8


def payload_of(places, codes, step=ONE, many=None, few=None):
    """A payload of one block with these codes at these places."""
    beyond = [i for i, code in enumerate(codes) if abs(code) > 1]
    out = bytearray(
        step + struct.pack("<II", len(codes) if many is None else many, len(beyond) if few is None else few)
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
    back = decoded(Ecsq(100), payload_of([1, 2, 9], [1, -3, 2]), 10)
    assert back.tolist() == [0, 1, -3, 0, 0, 0, 0, 0, 0, 2]


HOSTILE = [
    ("beyond the 9", payload_of([1, 2, 9], [1, -3, 2])),
    ("is beyond 8191", payload_of([0], [8192])),
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
        decoded(Ecsq(100), payload, 9)


def test_a_bit_after_the_last_sign_is_refused():
    payload = payload_of([0, 4], [1, -1])
    assert payload[10] == 0b10
    payload[10] |= 0b100
    with pytest.raises(CorruptPayload, match="after the last"):
        decoded(Ecsq(100), payload, 9)
