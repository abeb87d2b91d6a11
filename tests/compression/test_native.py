"""The compiled kernel compared with torch alone, to the bit, for every instruction set that this
machine has."""

import importlib
import inspect
import math
import shutil
import struct
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from farflock.compression import native
from farflock.compression.catalog import codec
from farflock.compression.codec import Context, CorruptPayload, UnencodableTensor
from farflock.compression.payload import largest

KERNELS = native.kernels()
NAMES = [
    "fp32",
    "fp16",
    "bf16",
    "int8",
    "int8:1",
    "int8:7",
    "int8:65536",
    "int4",
    "int4:2",
    "int4:6",
    "int4:2048",
]
NAMES += [
    "topk:64/4096",
    "topk:3/10",
    "topk:1/2",
    "topk:5/4095",
    "topk:8/17",
    "topk:2000/4096",
    "topk:1/65536",
]
NAMES += ["fp4", "fp4:2", "fp4:6", "fp4:2048", "sign", "sign:1", "sign:7", "sign:12", "sign:65536"]
NAMES += ["topk2:64/4096", "topk2:3/10", "topk2:1/2", "topk2:8/17", "topk2:65/4095"]
NAMES += ["topk2:2000/4096", "topk2:1/65536"]
NAMES += ["ecsq:100", "ecsq:98", "ecsq:1", "ecsq:31", "ecsq:250"]
LISTS = [name for name in NAMES if name.startswith(("topk2", "ecsq"))]
KINDS = (
    "usual",
    "any",
    "huge",
    "denormal",
    "tiny",
    "half",
    "ties",
    "rare",
    "zeros",
    "minus_zeros",
    "largest",
)

each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.instructions)
each_codec = pytest.mark.parametrize("name", NAMES)
many = settings(
    max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def numbers(name):
    """The kernel's codec, block and chunk for a name of the catalogue."""
    kind, _, shape = name.partition(":")
    usual = {"int4": (64, 0), **dict.fromkeys(("int8", "fp4", "sign"), (256, 0))}.get(kind, (0, 0))
    given = tuple(int(number) for number in shape.split("/") if number)
    return kind, *(given + usual[len(given) :])


def payload_by(kernel, name, x):
    """The payload, by the kernel or, for None, by torch; or "refused"."""
    out = bytearray(b"before")
    if kernel:
        kind, *shape = numbers(name)
        return out[6:] if kernel.encode(kind, x, out, *shape) else refused(out == b"before")
    try:
        with native.using(None):
            codec(name).encode(x, Context(), out)
    except UnencodableTensor:
        return refused(out == b"before")
    return out[6:]


def bits_by(kernel, name, payload, count):
    """The decoded bits, or "refused"; nothing is written then."""
    out = torch.full((count + 2,), 7.5)
    into = out[1 : count + 1]
    if kernel:
        kind, *shape = numbers(name)
        good = kernel.decode(kind, payload, into, *shape)
    else:
        try:
            with native.using(None):
                codec(name).decode(payload, Context(), into)
            good = True
        except CorruptPayload:
            good = False
    assert (out[0], out[-1]) == (7.5, 7.5), "written beside the tensor"
    return into.view(torch.int32).tolist() if good else refused(bool((into == 7.5).all()))


def refused(untouched):
    assert untouched, "a refusal left a trace"
    return "refused"


@contextmanager
def without_kernel(monkeypatch):
    """Import as on a machine on which no kernel was built."""

    def fail(name):
        raise ImportError(name)

    with monkeypatch.context() as patched:
        patched.setattr(importlib, "import_module", fail)
        yield


@each_kernel
@many
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_payloads_and_values_have_the_bits_of_torch(values, kernel, name, data):
    granule = codec(name).granule((4096,))
    count = data.draw(
        st.integers(0, 300) | st.sampled_from([granule - 1, granule, granule + 1, 2 * granule + 3])
    )
    offset = data.draw(st.integers(0, 9))
    x = values(
        data.draw(st.sampled_from(KINDS)), offset + count, data.draw(st.integers(0, 2**32 - 1))
    )[offset:]
    payload = payload_by(kernel, name, x)
    assert payload == payload_by(None, name, x)
    unaligned = memoryview(b"\x00" * offset + payload)[offset:]
    assert bits_by(kernel, name, unaligned, count) == bits_by(None, name, payload, count)


@each_kernel
@each_codec
def test_every_kind_of_values_has_the_bits_of_torch_at_several_blocks(values, kernel, name):
    for kind in KINDS:
        for count in (1, 4096, 10_001):
            x = values(kind, count, seed=count)
            payload = payload_by(kernel, name, x)
            assert payload == payload_by(None, name, x), kind
            assert bits_by(kernel, name, payload, count) == bits_by(None, name, payload, count), (
                kind
            )


@each_kernel
@pytest.mark.parametrize("name", ["topk:64/4096", "topk:3/10", "topk2:64/4096", "topk2:8/17"])
def test_the_largest_are_found_where_chunks_differ_in_size(values, kernel, name):
    chunk = codec(name).granule((4096,))
    for factors in ([1, 1.03, 0.97, 1], [1, 1e-3, 1e3, 1], [1, 0, 1, 0], [1e-38, 1, 1e30, 1e-38]):
        scale = torch.tensor(factors).repeat_interleave(chunk)
        for kind in ("usual", "ties", "rare"):
            x = values(kind, 4 * chunk + 5, 7)
            x[: 4 * chunk] *= scale
            assert payload_by(kernel, name, x) == payload_by(None, name, x)


@each_kernel
@pytest.mark.parametrize("name", ["int8", "int4", "topk:64/4096"])
def test_values_between_two_codes_round_as_torch_rounds_them(kernel, name):
    top = 7 if name == "int4" else 127
    halves = (torch.arange(-2 * top, 2 * top + 1, dtype=torch.float32) / 2).repeat(40)
    for scale in (1.0, 0.1, 3e-5, 2.0**-126, 2.0**100):
        nudged = (
            torch.cat(
                (halves, torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1))
            )
            * scale
        )
        assert payload_by(kernel, name, nudged) == payload_by(None, name, nudged)


@each_kernel
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_halves_are_rounded_as_torch_rounds_them_near_every_pattern(kernel, name):
    high = torch.arange(2**16, dtype=torch.int64)
    lows = torch.tensor(
        [
            0,
            1,
            0x0FFF,
            0x1000,
            0x1001,
            0x2FFF,
            0x3000,
            0x3001,
            0x7FFF,
            0x8000,
            0x8001,
            0xEFFF,
            0xF000,
            0xFFFF,
        ]
    )
    bits = (high[:, None] << 16 | lows).view(-1)
    finite = bits[(bits >> 23) % 256 != 255]
    x = (finite - (finite >> 31 << 32)).to(torch.int32).view(torch.float32)
    assert payload_by(kernel, name, x) == payload_by(None, name, x)


@each_kernel
@pytest.mark.parametrize(("name", "infinity"), [("fp16", 0x7C00), ("bf16", 0x7F80)])
def test_every_half_is_widened_as_torch_widens_it(kernel, name, infinity):
    payload = b"".join(
        struct.pack("<H", half) for half in range(2**16) if half & infinity != infinity
    )
    assert bits_by(kernel, name, payload, len(payload) // 2) == bits_by(
        None, name, payload, len(payload) // 2
    )


@each_kernel
@each_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_refused_wherever_it_stands(values, kernel, name, bad):
    for count in (1, 2, 33, 1025, 4099):
        for at in {0, count // 2, count - 1}:
            x = values("any", count)
            x[at] = bad
            assert payload_by(kernel, name, x) == "refused"


@each_kernel
@many
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_what_torch_refuses_to_decode_the_kernel_refuses_and_nothing_else(
    values, kernel, name, data
):
    count = data.draw(st.sampled_from([0, 1, 2, 3, 9, 10, 11, 12, 65, 257]))
    payload = payload_by(None, name, values(data.draw(st.sampled_from(KINDS)), count))
    for _ in range(data.draw(st.integers(1, 3)) if payload else 0):
        payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    payload = payload[: data.draw(st.none() | st.integers(0, len(payload)))] + data.draw(
        st.binary(max_size=2)
    )
    assert bits_by(kernel, name, payload, count) == bits_by(None, name, payload, count)


@each_kernel
@many
@given(data=st.data(), name=st.sampled_from(LISTS), seed=st.integers(0, 2**32 - 1))
def test_long_lists_with_wrong_bytes_are_refused_or_decoded_as_torch_does(
    values, kernel, name, data, seed
):
    count = data.draw(st.sampled_from([1000, 4099, 8192]))
    payload = payload_by(None, name, values(data.draw(st.sampled_from(KINDS)), count, seed))
    places = st.integers(0, min(40, len(payload) - 1)) | st.integers(0, len(payload) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(places)] = data.draw(st.integers(0, 255))
    assert bits_by(kernel, name, payload, count) == bits_by(None, name, payload, count)


@each_kernel
@many
@given(name=st.sampled_from(NAMES), payload=st.binary(max_size=80), count=st.integers(0, 40))
def test_any_bytes_are_decoded_as_torch_decodes_them(kernel, name, payload, count):
    fitting = payload[: codec(name).max_bytes(count)].ljust(codec(name).max_bytes(count), b"\x01")
    for each in (payload, fitting):
        assert bits_by(kernel, name, each, count) == bits_by(None, name, each, count)


@each_kernel
@given(bits=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=70))
def test_the_peak_is_the_largest_magnitude_or_nan(kernel, bits):
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    with native.using(kernel):
        found = largest(x)
    with native.using(None):
        expected = largest(x)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


@each_kernel
def test_tensors_of_another_kind_are_left_to_torch(kernel):
    for x in (
        torch.zeros(2, 2),
        torch.zeros(4).double(),
        torch.zeros(8)[::2],
        torch.zeros(4, device="meta"),
    ):
        out = bytearray(b"before")
        assert not kernel.encode("fp32", x, out)
        assert not kernel.decode("fp32", bytes(4 * x.numel()), x)
        assert kernel.peak(x) is None
        assert out == b"before"


def test_strided_values_are_encoded_as_their_copy(values):
    x, out, same = values("usual", 600), bytearray(), bytearray()
    codec("int8").encode(x[::2], Context(), out)
    codec("int8").encode(x[::2].contiguous(), Context(), same)
    assert out == same


@each_kernel
def test_a_payload_under_a_memoryview_cannot_grow_and_stays_as_it_is(values, kernel):
    out = bytearray(b"before")
    with memoryview(out), pytest.raises(BufferError):
        kernel.encode("int8", values("usual", 300), out, 256)
    assert out == b"before"


@each_kernel
@pytest.mark.parametrize(
    ("kind", "block", "chunk"),
    [
        *(("int8", 0, 0), ("int8", -1, 0), ("int8", 65537, 0), ("int4", 3, 0), ("rice", 0, 0)),
        *(("topk", 3, 5), ("topk", 0, 10), ("topk", 64, 65537), ("topk", -1, -2)),
    ],
)
def test_numbers_that_no_codec_has_are_refused(kernel, kind, block, chunk):
    with pytest.raises(ValueError, match=r"cannot run|no codec"):
        kernel.encode(kind, torch.zeros(8), bytearray(), block, chunk)
    with pytest.raises(ValueError, match=r"cannot run|no codec"):
        kernel.decode(kind, bytes(8), torch.zeros(8), block, chunk)


@each_kernel
def test_counts_that_no_tensor_has_are_refused(kernel):
    for count in (-1, 2**62):
        with pytest.raises(ValueError, match="the kernel cannot run"):
            kernel.module.encode(kernel.instructions, "fp32", 0, count, 0, 0, bytearray())


@each_kernel
def test_an_instruction_set_that_is_not_there_is_refused(kernel):
    with pytest.raises(ValueError, match="no instruction set 'mmx'"):
        native.Kernel(kernel.module, "mmx").encode("fp32", torch.zeros(4), bytearray())


ZEROS = bytes(4 * 2**20)
CALLS = {
    "encode": lambda kernel, x: kernel.encode("topk", x, bytearray(), 64, 4096),
    "decode": lambda kernel, x: kernel.decode("fp32", ZEROS, x),
    "peak": lambda kernel, x: kernel.peak(x),
    "nesterov": lambda kernel, x: kernel.nesterov(x, x, x, 0.0, 0.0),
    "scale": lambda kernel, x: kernel.scale(x, 1.0, x),
    "add_scaled": lambda kernel, x: kernel.add_scaled(x, x, 0.0),
    "subtract": lambda kernel, x: kernel.subtract(x, x, x),
}


def test_every_call_of_the_kernel_on_a_tensor_is_watched_for_the_lock():
    methods = {name for name, made in vars(native.Kernel).items() if inspect.isfunction(made)}
    assert set(CALLS) == {name for name in methods if not name.startswith("_")}


@pytest.mark.net
@each_kernel
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_threads_go_on_while_the_loops_run(values, kernel, call):
    """No thread is forced to hand over Python's lock here, so others go on only if the kernel
    releases it."""
    x, ticks, done = values("usual", 2**20), [], threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(None)
            time.sleep(0)

    other, interval = threading.Thread(target=tick), sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        other.start()
        before, tries = len(ticks), 0
        while len(ticks) == before and tries < 200:
            call(kernel, x)
            tries += 1
        after = len(ticks)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        other.join()
    assert after > before


def test_using_holds_inside_alone_and_in_this_thread_alone():
    before, seen = native.active(), []
    with native.using(None):
        assert native.active() is None
        other = threading.Thread(target=lambda: seen.append(native.active()))
        other.start()
        other.join()
    assert native.active() is before
    assert seen == [KERNELS[-1] if KERNELS else None]


def test_with_torch_alone_every_question_is_answered_no():
    with native.using(None):
        assert not native.encode("fp32", torch.zeros(4), bytearray())
        assert not native.decode("fp32", bytes(16), torch.zeros(4))
        assert native.peak(torch.zeros(4)) is None


def test_without_a_kernel_there_is_none_to_use(monkeypatch):
    with without_kernel(monkeypatch):
        assert native.kernels() == ()


def test_a_kernel_of_other_sources_is_not_used(monkeypatch):
    stale = SimpleNamespace(INTERFACE=native.INTERFACE + 1, SETS=("plain",))
    monkeypatch.setattr(importlib, "import_module", lambda name: stale)
    assert native.kernels() == ()


def test_the_plainest_instructions_come_first_and_the_fastest_are_used():
    names = [kernel.instructions for kernel in KERNELS]
    assert names == ["plain", "avx2", "avx512"][: len(names)]
    assert native.active() == (KERNELS[-1] if KERNELS else None)


def test_the_kernel_is_built_where_a_compiler_is():
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not shutil.which("cc") or not header.exists():
        pytest.skip("no C compiler with Python's headers here")
    assert KERNELS, (
        "the kernel is missing; `pip install -e .` builds it, and `-v` shows why it does not"
    )
