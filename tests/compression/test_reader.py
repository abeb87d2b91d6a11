"""A second reader of every codec payload, written from docs/wire-format.md alone, in plain Python.

It shares no code with compression/. It is slow and obvious, and it must agree with `decode` to the bit: on what the
values are, and on which payloads are refused.
"""

import itertools
import math
import re
import struct

import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflock.compression.catalog import CODECS, codec
from farflock.compression.codec import Context, CorruptPayload

NAMES = [
    *CODECS,
    "fp32+zstd",
    "int8:1",
    "int8:7",
    "int4:2",
    "int4:6",
    "topk:3/10",
    "topk:1/2",
    "topk:2/17",
    "topk:3/10+zstd",
]
KINDS = ("usual", "any", "huge", "tiny", "half", "ties", "rare", "zeros", "minus_zeros", "largest")


class Refused(Exception):
    """The page says that a reader must refuse this payload."""


def bits_of(number):
    """The 32 bits of a number, rounded once to binary32; products of a small whole number and an fp32 are exact before."""
    return struct.unpack("<I", struct.pack("<f", number))[0]


def number_of(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def need(condition):
    if not condition:
        raise Refused


def read_fp32(payload, n):
    need(len(payload) == 4 * n)
    values = struct.unpack(f"<{n}I", payload)
    need(all(math.isfinite(number_of(bits)) for bits in values))
    return list(values)


def read_fp16(payload, n):
    need(len(payload) == 2 * n)
    need(all(bits & 0x7C00 != 0x7C00 for bits in struct.unpack(f"<{n}H", payload)))
    return [bits_of(value) for value in struct.unpack(f"<{n}e", payload)]


def read_bf16(payload, n):
    need(len(payload) == 2 * n)
    values = struct.unpack(f"<{n}H", payload)
    need(all(bits & 0x7F80 != 0x7F80 for bits in values))
    return [bits << 16 for bits in values]


def read_scales(payload, blocks, limit):
    scales = struct.unpack(f"<{blocks}I", payload[: 4 * blocks])
    need(all(bits == 0 or 0x00800000 <= bits <= limit for bits in scales))
    return [number_of(bits) for bits in scales]


def read_int8(payload, n, block):
    blocks = math.ceil(n / block)
    need(len(payload) == 4 * blocks + n)
    scales = read_scales(payload, blocks, 0x7C010203)
    codes = struct.unpack(f"<{n}b", payload[4 * blocks :])
    need(-128 not in codes)
    return [bits_of(code * scales[i // block]) for i, code in enumerate(codes)]


def read_int4(payload, n, block):
    blocks = math.ceil(n / block)
    need(len(payload) == 4 * blocks + math.ceil(n / 2))
    scales = read_scales(payload, blocks, 0x7E124924)
    stored = [half for byte in payload[4 * blocks :] for half in (byte & 15, byte >> 4)]
    need(0 not in stored)
    need(stored[n:] in ([], [8]))
    return [bits_of((code - 8) * scales[i // block]) for i, code in enumerate(stored[:n])]


def read_topk(payload, n, k, chunk):
    width = (chunk - 1).bit_length()
    kept = [min(k, n - start, chunk) for start in range(0, n, chunk)]
    m = sum(kept)
    at = math.ceil(width * m / 8)
    need(len(payload) == at + 4 * math.ceil(m / k) + m)
    stream = int.from_bytes(payload[:at], "little")
    need(stream >> (width * m) == 0)
    positions = [stream >> (width * i) & (2**width - 1) for i in range(m)]
    values = read_int8(payload[at:], m, k)
    out, used = [0] * n, 0
    for number, count in enumerate(kept):
        here = positions[used : used + count]
        need(all(a < b for a, b in itertools.pairwise(here)))
        need(all(position < min(chunk, n - number * chunk) for position in here))
        for position, value in zip(here, values[used : used + count], strict=True):
            out[number * chunk + position] = value
        used += count
    return out


def length(name, n):
    """The page's table."""
    kind, *numbers = re.split("[:/]", name)
    a, b = ([int(number) for number in numbers] + [0, 0])[:2]
    match kind:
        case "fp32":
            return 4 * n
        case "fp16" | "bf16":
            return 2 * n
        case "int8":
            return 4 * math.ceil(n / (a or 256)) + n
        case "int4":
            return 4 * math.ceil(n / (a or 64)) + math.ceil(n / 2)
        case "topk":
            m = a * (n // b) + min(a, n % b)
            return math.ceil((b - 1).bit_length() * m / 8) + 4 * math.ceil(m / a) + m


def read_zstd(payload, n, inner):
    limit = length(inner, n)
    need(len(payload) <= (limit + limit // 256 + 64 if limit else 0))
    if not payload:
        return read(inner, b"", n)
    try:
        frame = zstandard.get_frame_parameters(payload)
        need(payload[:4] == b"\x28\xb5\x2f\xfd")
        need(frame.content_size <= limit)
        need(frame.window_size <= max(2 * limit, 1024))
        whole = zstandard.ZstdDecompressor().decompressobj()
        content = whole.decompress(payload)
    except zstandard.ZstdError:
        raise Refused from None
    need(whole.eof and not whole.unused_data)
    return read(inner, content, n)


def read(name, payload, n):
    """The bit patterns of the n values of a payload, or `Refused`."""
    if name.endswith("+zstd"):
        return read_zstd(payload, n, name.removesuffix("+zstd"))
    kind, *numbers = re.split("[:/]", name)
    numbers = [int(number) for number in numbers]
    match kind:
        case "fp32":
            return read_fp32(payload, n)
        case "fp16":
            return read_fp16(payload, n)
        case "bf16":
            return read_bf16(payload, n)
        case "int8":
            return read_int8(payload, n, *(numbers or [256]))
        case "int4":
            return read_int4(payload, n, *(numbers or [64]))
        case "topk":
            return read_topk(payload, n, *numbers)


def decoded(name, payload, n):
    """What `decode` makes of it, in the same form."""
    out = torch.empty(n)
    try:
        codec(name).decode(payload, Context(), out)
    except CorruptPayload:
        raise Refused from None
    return [bits & 0xFFFFFFFF for bits in out.view(torch.int32).tolist()]


def outcome(reader, name, payload, n):
    try:
        return reader(name, payload, n)
    except Refused:
        return "refused"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [0, 1, 2, 9, 10, 11, 63, 64, 65, 255, 256, 257, 530])
def test_both_readers_agree_on_every_written_payload(values, name, count):
    for kind in KINDS:
        payload = bytearray()
        codec(name).encode(values(kind, count, seed=count), Context(), payload)
        assert read(name, bytes(payload), count) == decoded(name, payload, count)
        if not name.endswith("+zstd"):
            assert len(payload) == length(name, count) == codec(name).max_bytes(count)


@pytest.mark.parametrize("name", ["topk:64/4096", "topk:5/4095", "topk:2/17", "int4", "int8"])
def test_both_readers_agree_on_several_chunks(values, name):
    for count in (4096, 4097, 8300):
        payload = bytearray()
        codec(name).encode(values("usual", count), Context(), payload)
        assert read(name, bytes(payload), count) == decoded(name, payload, count)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_both_readers_agree_on_what_to_refuse(values, name, data):
    count = data.draw(st.sampled_from([0, 1, 2, 3, 9, 10, 11, 12, 65]))
    payload = bytearray()
    codec(name).encode(values(data.draw(st.sampled_from(KINDS)), count), Context(), payload)
    for _ in range(data.draw(st.integers(1, 3)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    payload = bytes(payload)[: data.draw(st.none() | st.integers(0, len(payload) + 1))] + data.draw(
        st.just(b"") | st.binary(max_size=2)
    )
    assert outcome(read, name, payload, count) == outcome(decoded, name, payload, count)
