"""Cuts through a state that goes on changing: what it was at one moment, without a copy of it.

A cut lists tensors as they are stored. One reader passes over them piece by piece, and whoever is
about to change them first saves what has not been read. So a cut takes memory only if the state
changes before it is read: for an eighth of it, because before more is copied, the reader is waited
for.

The bytes that are read are those of a safetensors file, so that a cut can be written to a disk or
sent to a joiner as it is. Tensors on a device stay there until their pieces are read or saved.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

PIECE_BYTES = (
    4 * 1024 * 1024
)  # saved or read at once: whoever changes the state waits for one piece
MIN_SAVED_BYTES = 16 * 1024 * 1024  # of each cut that may be copied in any case
SAVED_SHARE = 8  # part of a cut, 1 in so many, that is copied before its reader is waited for
STALL_S = 5.0  # without a piece read: the disk hangs, and all is copied after all
_HEAD_ALIGNMENT = 8
T = TypeVar("T")
# by safetensors' names, in the order of its files: wide values first
TYPES = {
    "C64": torch.complex64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {kind: name for name, kind in TYPES.items()}
_RANKS = {kind: rank for rank, kind in enumerate(TYPES.values())}


class Cut:
    """Tensors as they are at this moment. `read` is for one thread, `save` for any other."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        ordered = sorted(tensors.items(), key=lambda entry: (_RANKS[entry[1].dtype], entry[0]))
        self._flat = [(name, x.detach().contiguous().view(-1)) for name, x in ordered]
        self.head = _head(ordered)
        self.size_bytes = len(self.head) + sum(x.nbytes for _, x in self._flat)
        self._pieces = [
            (name, x[start : start + length])
            for name, x in self._flat
            for length in (PIECE_BYTES // x.itemsize,)
            for start in range(0, x.numel(), length)
        ]
        self._next = 0
        self._closed = False
        self._saved: dict[int, Tensor] = {}
        self._moved = threading.Condition()  # a piece was read

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each piece with its tensor's name, once; a piece is valid until the next."""
        buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        for number, (name, live) in enumerate(self._pieces):
            with self._moved:
                piece = self._saved.pop(number, None)
                if piece is None:
                    piece = buffer[: live.nbytes].view(live.dtype).copy_(live)
                self._next = max(self._next, number + 1)
                self._moved.notify_all()
            yield name, piece

    @property
    def saved_bytes(self) -> int:
        """The bytes that are copied and not yet read."""
        return sum(x.nbytes for x in self._saved.values())

    def save_soon(self) -> None:
        """Copy what has not been read, before it changes; if that is much, let it be read first."""
        most = max(MIN_SAVED_BYTES, self.size_bytes // SAVED_SHARE) // PIECE_BYTES
        with self._moved:
            while len(self._pieces) - (before := self._next) > most and not self._closed:
                self._moved.wait(STALL_S)
                if self._next == before:
                    break
            self.save()

    def close(self) -> None:
        """Note that nobody reads this cut any more."""
        with self._moved:
            self._closed = True
            self._next = len(self._pieces)
            self._moved.notify_all()

    def save(self) -> None:
        """Copy what has not been read, before it changes."""
        with self._moved:
            rest = range(self._next, len(self._pieces))
            self._next = len(self._pieces)
            # one region, so that all of it goes back to the system once it is read
            region = torch.empty(
                sum(self._pieces[number][1].nbytes for number in rest), dtype=torch.uint8
            )
            for number in rest:
                live = self._pieces[number][1]
                place, region = region[: live.nbytes], region[live.nbytes :]
                self._saved[number] = place.view(live.dtype).copy_(live)


class OpenCuts:
    """The cuts of one node's state that are being read."""

    def __init__(self) -> None:
        self._open: dict[Cut, bool] = {}  # with whether a local step changes it
        self._step = threading.Lock()  # held while a local step or a result changes the state

    def add(self, cut: Cut, *, stepped: bool) -> None:
        """Keep a cut as it is; `stepped`: a local step changes it, not only the result of a
        round. Such a cut is taken and added where no step is under way (`between_steps`)."""
        self._open[cut] = stepped

    @contextmanager
    def added(self, *cuts: Cut) -> Iterator[None]:
        """Drop these cuts when the block ends."""
        try:
            yield
        finally:
            for cut in cuts:
                self._open.pop(cut, None)
                cut.close()

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Save what a local step is about to change, and let it change that inside the block; in
        the thread of the step."""
        with self._step:
            self.before_step()
            yield

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Wait for the end of a local step that is under way, and let none begin inside the
        block."""
        with self._step:
            yield

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Save all that is open, and let all of the state change inside the block."""
        with self._step:
            self.before_change()
            yield

    def at_rest(self, look: Callable[[], T]) -> T | None:
        """Return what `look` returns; None, at once, if the state is being changed."""
        if not self._step.acquire(blocking=False):
            return None
        try:
            return look()
        finally:
            self._step.release()

    def before_step(self) -> None:
        """Save what a local step is about to change."""
        for cut, stepped in list(self._open.items()):
            if stepped:
                cut.save_soon()

    def before_change(self) -> None:
        """Save all that is open, as all of the state is about to change."""
        for cut in list(self._open):
            cut.save_soon()


def raw(flat: Tensor) -> memoryview:
    """Return the bytes of a flat tensor, as they are stored."""
    return flat.view(torch.uint8).numpy().data


def _head(ordered: list[tuple[str, Tensor]]) -> bytes:
    """Return the beginning of a safetensors file of these tensors, up to their values."""
    described, at = {}, 0
    for name, x in ordered:
        size = math.prod(x.shape) * x.element_size()
        described[name] = {
            "dtype": _NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = msgspec.json.encode(described)
    text += b" " * (-len(text) % _HEAD_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
