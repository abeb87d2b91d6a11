"""The law of `Codec` (compression/codec.py), point by point, on every codec of the catalogue and some relatives."""

import contextlib
import math
import tracemalloc

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from farflock.compression.catalog import CODECS, codec
from farflock.compression.codec import Context, CorruptPayload, UnencodableTensor

pytestmark = pytest.mark.usefixtures(
    "oracle"
)  # the kernel has its bits (test_native.py); hostile bytes go to both here

NAMES = [
    *CODECS,
    *("int8:7", "int4:6", "fp4:6", "fp4:64", "sign:7", "sign:65", "ecsq:31", "ecsq:250"),
    *("topk:3/10", "topk:1/2", "topk:5/4095", "topk2:3/10", "topk2:1/2", "topk2:5/4095"),
    *("int8+zstd", "topk:3/10+zstd", "ecsq:100+zstd"),
]
CTX = Context(run_seed=3, round=2, tensor="layers.0.weight", shard=1)
KINDS = ("usual", "any", "huge", "denormal", "tiny", "half", "ties", "rare", "zeros", "minus_zeros", "largest")

each_codec = pytest.mark.parametrize("name", NAMES)
both_versions = pytest.mark.usefixtures("version")
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode(c, x):
    out = bytearray()
    assert c.encode(x, CTX, out) == len(out)
    return bytes(out)


def decode(c, payload, count):
    out = torch.full((count,), float("nan"))
    c.decode(payload, CTX, out)
    return out


def sizes(c):
    """0, 1, around one granule, several granules."""
    g = c.granule((4096,))
    return sorted({0, 1, 2, 3, g - 1, g, g + 1, 2 * g, 3 * g - 1} - {-1})


def absmax_of_block(x, block):
    """The largest magnitude of each value's block."""
    padded = torch.cat((x, x.new_zeros(-len(x) % block))).view(-1, block)
    return padded.abs().amax(dim=1, keepdim=True).double().expand_as(padded).reshape(-1)[: len(x)]


def blockwise_bound(x, block, levels):
    """absmax/(2·levels) of each value's block with a little for rounding, and the size of what counts as nothing."""
    absmax = absmax_of_block(x, block)
    rounding = {127: 2.0**-14, 7: 2.0**-18}[levels]
    return absmax / (2 * levels) * (1 + rounding) + levels * 2.0**-126


def bound(name, x):
    """The largest error that the docstring of the codec allows, for each value, in float64."""
    kind, _, numbers = name.removesuffix("+zstd").partition(":")
    size = x.double().abs()
    match kind:
        case "fp32":
            return torch.zeros_like(size)
        case "fp16":
            rounding = torch.maximum(size * 2.0**-11, torch.tensor(2.0**-25, dtype=torch.float64))
            return torch.where(size <= 65504, rounding, size - 65504)
        case "bf16":
            return torch.maximum(size * 2.0**-8, torch.tensor(2.0**-134, dtype=torch.float64))
        case "int8":
            return blockwise_bound(x, int(numbers or 256), 127)
        case "int4":
            return blockwise_bound(x, int(numbers or 64), 7)
        case "fp4":
            absmax = absmax_of_block(x, int(numbers or 256))
            return torch.maximum(size / 3, absmax / 128) * (1 + 2.0**-20) + 2.0**-120
        case "sign":
            block = int(numbers or 256)
            return absmax_of_block(x, block) * (1 + 2.0**-14) + block * 2.0**-126
        case "ecsq":
            return ecsq_bound(x)
        case "lowrank":  # of these, which are no matrices; test_lowrank.py has the others
            return torch.maximum(size * 2.0**-8, torch.tensor(2.0**-134, dtype=torch.float64))
        case "topk2":
            return topk2_bound(x, *(int(number) for number in numbers.split("/")))
        case "topk":
            return topk_bound(x, *(int(number) for number in numbers.split("/")))


def topk_bound(x, k, chunk):
    """int8's bound on what is kept, everything on what is not; kept are the largest, of equal ones the first."""
    out = x.double().abs()
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk]
        kept = sorted(sorted(range(len(part)), key=lambda i: (-abs(float(part[i])), i))[:k])
        out[start + torch.tensor(kept)] = blockwise_bound(part[kept], k, 127)
    return out


def topk2_bound(x, k, chunk):
    """A little more than the largest magnitude of the chunk for what is kept, everything for what is not."""
    out = x.double().abs()
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk]
        count = max(1, math.floor(len(part) * k / chunk + 0.5))
        kept = sorted(range(len(part)), key=lambda i: (-abs(float(part[i])), i))[:count]
        out[start + torch.tensor(kept)] = float(part.abs().max()) * (1 + 2.0**-8) + 2.0**-134
    return out


def ecsq_bound(x):
    """11/16 of a step, which is at most the largest magnitude (test_ecsq.py holds it to the rate), and what is above 2^127."""
    cut = x.double().abs().clamp(max=2.0**127)
    if not len(x):
        return cut
    return 11 / 16 * (1 + 2.0**-7) * cut.amax() + 2.0**-126 + (x.double().abs() - cut)


class Taken(TorchDispatchMode):
    """Counts the bytes of all tensors made inside, also of those that are freed again: no less than the peak."""

    def __init__(self):
        super().__init__()
        self.bytes, self.seen = 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self.seen:
                self.seen[x.untyped_storage().data_ptr()] = x  # kept, so that no address is given out twice
                self.bytes += x.untyped_storage().nbytes()
        return result


def memory_taken(action):
    """Bytes of tensors, and peak of Python's own memory, while `action` runs; a refusal counts as an end."""
    tracemalloc.start()
    with Taken() as taken, contextlib.suppress(CorruptPayload):
        action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return taken.bytes, peak


@each_codec
@few
@given(data=st.data())
def test_decoded_values_are_finite_and_within_the_stated_bound(values, name, data):
    c = codec(name)
    count = data.draw(st.sampled_from(sizes(c)) | st.integers(0, 300))
    x = values(data.draw(st.sampled_from(KINDS)), count, data.draw(st.integers(0, 2**32 - 1)))
    back = decode(c, encode(c, x), count)
    assert bool(torch.isfinite(back).all())
    excess = (back.double() - x.double()).abs() - bound(name, x)
    assert not count or float(excess.max()) <= 0


@each_codec
def test_every_kind_of_values_and_every_size_round_trips(values, kinds, name):
    assert set(KINDS) == set(kinds)
    c = codec(name)
    for kind in KINDS:
        for count in sizes(c):
            x = values(kind, count)
            assert not count or float(((decode(c, encode(c, x), count) - x).abs().double() - bound(name, x)).max()) <= 0


@each_codec
def test_encode_appends_and_stays_within_max_bytes(values, name):
    c = codec(name)
    for kind in KINDS:
        for count in sizes(c):
            x, out = values(kind, count), bytearray(b"before")
            written = c.encode(x, CTX, out)
            assert out[:6] == b"before"
            assert written == len(out) - 6 <= c.max_bytes(count)


@both_versions
@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_sent(values, name, bad):
    c = codec(name)
    for count in (1, 2, c.granule((4096,)) + 1):
        for at in {0, count // 2, count - 1}:
            x, out = values("usual", count), bytearray(b"before")
            x[at] = bad
            with pytest.raises(UnencodableTensor, match=f"1 of {count} values"):
                c.encode(x, CTX, out)
            assert out == b"before"


@each_codec
@pytest.mark.parametrize("x", [torch.zeros(2, 2), torch.zeros(4).double(), torch.zeros(4).int(), torch.tensor(1.0)])
def test_only_flat_float32_is_taken(name, x):
    with pytest.raises(UnencodableTensor, match="flat float32"):
        codec(name).encode(x, CTX, bytearray())


@each_codec
def test_zeros_and_nothing_round_trip_exactly(values, name):
    c = codec(name)
    for count in sizes(c):
        assert torch.equal(decode(c, encode(c, values("zeros", count)), count), torch.zeros(count))


@both_versions
@each_codec
@few
@given(data=st.data())
def test_any_bytes_at_all_decode_to_finite_values_or_are_refused(values, name, data):
    c = codec(name)
    count = data.draw(st.sampled_from([0, 1, 2, 3, 9, 10, 11, 64, 65, 256, 257]))
    payload = bytearray(encode(c, values(data.draw(st.sampled_from(KINDS)), count)))
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 3)) if payload else 0):
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    else:
        payload = data.draw(st.binary(min_size=len(payload), max_size=len(payload)) | st.binary(max_size=50))
    out = torch.full((count,), 7.5)
    try:
        c.decode(payload, CTX, out)
    except CorruptPayload:
        assert torch.equal(out, torch.full((count,), 7.5)), "a refused payload left a trace"
    assert bool(torch.isfinite(out).all())


@both_versions
@each_codec
def test_every_truncation_and_extension_is_refused(values, name):
    c = codec(name)
    for count in (0, 1, 3, 11, 70, 260):
        payload = encode(c, values("usual", count))
        for wrong in (*(payload[:stop] for stop in range(len(payload))), *(payload + bytes(n) for n in (1, 2, 4, 64))):
            with pytest.raises(CorruptPayload):
                decode(c, wrong, count)


@pytest.fixture(scope="module")
def warm():
    """What torch imports when its calls are watched for the first time is no codec's memory."""
    with Taken():
        torch.empty(1)


@each_codec
def test_decode_takes_little_memory(warm, values, name):
    c, count = codec(name), 3 * 65536 + 5
    payload, out = encode(c, values("usual", count)), torch.empty(count)
    tensors, python = memory_taken(lambda: c.decode(payload, CTX, out))
    dense = name.startswith("ecsq") or (name.startswith("topk") and name not in CODECS)
    multiple = 16 if dense else 4  # so dense that positions weigh most
    assert tensors <= multiple * 4 * count
    assert python <= multiple // 2 * 4 * count  # numpy's arrays count as Python's own memory


@both_versions
@each_codec
def test_a_payload_of_the_wrong_length_is_refused_before_memory_is_taken(warm, name):
    c = codec(name)
    out = torch.empty(1_000_000)
    for payload in (b"", b"\x00" * 1000, bytes(c.max_bytes(len(out)) + 1)):
        tensors, python = memory_taken(lambda payload=payload: c.decode(payload, CTX, out))
        assert tensors == 0
        assert python < 10_000


@each_codec
def test_encode_and_decode_are_pure(values, bits, name):
    c, count = codec(name), 2 * codec(name).granule((4096,)) + 3
    x = values("usual", count)
    before = x.clone()
    payload = encode(c, x)
    assert torch.equal(x, before)
    assert encode(codec(name), x.clone()) == payload, "another object of the same codec writes other bytes"
    expected = bits(decode(c, payload, count))
    unaligned = memoryview(b"\x00" + payload)[1:]
    for same in (payload, bytearray(payload), memoryview(payload), unaligned):
        assert torch.equal(bits(decode(c, same, count)), expected)
    assert bytes(unaligned) == payload


@pytest.mark.parametrize(
    "name", [name for name in NAMES if not name.startswith("ecsq")]
)  # its step is of all it is given
def test_shards_cut_at_granules_decode_as_the_whole_does(values, bits, name):
    c = codec(name)
    g = c.granule((4096,))
    x = values("usual", 3 * g + g // 2)
    whole = decode(c, encode(c, x), len(x))
    parts = [decode(c, encode(c, part), len(part)) for part in (x[:g], x[g : 3 * g], x[3 * g :])]
    assert torch.equal(bits(torch.cat(parts)), bits(whole))


@each_codec
def test_a_codec_is_a_frozen_value(name):
    c = codec(name)
    assert c == codec(name)
    assert hash(c) == hash(codec(name))
    assert not hasattr(c, "__dict__")
    with pytest.raises((AttributeError, TypeError)):  # Python 3.11 trips over its own message for slotted classes
        c.name = "other"
