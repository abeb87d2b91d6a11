"""The compiled kernel where it is there: the same payloads and values as the torch code, in one pass through memory.

It is optional. A codec asks here first and does the work itself if the answer is no; so the torch code stays the one
place that says what is wrong with a tensor or a payload, and the oracle of the kernel's tests.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

INTERFACE = 1  # what module.c has; a kernel that another version's sources left behind is not used


@dataclass(frozen=True, slots=True)
class Kernel:
    """The loops of compression/kernel/ for one instruction set.

    `codec` is fp32, fp16, bf16, int8, int4 or topk; `block` and `chunk` are its numbers, 0 where it has none.
    """

    module: ModuleType
    instructions: str

    def encode(self, codec: str, x: Tensor, out: bytearray, block: int = 0, chunk: int = 0) -> bool:
        """Append the payload of `x` to `out`; False, and `out` as it was, if `x` is not flat, float32 and finite."""
        return _usual(x) and self.module.encode(self.instructions, codec, x.data_ptr(), x.numel(), block, chunk, out)

    def decode(
        self, codec: str, payload: bytes | bytearray | memoryview, out: Tensor, block: int = 0, chunk: int = 0
    ) -> bool:
        """Overwrite the flat float32 tensor `out`; False, and `out` as it was, if no correct encoder wrote the payload."""
        return _usual(out) and self.module.decode(
            self.instructions, codec, payload, out.data_ptr(), out.numel(), block, chunk
        )

    def peak(self, x: Tensor) -> float | None:
        """The largest magnitude: NaN if one value is NaN, 0 if there are none; None if `x` is not flat and float32."""
        return self.module.peak(self.instructions, x.data_ptr(), x.numel()) if _usual(x) else None


def kernels() -> tuple[Kernel, ...]:
    """One for each instruction set that this processor has, the fastest last; none if no kernel was built."""
    try:
        module = importlib.import_module("farflock.compression._kernel")
    except ImportError:
        return ()
    if module.INTERFACE != INTERFACE:
        return ()
    return tuple(Kernel(module, instructions) for instructions in module.SETS)


_ACTIVE: ContextVar[Kernel | None] = ContextVar("kernel", default=[None, *kernels()][-1])


def active() -> Kernel | None:
    """The kernel that codecs use: the fastest, unless `using` said otherwise; None for torch alone."""
    return _ACTIVE.get()


@contextmanager
def using(kernel: Kernel | None) -> Iterator[None]:
    """Let codecs use this kernel, or torch alone, inside; for this thread or task. Tests and comparisons need it."""
    token = _ACTIVE.set(kernel)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def encode(codec: str, x: Tensor, out: bytearray, block: int = 0, chunk: int = 0) -> bool:
    """`Kernel.encode` of the active kernel; False if there is none."""
    kernel = _ACTIVE.get()
    return kernel is not None and kernel.encode(codec, x, out, block, chunk)


def decode(codec: str, payload: bytes | bytearray | memoryview, out: Tensor, block: int = 0, chunk: int = 0) -> bool:
    """`Kernel.decode` of the active kernel; False if there is none."""
    kernel = _ACTIVE.get()
    return kernel is not None and kernel.decode(codec, payload, out, block, chunk)


def peak(x: Tensor) -> float | None:
    """`Kernel.peak` of the active kernel; None if there is none."""
    kernel = _ACTIVE.get()
    return None if kernel is None else kernel.peak(x)


def _usual(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.dim() == 1 and x.is_cpu and x.is_contiguous()
