"""Lists of numbers: what is written is read back, in as few bits as a slow twin takes and near the
entropy, and hostile bytes are refused."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression import rice
from farflock.compression.codec import CorruptPayload

some_numbers = st.lists(st.integers(0, 300) | st.integers(0, 70_000), max_size=60)


def written(numbers):
    out = bytearray(b"before")
    assert rice.write(np.array(numbers, dtype=np.int64), out) == len(out) - 6
    assert out[:6] == b"before"
    return bytes(out[6:])


def twin(numbers):
    """A slow twin: it tries all widths, and its bits are text."""
    if not numbers:
        return b""
    width = min(
        range(17),
        key=lambda w: (len(numbers) * (w + 1) + sum(number >> w for number in numbers), w),
    )
    low = "".join(str(number >> plane & 1) for plane in range(width) for number in numbers)
    unary = "".join("0" * (number >> width) + "1" for number in numbers)
    return bytes([width]) + as_bytes(low) + as_bytes(unary)


def as_bytes(bits):
    return bytes(int(bits[at : at + 8][::-1], 2) for at in range(0, len(bits), 8))


@given(some_numbers)
def test_the_slow_twin_writes_the_same_bytes(numbers):
    assert written(numbers) == twin(numbers)


@given(some_numbers, st.binary(max_size=5), st.binary(max_size=5))
def test_what_is_written_is_read_wherever_it_lies(numbers, before, after):
    payload = before + written(numbers) + after
    back, end = rice.read(payload, len(before), len(numbers))
    assert back.tolist() == numbers
    assert end == len(payload) - len(after)


@given(some_numbers)
def test_no_list_takes_more_than_the_stated_bytes(numbers):
    assert len(written(numbers)) <= rice.max_bytes(len(numbers), sum(numbers))


@pytest.mark.parametrize("numbers", [[0], [16 * 65536], [0] * 9, [7] * 9, [1_000_000], [2**18, 0]])
def test_extremes_round_trip(numbers):
    assert rice.read(written(numbers), 0, len(numbers))[0].tolist() == numbers


@pytest.mark.parametrize("share", [0.003, 1 / 64, 0.05, 0.1, 0.15, 0.216, 0.25, 0.3, 0.35, 0.382])
def test_gaps_between_scattered_positions_take_at_most_5_percent_more_than_their_entropy(share):
    places = np.flatnonzero(np.random.default_rng(1).random(400_000) < share)
    bits = 8 * len(written((np.diff(places, prepend=-1) - 1).tolist()))
    share = len(places) / 400_000
    entropy = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    assert 0.995 < bits / 400_000 / entropy < 1.05


@given(st.binary(max_size=60), st.integers(0, 40), st.integers(0, 8))
def test_any_bytes_are_a_list_or_are_refused(payload, count, start):
    try:
        numbers, end = rice.read(payload, min(start, len(payload)), count)
    except CorruptPayload:
        return
    assert len(numbers) == count
    assert end <= len(payload)
    assert not count or 0 <= numbers.min() <= numbers.max() < 2**19 * len(payload)


def test_a_list_is_told_apart_from_its_truncations():
    payload = written([3, 0, 90, 4, 4, 17])
    for stop in range(len(payload)):
        with pytest.raises(CorruptPayload):
            rice.read(payload[:stop], 0, 6)


def test_a_width_above_16_and_set_filling_bits_are_refused():
    payload = written([7, 7, 7])  # width 2: two planes of three bits, then 01 three times
    assert payload == bytes([2, 0b111111, 0b101010])
    for hostile in (
        bytes([17]) + bytes([255] * 40),
        bytes([2, 0b1111111, 0b101010]),
        bytes([2, 0b111111, 0b1101010]),
    ):
        with pytest.raises(CorruptPayload):
            rice.read(hostile, 0, 3)


def test_a_huge_count_is_refused_before_memory_is_taken_for_it():
    tracemalloc.start()
    for width in (0, 16):
        with pytest.raises(CorruptPayload, match="cannot hold"):
            rice.read(bytes([width]) + bytes(1000), 0, 10**9)
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


@given(st.lists(st.integers(0, 2**16 - 1), max_size=40), st.integers(0, 16))
def test_bit_planes_round_trip_and_hold_the_low_bits(numbers, width):
    packed = rice.pack(np.array(numbers, dtype=np.int64), width)
    assert len(packed) == -(-len(numbers) * width // 8)
    assert rice.unpack(b"xx" + packed, 2, len(numbers), width).tolist() == [
        n % 2**width for n in numbers
    ]
