"""Tests specific to zstd: where it pays, and the frames that are refused before they cost
memory."""

import struct
import tracemalloc

import pytest
import torch
import zstandard
from worlds.codecs import decoded, encoded

from farflock.compression.codec import CorruptPayload
from farflock.compression.floats import Half, Raw
from farflock.compression.int8 import Int8
from farflock.compression.zstd import Zstd

BF16 = Zstd(Half("bf16"))


def pack(content, **options):
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


@pytest.mark.parametrize("inner", [Raw(), Half("fp16"), Half("bf16"), Int8()])
def test_the_values_are_those_of_the_inner_codec(values, bits, inner):
    x = values("usual", 5000)
    assert torch.equal(
        bits(decoded(Zstd(inner), encoded(Zstd(inner), x), 5000)),
        bits(decoded(inner, encoded(inner, x), 5000)),
    )


def test_bf16_of_values_of_similar_size_shrinks_and_random_bytes_stay_within_max_bytes(values):
    x = values("usual", 100_000)
    assert len(encoded(BF16, x)) < 0.9 * len(encoded(Half("bf16"), x))
    assert len(encoded(Zstd(Raw()), values("any", 100_000))) <= Zstd(Raw()).max_bytes(100_000)


def test_a_bomb_is_refused_before_memory_is_taken():
    bomb = pack(bytes(300_000_000))
    assert len(bomb) < BF16.max_bytes(10_000)
    tracemalloc.start()
    with pytest.raises(CorruptPayload, match="claims 300000000 bytes"):
        decoded(BF16, bomb, 10_000)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_a_frame_that_hides_its_size_is_refused():
    with pytest.raises(CorruptPayload, match="claims"):
        decoded(BF16, pack(bytes(200), write_content_size=False), 100)


def test_a_frame_that_asks_for_a_huge_window_is_refused():
    # content of 200 bytes, window of 128 MiB
    header = b"\x28\xb5\x2f\xfd" + bytes([0x80, 0x88]) + struct.pack("<I", 200)
    with pytest.raises(CorruptPayload, match="in a window of 134217728"):
        decoded(BF16, header + bytes(20), 100)


def test_a_frame_that_understates_its_size_is_refused():
    frame = bytearray(pack(bytes(256 + 90)))
    assert frame[4] & 0xC0 == 0x40  # a content size of two bytes, less 256, follows
    struct.pack_into("<H", frame, 5, 0)
    with pytest.raises(CorruptPayload):
        decoded(BF16, bytes(frame), 128)


@pytest.mark.parametrize("junk", [b"\x00", b"anything", pack(b"")])
def test_nothing_may_follow_the_frame(junk):
    payload = pack(bytes(200))
    assert decoded(BF16, payload, 100).count_nonzero() == 0
    with pytest.raises(CorruptPayload, match="unused data"):
        decoded(BF16, payload + junk, 100)


def test_a_skippable_frame_is_refused():
    with pytest.raises(CorruptPayload):
        decoded(BF16, struct.pack("<II", 0x184D2A50, 4) + b"abcd", 2)


def test_a_frame_that_needs_a_dictionary_is_refused():
    dictionary = zstandard.train_dictionary(
        4096, [bytes([i % 7, i % 11, i % 13] * 40) for i in range(500)]
    )
    packed = pack(bytes([1, 2, 3] * 66 + [0, 0]), dict_data=dictionary)
    with pytest.raises(CorruptPayload, match="not a zstd frame"):
        decoded(BF16, packed, 100)


@pytest.mark.parametrize("content", [b"", bytes(198), bytes(199)])
def test_content_of_the_wrong_length_is_refused_by_the_inner_codec(content):
    with pytest.raises(CorruptPayload, match="needs 200 bytes"):
        decoded(BF16, pack(content), 100)


def test_no_values_are_no_bytes():
    assert encoded(BF16, torch.empty(0)) == b""
    with pytest.raises(CorruptPayload, match="needs at most 0 bytes"):
        decoded(BF16, pack(b""), 0)
