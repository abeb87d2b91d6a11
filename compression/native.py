"""The optional compiled kernel: the same payloads and values as the torch code, in one pass through
memory.

A codec calls the kernel first, and falls back to torch if the kernel declines. Only the torch code
says what is wrong with a tensor or a payload; it is also the oracle of the kernel's tests.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

INTERFACE = 4  # equal in module.c; a kernel built from another version's sources is not used


@dataclass(frozen=True, slots=True)
class Kernel:
    """The loops of compression/kernel/ for one instruction set. `codec` is fp32, fp16, bf16, int8,
    int4, fp4, sign, topk, topk2 or ecsq; `block` (ecsq: the rate) and `chunk` are its parameters, 0
    where it has none."""

    module: ModuleType
    instructions: str

    def encode(self, codec: str, x: Tensor, out: bytearray, block: int = 0, chunk: int = 0) -> bool:
        """Append the payload of `x` to `out`. Return False, and change nothing, unless `x` is flat,
        float32 and finite."""
        return _usual(x) and self.module.encode(
            self.instructions, codec, x.data_ptr(), x.numel(), block, chunk, out
        )

    def decode(
        self,
        codec: str,
        payload: bytes | bytearray | memoryview,
        out: Tensor,
        block: int = 0,
        chunk: int = 0,
    ) -> bool:
        """Overwrite the flat float32 tensor `out`. Return False, and change nothing, if no correct
        encoder wrote the payload."""
        return _usual(out) and self.module.decode(
            self.instructions, codec, payload, out.data_ptr(), out.numel(), block, chunk
        )

    def peak(self, x: Tensor) -> float | None:
        """Return the largest magnitude: NaN if any is, 0 if empty, None unless flat float32."""
        return self.module.peak(self.instructions, x.data_ptr(), x.numel()) if _usual(x) else None

    def nesterov(self, phi: Tensor, delta: Tensor, momentum: Tensor, lr: float, mu: float) -> bool:
        """Make an outer step in place (`elementwise.nesterov_`); False, and no change, unless all
        tensors are float32, contiguous and on the CPU. The caller has checked that the shapes are
        equal; the same holds for the three functions below."""
        good = _plain(phi, delta, momentum)
        if good:
            at = (phi.data_ptr(), delta.data_ptr(), momentum.data_ptr())
            self.module.nesterov(self.instructions, *at, phi.numel(), lr, mu)
        return good

    def scale(self, x: Tensor, factor: float, out: Tensor) -> bool:
        """Do as `elementwise.scaled_into` does."""
        good = _plain(x, out)
        if good:
            self.module.scale(self.instructions, x.data_ptr(), x.numel(), factor, out.data_ptr())
        return good

    def add_scaled(self, sum_: Tensor, x: Tensor, weight: float) -> bool:
        """Do as `elementwise.add_scaled_` does."""
        good = _plain(sum_, x)
        if good:
            self.module.add_scaled(
                self.instructions, sum_.data_ptr(), x.data_ptr(), x.numel(), weight
            )
        return good

    def subtract(self, a: Tensor, b: Tensor, out: Tensor) -> bool:
        """Do as `elementwise.subtract_into` does."""
        good = _plain(a, b, out)
        if good:
            at = (a.data_ptr(), b.data_ptr())
            self.module.subtract(self.instructions, *at, a.numel(), out.data_ptr())
        return good


def kernels() -> tuple[Kernel, ...]:
    """Return this processor's kernels, one per instruction set, the fastest last; perhaps none."""
    try:
        module = importlib.import_module("farflock.compression._kernel")
    except ImportError:
        return ()
    if module.INTERFACE != INTERFACE:
        return ()
    return tuple(Kernel(module, instructions) for instructions in module.SETS)


_ACTIVE: ContextVar[Kernel | None] = ContextVar("kernel", default=[None, *kernels()][-1])


def active() -> Kernel | None:
    """Return the kernel in use: the fastest, unless `using` has set another. None if torch does
    everything."""
    return _ACTIVE.get()


@contextmanager
def using(kernel: Kernel | None) -> Iterator[None]:
    """Make codecs use this kernel (None: torch) in this thread or task, for tests."""
    token = _ACTIVE.set(kernel)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def encode(codec: str, x: Tensor, out: bytearray, block: int = 0, chunk: int = 0) -> bool:
    """Call `Kernel.encode` of the active kernel; False if there is none."""
    kernel = _ACTIVE.get()
    return kernel is not None and kernel.encode(codec, x, out, block, chunk)


def decode(
    codec: str, payload: bytes | bytearray | memoryview, out: Tensor, block: int = 0, chunk: int = 0
) -> bool:
    """Call `Kernel.decode` of the active kernel; False if there is none."""
    kernel = _ACTIVE.get()
    return kernel is not None and kernel.decode(codec, payload, out, block, chunk)


def peak(x: Tensor) -> float | None:
    """Call `Kernel.peak` of the active kernel; None if there is none."""
    kernel = _ACTIVE.get()
    return None if kernel is None else kernel.peak(x)


def _usual(x: Tensor) -> bool:
    # Spelled out, because it is called several times for each segment.
    return x.dtype == torch.float32 and x.is_cpu and x.dim() == 1 and x.is_contiguous()


def _plain(*tensors: Tensor) -> bool:
    return all(x.dtype == torch.float32 and x.is_cpu and x.is_contiguous() for x in tensors)
