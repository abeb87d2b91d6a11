"""A second reader of every codec payload, written from docs/wire-format.md alone, in plain Python.

It shares no code with compression/. It is slow and obvious, and must agree with `decode` to the bit
on the values, and on which payloads are refused.
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
    *(
        "fp4:2",
        "fp4:6",
        "sign:1",
        "sign:7",
        "topk2:3/10",
        "topk2:1/2",
        "topk2:2/17",
        "ecsq:100",
        "ecsq:31",
        "ecsq:150+zstd",
    ),
]
EXACT_LENGTH = ("fp32", "fp16", "bf16", "int8", "int4", "fp4", "sign", "topk")
KINDS = ("usual", "any", "huge", "tiny", "half", "ties", "rare", "zeros", "minus_zeros", "largest")


class Refused(Exception):
    """The page says that a reader must refuse this payload."""


def bits_of(number):
    """The 32 bits of a number, rounded once to binary32; before that, the product of a small whole
    number and an fp32 is exact."""
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


def read_fp4(payload, n, block):
    blocks = math.ceil(n / block)
    need(len(payload) == 4 * blocks + math.ceil(n / 2))
    scales = read_scales(payload, blocks, 0x7C7FFFFF)
    stored = [half for byte in payload[4 * blocks :] for half in (byte & 15, byte >> 4)]
    need(8 not in stored)
    need(stored[n:] in ([], [0]))
    codes = [
        (-1 if code & 8 else 1) * (2 ** ((code & 7) - 1) if code & 7 else 0) for code in stored
    ]
    return [bits_of(code * scales[i // block]) for i, code in enumerate(codes[:n])]


def read_sign(payload, n, block):
    blocks = math.ceil(n / block)
    need(len(payload) == 4 * blocks + math.ceil(n / 8))
    scales = read_scales(payload, blocks, 0x7F7FFFFF)
    stream = int.from_bytes(payload[4 * blocks :], "little")
    need(stream >> n == 0)
    return [bits_of(scales[i // block]) | (stream >> i & 1) << 31 for i in range(n)]


def read_planes(payload, count, width):
    """The numbers of `count` times `width` bits, lowest plane first."""
    stream = int.from_bytes(payload, "little")
    need(stream >> (count * width) == 0)
    return [
        sum((stream >> (plane * count + i) & 1) << plane for plane in range(width))
        for i in range(count)
    ]


def read_list(payload, count):
    """The numbers of a list, and the bytes after it."""
    if not count:
        return [], payload
    need(payload and payload[0] <= 16)
    width, unary_at = payload[0], 1 + math.ceil(count * payload[0] / 8)
    need(len(payload) >= unary_at)
    lows = read_planes(payload[1:unary_at], count, width)
    numbers, zeros = [], 0
    for i in itertools.count():
        need(unary_at + i // 8 < len(payload))
        if payload[unary_at + i // 8] >> (i % 8) & 1 == 0:
            zeros += 1
            continue
        numbers.append(zeros << width | lows[len(numbers)])
        zeros = 0
        if len(numbers) == count:
            break
    need(payload[unary_at + i // 8] >> (i % 8) == 1)
    return numbers, payload[unary_at + i // 8 + 1 :]


def most(count, total):
    """The page's R."""
    least = min(count * (w + 1) + total // 2**w for w in range(17))
    return 1 + (14 + least) // 8 if count else 0


def kept_of(n, k, chunk):
    """The number of values that topk2 keeps of each chunk."""
    sizes = [min(chunk, n - start) for start in range(0, n, chunk)]
    return [k if c == chunk else max(1, math.floor(c * k / chunk + 0.5)) for c in sizes]


def read_topk2(payload, n, k, chunk):
    kept = kept_of(n, k, chunk)
    m = sum(kept)
    codes_at, gaps_at = 4 * len(kept), 4 * len(kept) + math.ceil(2 * m / 8)
    need(gaps_at <= len(payload) <= length(f"topk2:{k}/{chunk}", n))
    levels = struct.unpack(f"<{2 * len(kept)}H", payload[:codes_at])
    need(all(level <= 0x7F7F for level in levels))
    codes = read_planes(payload[codes_at:gaps_at], m, 2)
    gaps, rest = read_list(payload[gaps_at:], m)
    need(not rest)
    out, used = [0] * n, 0
    for number, count in enumerate(kept):
        position = -1
        for code, gap in zip(codes[used : used + count], gaps[used : used + count], strict=True):
            position += 1 + gap
            need(position < min(chunk, n - number * chunk))
            out[number * chunk + position] = (
                levels[2 * number + (code >> 1)] << 16 | (code & 1) << 31
            )
        used += count
    return out


def read_ecsq(payload, n, rate):
    need(len(payload) <= length(f"ecsq:{rate}", n))
    if not n:
        return []
    need(len(payload) >= 10)
    step, a, b = struct.unpack("<HII", payload[:10])
    need(step == 0 or 0x0080 <= step <= 0x7F7F)
    need(b <= a <= n)
    rest = payload[10:]
    need(len(rest) >= math.ceil(a / 8))
    signs, rest = read_planes(rest[: math.ceil(a / 8)], a, 1), rest[math.ceil(a / 8) :]
    zeros, rest = read_list(rest, a)
    ones, rest = read_list(rest, b)
    excess, rest = read_list(rest, b)
    need(not rest)
    codes, at = [1] * a, -1
    for gap, more in zip(ones, excess, strict=True):
        at += gap + 1
        need(at < a and more + 2 <= 4096)
        codes[at] = more + 2
    out, at = [0] * n, -1
    for gap, code, negative in zip(zeros, codes, signs, strict=True):
        at += gap + 1
        need(at < n)
        value = code * number_of(step << 16)
        need(value < 2.0**128)
        out[at] = bits_of(value) | negative << 31
    return out


def length(name, n):
    """The length in the page's table, or its limit where the length varies."""
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
        case "fp4":
            return 4 * math.ceil(n / (a or 256)) + math.ceil(n / 2)
        case "sign":
            return 4 * math.ceil(n / (a or 256)) + math.ceil(n / 8)
        case "topk2":
            kept = kept_of(n, a, b)
            return 4 * len(kept) + math.ceil(2 * sum(kept) / 8) + most(sum(kept), n - sum(kept))
        case "lowrank":
            return 2 * n
        case "ecsq":
            return 21 + math.ceil(n * max(a, 200) / 800) if n else 0
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
        case "fp4":
            return read_fp4(payload, n, *(numbers or [256]))
        case "sign":
            return read_sign(payload, n, *(numbers or [256]))
        case "topk":
            return read_topk(payload, n, *numbers)
        case "topk2":
            return read_topk2(payload, n, *numbers)
        case "ecsq":
            return read_ecsq(payload, n, *numbers)
        case "lowrank":
            return read_bf16(payload, n)


def read_by_codec(name, payload, n):
    """The result of `decode`, in the same form."""
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
        assert read(name, bytes(payload), count) == read_by_codec(name, payload, count)
        assert len(payload) <= codec(name).max_bytes(count)
        if not name.endswith("+zstd"):
            assert length(name, count) == codec(name).max_bytes(count)
            assert name.partition(":")[0] not in EXACT_LENGTH or len(payload) == length(name, count)


@pytest.mark.parametrize(
    "name",
    [
        "topk:64/4096",
        "topk:5/4095",
        "topk2:64/4096",
        "topk2:2/17",
        "ecsq:150",
        "int4",
        "fp4",
        "sign:300",
    ],
)
def test_both_readers_agree_on_several_chunks(values, name):
    for count in (4096, 4097, 8300):
        payload = bytearray()
        codec(name).encode(values("usual", count), Context(), payload)
        assert read(name, bytes(payload), count) == read_by_codec(name, payload, count)


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
    assert outcome(read, name, payload, count) == outcome(read_by_codec, name, payload, count)
