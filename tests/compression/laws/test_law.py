"""The laws of `Codec` (compression/codec.py), point by point, on every codec of the catalogue and
some relatives. The laws themselves are functions (compression/check.py);
here are the bounds that the docstrings of our codecs state.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflock.compression import check
from farflock.compression.catalog import CODECS, codec
from farflock.compression.check import CodecLawBroken, check_codec
from farflock.compression.codec import CorruptPayload, require_finite, require_length
from farflock.compression.payload import append, values_at

# the kernel has its bits (test_native.py); hostile bytes go to both here
pytestmark = pytest.mark.usefixtures("oracle")

NAMES = [
    *CODECS,
    *("int8:7", "int4:6", "fp4:6", "fp4:64", "sign:7", "sign:65", "ecsq:31", "ecsq:250"),
    *("topk:3/10", "topk:1/2", "topk:5/4095", "topk2:3/10", "topk2:1/2", "topk2:5/4095"),
    *("int8+zstd", "topk:3/10+zstd", "ecsq:100+zstd"),
]
KINDS = st.sampled_from(sorted(check.KINDS))
SEEDS = st.integers(0, 2**32 - 1)

each_codec = pytest.mark.parametrize("name", NAMES)
both_versions = pytest.mark.usefixtures("version")
few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def absmax_of_block(x, block):
    """The largest magnitude of each value's block."""
    padded = torch.cat((x, x.new_zeros(-len(x) % block))).view(-1, block)
    return padded.abs().amax(dim=1, keepdim=True).double().expand_as(padded).reshape(-1)[: len(x)]


def blockwise_bound(x, block, levels):
    """absmax/(2·levels) of each value's block, a little more for rounding, and the size of what
    counts as 0."""
    absmax = absmax_of_block(x, block)
    rounding = {127: 2.0**-14, 7: 2.0**-18}[levels]
    return absmax / (2 * levels) * (1 + rounding) + levels * 2.0**-126


def bound(name, x):
    """The largest error that the codec's docstring allows for each value, in float64; codecs that
    are not named here state it themselves."""
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
        case _:
            return codec(name).bound(x)


def topk_bound(x, k, chunk):
    """int8's bound for kept values, and the whole value for others; the largest are kept, the first
    among equals."""
    out = x.double().abs()
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk]
        kept = sorted(sorted(range(len(part)), key=lambda i: (-abs(float(part[i])), i))[:k])
        out[start + torch.tensor(kept)] = blockwise_bound(part[kept], k, 127)
    return out


def topk2_bound(x, k, chunk):
    """A little more than the chunk's largest magnitude for kept values, and the whole value for
    others."""
    out = x.double().abs()
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk]
        count = max(1, math.floor(len(part) * k / chunk + 0.5))
        kept = sorted(range(len(part)), key=lambda i: (-abs(float(part[i])), i))[:count]
        out[start + torch.tensor(kept)] = float(part.abs().max()) * (1 + 2.0**-8) + 2.0**-134
    return out


def ecsq_bound(x):
    """11/16 of a step, which is at most the largest magnitude (test_ecsq.py checks it against the
    rate), plus whatever is above 2^127."""
    cut = x.double().abs().clamp(max=2.0**127)
    if not len(x):
        return cut
    return 11 / 16 * (1 + 2.0**-7) * cut.amax() + 2.0**-126 + (x.double().abs() - cut)


def bound_of(name):
    return lambda x: bound(name, x)


# 0


@each_codec
def test_a_codec_is_a_frozen_value(name):
    check.check_frozen(lambda: codec(name))


# 1


@each_codec
@few
@given(data=st.data())
def test_decoded_values_are_finite_and_within_the_stated_bound(name, data):
    c = codec(name)
    count = data.draw(st.sampled_from(check.sizes(c)) | st.integers(0, 300))
    check.check_bound(c, check.example(data.draw(KINDS), count, data.draw(SEEDS)), bound_of(name))


@each_codec
def test_every_kind_of_values_and_every_size_round_trips(name):
    check.check_every_kind(codec(name), bound_of(name))


# 2


@each_codec
def test_encode_appends_and_stays_within_max_bytes(name):
    check.check_length(codec(name))


# 3


@both_versions
@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_never_sent(name, bad):
    check.check_only_finite(codec(name), bad)


@each_codec
@pytest.mark.parametrize(
    "x", [torch.zeros(2, 2), torch.zeros(4).double(), torch.zeros(4).int(), torch.tensor(1.0)]
)
def test_only_flat_float32_is_taken(name, x):
    check.check_only_flat(codec(name), x)


@each_codec
def test_zeros_and_nothing_round_trip_exactly(name):
    check.check_zeros(codec(name))


# 4


@both_versions
@each_codec
@few
@given(data=st.data())
def test_any_bytes_at_all_decode_to_finite_values_or_are_refused(name, data):
    c = codec(name)
    count = data.draw(st.sampled_from([0, 1, 2, 3, 9, 10, 11, 64, 65, 256, 257]))
    payload = bytearray(check.encoded(c, check.example(data.draw(KINDS), count)))
    if data.draw(st.booleans()):
        for _ in range(data.draw(st.integers(1, 3)) if payload else 0):
            payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    else:
        payload = data.draw(
            st.binary(min_size=len(payload), max_size=len(payload)) | st.binary(max_size=50)
        )
    check.check_bytes(c, payload, count)


@each_codec
def test_the_bytes_that_an_author_is_shown_are_refused_too(name):
    check.check_hostile_bytes(codec(name))


@both_versions
@each_codec
def test_every_truncation_and_extension_is_refused(name):
    check.check_cut_and_extended(codec(name))


@each_codec
def test_decode_takes_little_memory(name):
    dense = name.startswith("ecsq") or (name.startswith("topk") and name not in CODECS)
    check.check_memory(codec(name), 16 if dense else 4)  # so dense that positions weigh most


@both_versions
@each_codec
def test_a_payload_of_the_wrong_length_is_refused_before_memory_is_taken(name):
    check.check_refused_before_memory(codec(name))


# 5


@each_codec
def test_encode_and_decode_are_pure(name):
    check.check_pure(lambda: codec(name))


# 6


# its step is of all it is given
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("ecsq")])
def test_shards_cut_at_granules_decode_as_the_whole_does(name):
    check.check_cut_at_granules(codec(name))


# the laws bite


@dataclass(frozen=True, slots=True)
class Whole:
    """A codec that keeps every law: the values as they are. Each one below breaks one law."""

    name: ClassVar[str] = "whole"
    biased: ClassVar[bool] = False

    def granule(self, shape):
        return 1

    def max_bytes(self, count):
        return 4 * count

    def encode(self, x, ctx, out):
        return append(out, require_finite(x))

    def decode(self, payload, ctx, out):
        require_length(payload, 4 * len(out), "whole")
        values = values_at(payload, 0, len(out), torch.float32)
        if not bool(torch.isfinite(values).all()):
            raise CorruptPayload("NaN or infinity")
        out.copy_(values)

    def bound(self, x):
        return torch.zeros(len(x), dtype=torch.float64)


class Loose(Whole):
    """Without slots, so that anything can be stored in it."""


class Coarse(Whole):
    """Drops the lower half of each value."""

    __slots__ = ()

    def encode(self, x, ctx, out):
        return append(out, (require_finite(x).view(torch.int32) & -65536).view(torch.float32))


class Long(Whole):
    """Claims to write less than it does."""

    __slots__ = ()

    def max_bytes(self, count):
        return 3 * count


class Miscounting(Whole):
    """Returns the length of the whole buffer."""

    __slots__ = ()

    def encode(self, x, ctx, out):
        append(out, require_finite(x))
        return len(out)


class Careless(Whole):
    """Sends values that are not finite."""

    __slots__ = ()

    def encode(self, x, ctx, out):
        return append(out, x)


class Patient(Whole):
    """Accepts one byte too many."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        Whole.decode(self, memoryview(payload)[: 4 * len(out)], ctx, out)


class Trusting(Whole):
    """Decodes to NaN where the payload has one."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        require_length(payload, 4 * len(out), "trusting")
        out.copy_(values_at(payload, 0, len(out), torch.float32))


class Hasty(Whole):
    """Writes before it checks."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        require_length(payload, 4 * len(out), "hasty")
        out.copy_(values_at(payload, 0, len(out), torch.float32))
        if not bool(torch.isfinite(out).all()):
            raise CorruptPayload("NaN or infinity")


class Crashing(Whole):
    """Lets numpy fail on a payload that is too short."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        out.copy_(torch.from_numpy(np.nan_to_num(np.frombuffer(payload, "<f4"))))


class Greedy(Whole):
    """Makes eight copies first."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        require_length(payload, 4 * len(out), "greedy")
        Whole.decode(self, payload, ctx, out.repeat(8)[: len(out)])
        Whole.decode(self, payload, ctx, out)


class Early(Whole):
    """Allocates memory before it checks the length."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        Whole.decode(self, payload, ctx, room := torch.empty_like(out))
        out.copy_(room)


class Scratching(Whole):
    """Works in its caller's tensor."""

    __slots__ = ()

    def encode(self, x, ctx, out):
        return append(out, require_finite(x.abs_()))


class Uncuttable(Whole):
    """Claims that it may be cut anywhere, but keeps only the first three values of a shard."""

    __slots__ = ()

    def decode(self, payload, ctx, out):
        Whole.decode(self, payload, ctx, out)
        out[3:] = 0.0

    def bound(self, x):
        return x.abs().double()


WRONG = [
    (Loose, 0, "has a __dict__"),
    (Coarse, 1, "more than the bound allows"),
    (Long, 2, "`max_bytes` allows 3"),
    (Miscounting, 2, "returned 6 and wrote 0"),
    (Careless, 3, "nan at place 0 of 1 was encoded"),
    (Patient, 4, "were accepted; require_length"),
    (Trusting, 4, "hold NaN or infinity"),
    (Hasty, 4, "left a trace"),
    (Crashing, 4, "and only `CorruptPayload` is caught"),
    (Greedy, 4, "bytes were taken in tensors"),
    (Early, 4, "were taken before they were refused"),
    (Scratching, 5, "has changed its tensor"),
    (Uncuttable, 6, "decode to other values"),
]


def test_a_codec_that_keeps_every_law_passes():
    check_codec(Whole)


@pytest.mark.parametrize(("wrong", "law", "seen"), WRONG)
def test_a_codec_that_breaks_a_law_is_refused_with_its_number(wrong, law, seen):
    with pytest.raises(CodecLawBroken, match=f"codec law {law} is broken") as refused:
        check_codec(wrong)
    assert refused.value.law == law
    assert seen in refused.value.counterexample


def test_each_law_has_a_codec_that_breaks_it():
    assert {law for _, law, _ in WRONG} == set(check.LAWS)


def test_a_codec_that_cannot_read_itself_breaks_the_first_law():
    class Unreadable(Whole):
        __slots__ = ()

        def decode(self, payload, ctx, out):
            raise IndexError("no such byte")

    with pytest.raises(
        CodecLawBroken,
        match=r"codec law 1 .* 0 finite values do not round-trip: IndexError\('no such byte",
    ):
        check_codec(Unreadable)


def test_a_bound_that_is_handed_in_comes_before_the_codecs_own():
    check_codec(Coarse, bound=lambda x: x.abs().double() * 2.0**-7 + 2.0**-133)
