"""The device that holds a node's tensors. This is the one place that chooses it.

The device belongs to the machine: no manifest names one, and nothing on which peers must agree
depends on it.
"""

import contextlib
import gc
from dataclasses import dataclass
from typing import Literal

import torch

from farflock.node.errors import Usage
from farflock.node.machine import host_memory

Precision = Literal["bf16", "fp16", "fp32"]  # of matrix products; weights and sums are float32

KINDS = ("cuda", "mps", "xpu")  # beside cpu; ROCm's devices are named cuda too
RUNS_AHEAD = ("cuda", "xpu")
CPU = torch.device("cpu")
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# said by an error that torch does not raise as its OutOfMemoryError
NO_ROOM = ("MPS backend out of memory", "STATUS_ALLOC_FAILED")


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine; `precision` is bf16 if it multiplies that natively, else fp16. On
    a CPU it is fp32, unless the run asks for another."""

    place: torch.device = CPU
    name: str = "the CPU"
    precision: Precision = "fp32"

    @property
    def has_fused_adamw(self) -> bool:
        """True if torch takes a step of AdamW in one kernel there; the CPU's has other bits than
        its plain one, which runs are resumed with."""
        return self.place.type in (*KINDS, torch._C._get_privateuse1_backend_name())

    @property
    def has_float64(self) -> bool:
        """True if it computes in float64, which some methods and codecs need; Apple's GPUs and some
        of Intel's do not."""
        return _has_float64(self.place)

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of its memory."""
        return memory_of(self.place)

    @property
    def runs_ahead(self) -> bool:
        """True if it computes on after it was asked, so that this machine can do something else
        before it reads the results."""
        return self.place.type in RUNS_AHEAD

    def bring(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor on this device. One of the CPU is copied from pinned memory where the
        device runs ahead, so that nothing waits for the copy."""
        if self.runs_ahead and x.is_cpu:
            x = x.pin_memory()
        return x.to(self.place, non_blocking=True)

    def wait(self) -> None:
        """Wait until its work is done."""
        torch.get_device_module(self.place).synchronize()

    def begin_peak(self) -> int:
        """Forget the most bytes that tensors took, and return those that they take now."""
        module = torch.get_device_module(self.place)
        module.reset_peak_memory_stats()
        return int(module.memory_allocated())

    def peak_bytes(self) -> int:
        """Return the most bytes that tensors took since `begin_peak`."""
        return int(torch.get_device_module(self.place).max_memory_allocated())

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Let matrix products run in `precision` while the block runs."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.place.type, dtype=TYPES[self.precision])

    def release(self) -> None:
        """Give back the memory of tensors that ended, which torch keeps for later ones."""
        gc.collect()  # a failed pass leaves cycles of graphs and frames
        empty = getattr(torch.get_device_module(self.place), "empty_cache", None)
        if self.place.type != "cpu" and empty is not None:
            empty()

    def __str__(self) -> str:
        """Return what a volunteer reads, such as "NVIDIA RTX 3060, 11.2 of 12.0 GB free, bf16"."""
        free, total = (size / 1e9 for size in self.memory())
        return f"{self.name}, {free:.1f} of {total:.1f} GB free, {self.precision}"


def choose(wanted: str = "auto", local_rank: int | None = None) -> Device:
    """Return the device of this name, or for "auto" the best that torch finds here. Of several
    processes of one peer, each takes the one of its `local_rank`.

    Raise `Usage` if this machine, or this build of torch, has none of that name."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto":
        return _described(_ranked(CPU if found is None else found, local_rank))
    try:
        place = torch.device(wanted)
    except RuntimeError:
        raise Usage(
            f"--device {wanted[:64]}",
            "that is not a device's name",
            f"choose auto, cpu, {', '.join(KINDS)}, or cuda:1 for the second of several",
        ) from None
    if place == CPU:
        return _described(place)
    if found is None or found.type != place.type:
        here = "only a CPU" if found is None else f"a device of type {found.type}"
        raise Usage(
            f"--device {wanted}",
            f"torch {torch.__version__} finds {here} here",
            "install the build of torch for this device and its driver, or choose auto",
        )
    place = _ranked(place, local_rank)
    count = torch.accelerator.device_count()
    if (place.index or 0) >= count:
        raise Usage(
            f"--device {wanted}",
            f"this machine has {count} of them, counted from 0",
            f"choose {place.type}:{count - 1} or below",
        )
    return _described(place)


def require_outer(device: Device, *, alone: bool = True) -> None:
    """Raise `Usage` unless this device can keep a method's state and compute with it."""
    if why := lacks_for_outer(device, alone=alone):
        raise Usage("--outer device", why, "choose --outer host, or auto")


def lacks_for_outer(device: Device, *, alone: bool) -> str:
    """Return why this device cannot keep a method's state and compute with it, or ""; of several
    processes of one peer, none holds the whole model."""
    if device.place.type == "cpu":
        return "this peer trains on the CPU, whose memory is the host's"
    if not device.has_float64:
        return f"{device.name} has no float64, in which some methods and codecs compute"
    if not alone:
        return "several processes are this peer, and its first keeps the state on the host"
    return ""


def _ranked(place: torch.device, local_rank: int | None) -> torch.device:
    """Return the device of this kind that belongs to a process."""
    if place.type == "cpu" or local_rank is None:
        return place
    count = torch.accelerator.device_count()
    if place.index is not None:
        raise Usage(
            f"--device {place}",
            "each of several processes takes a device of its own",
            f"choose auto or {place.type}, and hide others with CUDA_VISIBLE_DEVICES",
        )
    if local_rank >= count:
        raise Usage(
            f"process {local_rank} of this peer finds no device",
            f"this machine has {count} of type {place.type}",
            f"start {count} processes with --nproc-per-node, or choose --device cpu",
        )
    return torch.device(place.type, local_rank)


def memory_of(place: torch.device) -> tuple[int, int]:
    """Return the free and the total bytes of a device's memory."""
    if place.type == "cpu":
        return host_memory()
    if place.type == "mps":  # its memory is the machine's
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    free, total = torch.get_device_module(place).mem_get_info(place)
    return int(free), int(total)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device had no room for a tensor or for a library's own memory."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_ROOM)
    return isinstance(error, torch.OutOfMemoryError) or said


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, or as it is on a device that does not compute in it."""
    return x.double() if _has_float64(x.device) else x


def _has_float64(place: torch.device) -> bool:
    if place.type == "xpu":
        return bool(torch.xpu.get_device_capability(place)["has_fp64"])
    return place.type != "mps"


def _described(place: torch.device) -> Device:
    if place.type == "cpu":
        return Device()
    module = torch.get_device_module(place)
    if place.type == "mps":
        return Device(place, "Apple's GPU", "bf16" if _multiplies_bf16(place) else "fp16")
    native = module.is_bf16_supported(including_emulation=False)
    return Device(place, module.get_device_name(place), "bf16" if native else "fp16")


def _multiplies_bf16(place: torch.device) -> bool:
    try:
        one = torch.ones(1, 1, device=place, dtype=torch.bfloat16)
        return bool((one @ one).item() == 1)
    except (RuntimeError, TypeError):
        return False
