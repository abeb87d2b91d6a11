"""Fixtures that codec tests share: the examples of compression/check.py, and both versions of each
codec that has a compiled kernel."""

import pytest
import torch

from farflock.compression import check, native


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
    return tuple(check.KINDS)


@pytest.fixture(scope="session")
def values():
    """A function (kind, count, seed) -> flat finite float32 tensor."""
    return check.example


@pytest.fixture(scope="session")
def bits():
    """A function tensor -> its bit patterns as int32, to compare to the bit (0 is not -0)."""
    return lambda x: x.contiguous().view(torch.int32)
