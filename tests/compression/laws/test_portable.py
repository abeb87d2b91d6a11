"""Portable arithmetic: the same bytes and the same values whatever vector instructions and denormal
mode torch uses."""

import json
import sys

import pytest
import torch
from worlds.waiting import completed

pytestmark = pytest.mark.net

SCRIPT = """
import hashlib, json, torch
from farflock.compression import native
from farflock.compression.catalog import CODECS, codec
from farflock.compression.codec import Context

def mixed(count, seed):
    h = (torch.arange(count) + seed * 1_000_003) * 2_654_435_761 & 0xFFFFFFFF
    h = ((h ^ (h >> 15)) * 2_246_822_519) & 0xFFFFFFFF
    return (h ^ (h >> 13)) & 0xFFFFFFFF

def inputs():
    for seed, count in enumerate((1, 255, 4096, 70_001)):
        bits = mixed(count, seed)
        yield (bits - 2**31).to(torch.float32) * 2.0**-45               # like a pseudo-gradient
        yield (bits % 7 - 3).to(torch.float32)                           # ties
        any_bits = torch.where((bits >> 23) % 256 == 255, bits ^ (1 << 30), bits)
        as_int32 = (any_bits - (any_bits >> 31 << 32)).to(torch.int32)
        yield as_int32.view(torch.float32)  # all exponents

def decode(name, payload, count):
    out = torch.empty(count)
    codec(name).decode(payload, Context(), out)
    return out.numpy().tobytes()

def digest(parts):
    return hashlib.sha256(b"".join(parts)).hexdigest()

def hashes(name):
    payloads = []
    for x in inputs():
        out = bytearray()
        codec(name).encode(x, Context(), out)
        payloads.append((out, len(x)))
    found = [digest(out for out, _ in payloads), digest(decode(name, *one) for one in payloads)]
    torch.set_flush_denormal(True)
    found.append(digest(decode(name, *one) for one in payloads))
    torch.set_flush_denormal(False)
    return found

def products(flush):
    # of a made-up payload: an encoder may find other factors on another machine
    codes = (mixed(4 * (96 + 512), 5) % 255 - 127).to(torch.int8)
    scales = torch.tensor([2.0**-9 / 3, 0.1, 7.7, 1e-30])
    payload = scales.numpy().tobytes() + codes.numpy().tobytes()
    out = torch.empty(96 * 512)
    torch.set_flush_denormal(flush)
    codec("lowrank:4").decode(payload, Context(columns=512), out)
    torch.set_flush_denormal(False)
    return digest([out.numpy().tobytes()])

report = {"capability": torch.backends.cpu.get_cpu_capability(), "codecs": {}, "kernels": {}}
report["products"] = [products(False), products(True)]
further = ["int8:100", "int4:6", "topk:3/10", "fp4:6", "sign:10", "topk2:3/10", "ecsq:150"]
for name in [*CODECS, *further]:
    with native.using(None):
        report["codecs"][name] = hashes(name)
    for kernel in native.kernels():
        with native.using(kernel):
            report["kernels"].setdefault(kernel.instructions, {})[name] = hashes(name)
print(json.dumps(report))
"""


def report(processor):
    """The JSON line of the script, run with torch and numpy limited to one level of vector
    instructions."""
    command = [sys.executable, "-c", SCRIPT]
    done = completed(command, processor.run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def plain(processors):
    return report(processors("default"))


def test_bytes_and_values_are_equal_with_and_without_vector_instructions(plain, processors):
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no vector instructions that torch knows")
    vector = report(processors("avx2"))
    assert (plain["capability"], vector["capability"]) == ("DEFAULT", "AVX2")
    assert vector["codecs"] == plain["codecs"]
    assert vector["products"] == plain["products"]


def test_flushing_denormals_does_not_change_a_decoded_bit(plain):
    for name, (_, decoded, decoded_flushed) in plain["codecs"].items():
        assert decoded == decoded_flushed, name
    assert len(set(plain["products"])) == 1


def test_every_kernel_writes_and_reads_the_same_bits_as_torch_also_while_denormals_are_flushed(
    plain,
):
    for instructions, codecs in plain["kernels"].items():
        assert codecs == plain["codecs"], instructions
