"""Tensors for codec tests: chosen by (kind, count, seed), the same on every machine and torch version."""

import numpy as np
import pytest
import torch

from farflock.compression import native


def _bits(count, seed):
    """32 well-mixed bits a value, by integers alone (the finaliser of MurmurHash3 on a counter)."""
    with np.errstate(over="ignore"):
        h = np.arange(count, dtype=np.uint32) + np.uint32(seed % 2**32 * 0x9E3779B1 % 2**32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            h = (h ^ (h >> np.uint32(shift))) * np.uint32(factor)
    return h ^ (h >> np.uint32(16))


def _exponents(low, high):
    """Values of any sign and fraction whose biased exponents lie in [low, high)."""

    def make(bits):
        exponent = np.uint32(low) + (bits >> np.uint32(8)) % np.uint32(high - low)
        return (
            (bits & np.uint32(0x80000000)) | (exponent << np.uint32(23)) | (bits * np.uint32(77) >> np.uint32(9))
        ).view("f4")

    return make


KINDS = {
    "usual": lambda bits: bits.view(np.int32) * np.float32(2.0**-41),  # uniform in about ±1e-3
    "any": _exponents(0, 255),
    "huge": _exponents(250, 255),
    "denormal": _exponents(0, 1),
    "tiny": _exponents(0, 30),
    "half": _exponents(95, 145),  # around fp16's range, both ends
    "ties": lambda bits: (bits % np.uint32(5)).astype("f4") - np.float32(2),
    "rare": lambda bits: np.where(bits % np.uint32(37) == 0, np.float32(-3.5), np.float32(0)),
    "zeros": lambda bits: np.zeros(len(bits), "f4"),
    "minus_zeros": lambda bits: np.full(len(bits), -0.0, "f4"),
    "largest": lambda bits: np.where(bits & 1, np.float32(3.4028235e38), np.float32(-3.4028235e38)),
}


@pytest.fixture(scope="module", params=["kernel", "torch"])
def version(request):
    """Runs a test twice: with the compiled kernel, and with torch alone, which is the oracle."""
    kernels = native.kernels()
    if request.param == "kernel" and not kernels:
        pytest.skip("no compiled kernel here; `pip install -e .` builds it where a C compiler is")
    with native.using(kernels[-1] if request.param == "kernel" else None):
        yield request.param


@pytest.fixture
def oracle(request):
    """torch alone, unless the test asks for both versions."""
    if "version" in request.fixturenames:
        yield
        return
    with native.using(None):
        yield


@pytest.fixture(scope="session")
def kinds():
    return tuple(KINDS)


@pytest.fixture(scope="session")
def values():
    """A function (kind, count, seed) -> flat finite float32 tensor."""

    def make(kind, count, seed=0):
        return torch.from_numpy(np.ascontiguousarray(KINDS[kind](_bits(count, seed)), dtype=np.float32))

    return make


@pytest.fixture(scope="session")
def bits():
    """A function tensor -> its bit patterns as int32, to compare to the bit (0 is not -0)."""
    return lambda x: x.contiguous().view(torch.int32)
