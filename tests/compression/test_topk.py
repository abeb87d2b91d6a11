"""Tests specific to top-k: exactly the largest are sent, equals are ordered by position, and
hostile positions are refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.codecs import decoded, encoded

from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.topk import TopK

pytestmark = pytest.mark.usefixtures("version")


def largest(numbers, k, chunk):
    """A slow twin: positions of the k largest magnitudes of each chunk, the first among equals."""
    kept = []
    for start in range(0, len(numbers), chunk):
        order = sorted(
            range(start, min(start + chunk, len(numbers))), key=lambda i: (-abs(numbers[i]), i)
        )
        kept += sorted(order[:k])
    return kept


def positions(c, payload, count):
    """The positions in a payload, chunk by chunk, read as one large number."""
    bits, m = (c.chunk - 1).bit_length(), count // c.chunk * c.k + min(c.k, count % c.chunk)
    stream = int.from_bytes(payload[: -(-bits * m // 8)], "little")
    return [(stream >> bits * i & (2**bits - 1)) + i // c.k * c.chunk for i in range(m)]


@given(
    st.lists(st.integers(-4, 4), max_size=70),
    st.sampled_from([(1, 2), (3, 10), (5, 16), (8, 17), (2, 64), (16, 33)]),
)
def test_exactly_the_largest_are_kept_and_of_equals_the_first(numbers, shape):
    c = TopK(*shape)
    payload = encoded(c, torch.tensor(numbers, dtype=torch.float32))
    assert positions(c, payload, len(numbers)) == largest(numbers, *shape)


@pytest.mark.parametrize("kind", ["usual", "any", "ties", "rare", "denormal"])
def test_exactly_the_largest_are_kept_in_full_chunks(values, kind):
    c = TopK()
    x = values(kind, 3 * 4096 + 100)
    assert positions(c, encoded(c, x), len(x)) == largest(x.tolist(), 64, 4096)


def test_what_is_not_kept_decodes_to_zero_and_what_is_kept_keeps_its_sign(values):
    x = values("usual", 2 * 4096)
    back = decoded(TopK(), encoded(TopK(), x), len(x))
    kept = largest(x.tolist(), 64, 4096)
    assert back.nonzero().flatten().tolist() == kept
    assert torch.equal(back[kept].sign(), x[kept].sign())


def test_a_chunk_of_zeros_sends_its_first_positions():
    payload = encoded(TopK(3, 10), torch.zeros(25))
    assert positions(TopK(3, 10), payload, 25) == [0, 1, 2, 10, 11, 12, 20, 21, 22]


def test_a_chunk_shorter_than_k_travels_whole():
    x = torch.tensor([3.0, -1.0, 2.0])
    assert torch.allclose(decoded(TopK(), encoded(TopK(), x), 3), x, rtol=0.02)


def test_small_updates_do_not_vanish(values):
    x = values("usual", 4096) * 2.0**-30  # far below fp16's smallest number
    back = decoded(TopK(), encoded(TopK(), x), 4096)
    assert torch.allclose(back[back != 0], x[back != 0], rtol=0.01)


def test_the_usual_size_is_a_third_of_a_bit_a_value(values):
    assert len(encoded(TopK(), values("usual", 262_144))) * 8 / 262_144 == 0.3203125


def test_not_finite_values_are_counted_before_any_are_dropped(values):
    x = values("usual", 100)
    x[3], x[50] = float("nan"), float("inf")
    with pytest.raises(UnencodableTensor, match="2 of 100"):
        encoded(TopK(1, 50), x)


def hostile(places, bits, count_of_values):
    """A payload with these positions and well-formed values."""
    stream = sum(place << bits * i for i, place in enumerate(places))
    return (
        stream.to_bytes(-(-bits * len(places) // 8), "little")
        + b"\x00\x00\x80\x3f"
        + bytes([1] * count_of_values)
    )


def test_positions_that_repeat_fall_or_leave_their_chunk_are_refused():
    c = TopK(3, 10)
    assert decoded(c, hostile([0, 4, 9], 4, 3), 10).nonzero().flatten().tolist() == [0, 4, 9]
    for places in ([0, 0, 1], [4, 4, 4], [5, 4, 6], [1, 2, 10], [1, 2, 15]):
        with pytest.raises(CorruptPayload, match="must rise and stay"):
            decoded(c, hostile(places, 4, 3), 10)


def test_positions_of_a_short_chunk_must_lie_inside_the_tensor():
    c = TopK(3, 10)
    assert decoded(c, hostile([0, 1, 4], 4, 3), 5).nonzero().flatten().tolist() == [0, 1, 4]
    with pytest.raises(CorruptPayload, match="must rise and stay"):
        decoded(c, hostile([0, 1, 5], 4, 3), 5)


def test_a_bit_after_the_last_position_is_refused():
    payload = hostile([0, 4, 9], 4, 3)
    payload = bytes([payload[0], payload[1] | 0x10]) + payload[2:]
    with pytest.raises(CorruptPayload, match="bit after the last"):
        decoded(TopK(3, 10), payload, 10)
