"""A device in this machine's memory: torch's PrivateUse1, whose operators run on the CPU.

CI machines have no accelerator, so roles train on this one. It has a memory of its own size, raises
when that is full, refuses to mix with CPU tensors, and counts what is copied to it and from it.
Its tensors' storages have no address; the values of each lie in a storage on the CPU.

It needs torch 2.13, whose interface for this is experimental. What it does not cover: streams and
events (all work is done when a call returns), kernels of its own (so results are the CPU's, bit for
bit), torch.compile, more than one device, and operators with `out=` that change a size.
"""

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.backend_registration import (
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

from farflock.compression.elementwise import root

NAME = "card"
GIB = 2**30


class OutOfMemory(torch.OutOfMemoryError):
    """The card has no room for a tensor."""


@dataclass
class Card:
    """The card's memory and counters."""

    capacity_bytes: int = GIB
    used_bytes: int = 0
    peak_bytes: int = 0
    to_card_bytes: int = 0
    from_card_bytes: int = 0
    largest_from_card_bytes: int = 0
    has_bf16: bool = True
    reciprocal: bool = False  # divides by a number as CUDA does: multiplies by 1 over it
    plugged: bool = False  # torch never forgets a device, but can be told that it is gone
    waits: int = 0  # values that Python asked for, one by one
    _values: dict[int, tuple[StorageWeakRef, torch.UntypedStorage, int]] = field(
        default_factory=dict
    )
    _plug_ins: int = 0  # what was left from before the last one takes no room
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def store(self, made: Tensor, values: torch.UntypedStorage) -> None:
        """Keep the values of a new tensor's storage until that ends."""
        size = values.nbytes()
        if self.used_bytes + size > min(self.peak_bytes, self.capacity_bytes):
            self.sweep()
        if self.used_bytes + size > self.capacity_bytes:
            raise OutOfMemory(
                f"card out of memory: tried to allocate {size:,} bytes, "
                f"{self.capacity_bytes - self.used_bytes:,} of {self.capacity_bytes:,} are free"
            )
        with self._lock:
            self._forget(key_of(made))
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            there = StorageWeakRef(made.untyped_storage())
            self._values[key_of(made)] = (there, values, self._plug_ins)

    def _forget(self, key: int) -> None:
        """Free what an ended storage of this key held; a new one has the same."""
        _, values, since = self._values.pop(key, (None, None, 0))
        if values is not None and since == self._plug_ins:
            self.used_bytes -= values.nbytes()

    def find(self, tensor: Tensor) -> torch.UntypedStorage:
        """Return the values of a tensor's storage."""
        return self._values[key_of(tensor)][1]

    def sweep(self) -> None:
        """Free what tensors that ended held."""
        with self._lock:  # a new storage may have the key of one that has just ended
            for key in [key for key, (there, *_) in self._values.items() if there.expired()]:
                self._forget(key)

    def leave_free(self, size: int) -> None:
        """Let this many bytes be free. What only garbage still holds ends first: the collector
        would free it at a moment that depends on the tests before this one."""
        gc.collect()
        self.reset_counters()
        self.capacity_bytes = self.used_bytes + size

    def plug_in(self) -> torch.device:
        """Let torch find the card, empty: what earlier tests left to the garbage collector is not
        counted, since the moment of its end depends on them."""
        self._plug_ins += 1
        self.used_bytes = 0
        self.reset_counters()
        self.plugged = True
        return torch.device(NAME)

    def unplug(self) -> None:
        """Take the card out of the machine, and set it to what it was."""
        self.plugged, self.has_bf16, self.capacity_bytes = False, True, GIB
        self.reciprocal = False
        self.reset_counters()

    def reset_counters(self) -> None:
        """Begin to count anew."""
        self.sweep()
        self.peak_bytes = self.used_bytes
        self.to_card_bytes = self.from_card_bytes = self.largest_from_card_bytes = self.waits = 0


CARD = Card()


def probabilities_bytes(plan: Any, sequences: int) -> int:
    """Return what attention keeps of a step's passes on the card, where it is not fused."""
    model = plan.model
    return 4 * 3 * model.layers * model.heads * sequences * plan.seq**2


aten = torch.ops.aten
CPU = torch.device("cpu")
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
READ_ONE = torch.ops.aten._local_scalar_dense.default
ROOTS = (aten.sqrt.default, aten.sqrt.out)
SET_STORAGE = aten.set_.source_Storage_storage_offset
# A boxed call turns a whole number's tensor into the number, which these do not take.
WITHOUT_NUMBERS = {
    getattr(getattr(aten, name), overload)
    for name in ("bitwise_and", "bitwise_or", "remainder")
    for overload in ("Tensor", "Tensor_out")
}
DIVISIONS = {
    aten.div.Tensor: aten.mul.Tensor,
    aten.div_.Tensor: aten.mul_.Tensor,
    aten.div.out: aten.mul.out,
}
PLAIN = frozenset({type(None), bool, int, float, torch.dtype})  # what no device changes
# These make a tensor and then let an operator with `out=` give it its size.
SIZED_LATE = (
    "abs",
    "arange",
    "arange.start",
    "arange.start_step",
    "linspace",
    "eye",
    "eye.m",
    "randperm",
    "randperm.generator",
    "linalg_lstsq",
)


class Module:
    """What torch asks of a device's module, `torch.card`."""

    def is_initialized(self) -> bool:
        """Return True: there is nothing to set up."""
        return True

    def is_available(self) -> bool:
        """Return whether the card is plugged in."""
        return CARD.plugged

    def device_count(self) -> int:
        """Return 1, or 0 once the card is gone."""
        return int(CARD.plugged)

    def current_device(self) -> int:
        """Return 0."""
        return 0

    def set_device(self, device: object) -> None:
        """Do nothing: there is one card."""

    def synchronize(self, device: object = None) -> None:
        """Count a wait for all of the card's work."""
        CARD.waits += 1

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """Return free and total bytes."""
        CARD.sweep()
        return CARD.capacity_bytes - CARD.used_bytes, CARD.capacity_bytes

    def empty_cache(self) -> None:
        """Free what tensors that ended held."""
        CARD.sweep()

    def memory_allocated(self) -> int:
        """Return the bytes of tensors that there are."""
        CARD.sweep()
        return CARD.used_bytes

    def max_memory_allocated(self) -> int:
        """Return the most bytes that there were."""
        return CARD.peak_bytes

    def reset_peak_memory_stats(self) -> None:
        """Begin to measure the most bytes anew."""
        CARD.sweep()
        CARD.peak_bytes = CARD.used_bytes

    def get_device_name(self, device: object = None) -> str:
        """Return a name as a vendor gives one."""
        return "Double Card"

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """Return whether matrix products run in bf16."""
        return CARD.has_bf16

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that autocast may choose."""
        return [torch.float16, torch.bfloat16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the card draws no numbers."""

    def get_rng_state(self, device: object = None) -> Tensor:
        """Return an empty state: the card draws no numbers."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        """Do nothing: the card draws no numbers."""


def is_on_card(x: object) -> bool:
    """Return whether this is a tensor on the card."""
    return isinstance(x, Tensor) and x.device.type == NAME


def key_of(x: Tensor) -> int:
    """Return what names a tensor's storage for as long as that lives."""
    return x.untyped_storage()._cdata


def host(x: Tensor) -> Tensor:
    """Return a card's tensor as the CPU sees it, with the same memory."""
    seen = torch.empty(0, dtype=x.dtype)
    return seen.set_(CARD.find(x), x.storage_offset(), x.shape, x.stride())


def on_card(values: Tensor) -> Tensor:
    """Return a new tensor on the card with these values, which it takes over."""
    whole = values.untyped_storage().nbytes() == values.numel() * values.element_size()
    if not whole or values.storage_offset():
        values = values.clone()
    # A new tensor's storage has no bytes, and views check their bounds: it gets one that has.
    there = torch._C._construct_storage_from_data_pointer(0, torch.device(NAME, 0), values.nbytes)
    made = torch._C._acc.create_empty_tensor((0,), values.dtype)
    place = (values.storage_offset(), values.shape, values.stride())
    SET_STORAGE.redispatch(ON_CPU, made, there, *place)
    CARD.store(made, values.untyped_storage())
    return made


def mapped(change: Callable[[Any], Any], given: Any) -> Any:
    """Change each value of what an operator takes or returns: torch's own maps of trees take
    longer than the operators of small models."""
    if type(given) in PLAIN:
        return given
    if isinstance(given, list | tuple):
        return type(given)([mapped(change, x) for x in given])
    return change(given)


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on the CPU: its results are views of the card's tensors where they would be,
    and new tensors on the card otherwise."""
    seen: list[tuple[Tensor, Tensor]] = []

    def enter(x: object) -> object:
        if isinstance(x, Tensor):
            if is_on_card(x):
                seen.append((x, host(x)))
                return seen[-1][1]
            if x.dim():
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {op} got one of shape"
                    f" {tuple(x.shape)} on the CPU and others on the card"
                )
        if isinstance(x, torch.Generator):
            raise RuntimeError(f"Expected a generator of the card for {op}, got the CPU's")
        return CPU if isinstance(x, torch.device) else x

    if op in WITHOUT_NUMBERS:
        args = tuple(torch.tensor(x) if isinstance(x, int) else x for x in args)
    given = args
    args = mapped(enter, args)
    kwargs = {name: mapped(enter, x) for name, x in kwargs.items()}
    if op is READ_ONE:
        CARD.waits += 1
        CARD.from_card_bytes += seen[0][0].element_size()
    shapes = [values.shape for _, values in seen]
    if CARD.reciprocal and op in DIVISIONS and not is_on_card(given[1]):
        op, args = DIVISIONS[op], (args[0], 1 / torch.as_tensor(args[1], dtype=torch.float32))
    results = op(*args, **kwargs)
    if op in ROOTS:  # correctly rounded, as CUDA's; the CPU's need not be
        results.copy_(root(args[0]))
    if shapes != [values.shape for _, values in seen]:
        raise NotImplementedError(f"the card has no kernel for {op}, which changes a size")
    return mapped(lambda x: _leave(x, seen) if isinstance(x, Tensor) else x, results)


def _leave(result: Tensor, seen: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    for there, values in seen:
        if result is values:
            return there
    for there, values in seen:
        if key_of(result) == key_of(values):
            view = aten.alias.default(there)
            return view.as_strided_(result.shape, result.stride(), result.storage_offset())
    return on_card(result)


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values, and count those that cross between host and card."""
    size = source.numel() * source.element_size()
    if not is_on_card(source):
        CARD.to_card_bytes += size
        host(target).copy_(source)
    elif is_on_card(target):
        host(target).copy_(host(source))
    else:
        CARD.from_card_bytes += size
        CARD.largest_from_card_bytes = max(CARD.largest_from_card_bytes, size)
        target.copy_(host(source))
    return target


def _made(name: str) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    return lambda *args, **kwargs: run(op, *args, **kwargs)


# Products run in the smaller type, losses and norms in float32, as on other devices.
LOWER = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention")
HIGHER = ("cross_entropy_loss", "nll_loss", "log_softmax.int", "softmax.int", "sum", "norm.Scalar")


def _cast(name: str, wanted: torch.dtype | None) -> Any:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet), overload or "default")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(*args: Any, **kwargs: Any) -> Any:
        dtype = wanted or torch.get_autocast_dtype(NAME)

        def lower(x: object) -> object:
            return x.to(dtype) if is_on_card(x) and x.is_floating_point() else x

        with torch._C._ExcludeDispatchKeyGuard(key):
            args = mapped(lower, args)
            return op(*args, **{name: mapped(lower, x) for name, x in kwargs.items()})

    return cast


def _no_address(x: Tensor) -> int:
    if is_on_card(x):
        raise RuntimeError("a tensor on the card has no address; copy it to the CPU first")
    return ADDRESS(x)


ADDRESS = Tensor.data_ptr
_LIBRARIES: list[torch.library.Library] = []  # their operators end with them


def register() -> bool:
    """Tell torch of the card, which is not plugged in yet; return whether this torch knows how.

    This must come before the first backward pass of the process: torch's autograd counts the
    devices once. A machine with a device of its own needs no double, and torch takes only one."""
    if not torch.__version__.startswith("2.13.") or torch.accelerator.is_available():
        return False
    if not _LIBRARIES:
        _setup_privateuseone_for_python_backend(
            NAME, Module(), _DummyPrivateUse1Hook(), _DummyDeviceGuard()
        )
        every, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        every.fallback(run, "PrivateUse1")
        every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        some.impl("_copy_from", copy, "PrivateUse1")
        for name in SIZED_LATE:
            some.impl(name, _made(name), "PrivateUse1")
        for name in LOWER:
            some.impl(name, _cast(name, None), "AutocastPrivateUse1")
        for name in HIGHER:
            some.impl(name, _cast(name, torch.float32), "AutocastPrivateUse1")
        _LIBRARIES.extend((every, some))
        Tensor.data_ptr = _no_address  # type: ignore[method-assign]
    return True


def is_on_device(x):
    """Return whether this tensor is on a device beside the CPU."""
    return x.device.type != "cpu"
