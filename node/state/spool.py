"""Snapshots for joiners, written from a cut into memory or mapped files, and read back.

A snapshot is a safetensors file, cut into chunks. While joiners download it, the state goes on
changing: the file keeps what it was, and the system keeps in memory what is asked for. A joiner has
such a file too: its tensors are views of it.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from farflock.node.errors import Failure
from farflock.node.model.replica import Storage, in_memory
from farflock.node.state.cut import TYPES, Cut, raw
from farflock.swarm.chunk_store import digest_of

CHUNK_BYTES = 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024 * 1024
MAX_VALUES = 2**48  # of a tensor; an empty one could have any sides
_VALUE_BYTES = 4
_LENGTH_BYTES = 8

log = logging.getLogger(__name__)


class Malformed(ValueError):
    """Bytes that are no safetensors file."""


class Spooled(NamedTuple):
    """A cut's file, whole and in chunks, with their digests."""

    file: memoryview
    chunks: tuple[memoryview, ...]
    digests: tuple[bytes, ...]


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[int, int]


def room(size: int, storage: Storage) -> memoryview:
    """Return memory of `storage` for so many bytes; if it has none left, plain memory."""
    shape = (-(-size // _VALUE_BYTES),)
    try:
        place = storage(shape)
    except Failure as reason:
        log.warning("a snapshot for a joiner is kept in memory: %s", reason)
        place = in_memory(shape)
    return raw(place)[:size]


def spooled(cut: Cut, storage: Storage) -> Spooled:
    """Read a cut into memory of `storage`."""
    file = room(cut.size_bytes, storage)
    file[: len(cut.head)] = cut.head
    at = len(cut.head)
    for _, piece in cut.read():
        file[at : at + piece.nbytes] = raw(piece)
        at += piece.nbytes
    return _in_chunks(file)


def filled(
    shapes: Mapping[str, tuple[int, ...]], fill: Callable[[str, Tensor], None], storage: Storage
) -> Spooled:
    """Return a file of float32 tensors of these shapes in memory of `storage`; `fill` writes the
    values of each in turn."""
    kind = torch.float32
    blank = {name: torch.empty(shape, dtype=kind, device="meta") for name, shape in shapes.items()}
    cut = Cut(blank)
    file = room(cut.size_bytes, storage)
    file[: len(cut.head)] = cut.head
    for name, tensor in tensors_of(file).items():
        fill(name, tensor)
    return _in_chunks(file)


def _in_chunks(file: memoryview) -> Spooled:
    fixed = file.toreadonly()
    chunks = tuple(fixed[at : at + CHUNK_BYTES] for at in range(0, len(file), CHUNK_BYTES))
    return Spooled(file, chunks, tuple(map(digest_of, chunks)))


def tensors_of(file: memoryview) -> dict[str, Tensor]:
    """Return the tensors of a file, which are views of its bytes; raise `Malformed` unless the
    bytes are such a file exactly."""
    if len(file) < _LENGTH_BYTES:
        raise Malformed("it is too short")
    length, rest = int.from_bytes(file[:_LENGTH_BYTES], "little"), file[_LENGTH_BYTES:]
    if length > min(len(rest), MAX_HEAD_BYTES):
        raise Malformed(f"its head of {length} bytes is too long")
    try:
        described = msgspec.json.decode(rest[:length], type=dict[str, _Described])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"its head cannot be parsed: {error}") from None
    values, at, tensors = rest[length:], 0, {}
    for name, one in sorted(described.items(), key=lambda entry: entry[1].data_offsets):
        kind = TYPES.get(one.dtype)
        count = math.prod(one.shape)
        size = 0 if kind is None else count * kind.itemsize
        is_huge = math.prod(max(side, 1) for side in one.shape) > MAX_VALUES
        if (
            kind is None
            or is_huge
            or one.data_offsets != (at, at + size)
            or size > len(values) - at
            or (length + at) % kind.itemsize
        ):
            raise Malformed(f"it does not hold {name[:100]!r} as its head says")
        flat = (
            torch.frombuffer(values, dtype=kind, count=count, offset=at)
            if count
            else torch.empty(0, dtype=kind)
        )
        tensors[name] = flat.view(one.shape)
        at += size
    if at != len(values):
        raise Malformed(f"{len(values) - at} bytes more than its head says")
    return tensors
