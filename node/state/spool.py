"""Snapshots for joiners, written from a cut into memory or mapped files, and read back.

A snapshot is a safetensors file, cut into chunks. While joiners download it, the state goes on
changing: the file keeps what it was, and the system keeps in memory what is asked for.
"""

import logging
import math
from typing import Annotated, NamedTuple

import msgspec
import torch
from torch import Tensor

from farflock.node.errors import Failure
from farflock.node.model.replica import Storage, in_memory
from farflock.node.state.cut import TYPES, Cut, raw
from farflock.swarm.chunks import digest_of

CHUNK_BYTES = 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024 * 1024
MAX_VALUES = 2**48  # of a tensor; an empty one could have any sides
_VALUE_BYTES = 4
_LENGTH_BYTES = 8

log = logging.getLogger(__name__)


class Malformed(ValueError):
    """Bytes that are no safetensors file."""


class Spooled(NamedTuple):
    """A cut's file in chunks, with their digests."""

    chunks: tuple[memoryview, ...]
    digests: tuple[bytes, ...]


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=16)]
    data_offsets: tuple[int, int]


def spooled(cut: Cut, storage: Storage) -> Spooled:
    """Read a cut into memory of `storage`."""
    shape = (-(-cut.size_bytes // _VALUE_BYTES),)
    try:
        place = storage(shape)
    except Failure as reason:
        log.warning("a snapshot for a joiner is kept in memory: %s", reason)
        place = in_memory(shape)
    file = raw(place)[: cut.size_bytes]
    file[: len(cut.head)] = cut.head
    at = len(cut.head)
    for _, piece in cut.read():
        file[at : at + piece.nbytes] = raw(piece)
        at += piece.nbytes
    file = file.toreadonly()
    chunks = tuple(file[at : at + CHUNK_BYTES] for at in range(0, cut.size_bytes, CHUNK_BYTES))
    return Spooled(chunks, tuple(map(digest_of, chunks)))


def tensors_of(chunks: list[bytes | memoryview]) -> dict[str, Tensor]:
    """Return the tensors of a file in chunks, which leave the list as they are copied; raise
    `Malformed` unless the chunks are such a file exactly."""
    reader = _Reader(chunks)
    if reader.left_bytes < _LENGTH_BYTES:
        raise Malformed("it is too short")
    length = int.from_bytes(reader.take(_LENGTH_BYTES), "little")
    if length > min(reader.left_bytes, MAX_HEAD_BYTES):
        raise Malformed(f"its head of {length} bytes is too long")
    try:
        described = msgspec.json.decode(bytes(reader.take(length)), type=dict[str, _Described])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"its head cannot be parsed: {error}") from None
    at, tensors = 0, {}
    for name, one in sorted(described.items(), key=lambda entry: entry[1].data_offsets):
        kind = TYPES.get(one.dtype)
        size = 0 if kind is None else math.prod(one.shape) * kind.itemsize
        is_huge = math.prod(max(side, 1) for side in one.shape) > MAX_VALUES
        if (
            kind is None
            or is_huge
            or one.data_offsets != (at, at + size)
            or size > reader.left_bytes
        ):
            raise Malformed(f"it does not hold {name[:100]!r} as its head says")
        tensors[name] = reader.tensor(kind, one.shape)
        at += size
    if reader.left_bytes:
        raise Malformed(f"{reader.left_bytes} bytes more than its head says")
    return tensors


class _Reader:
    """Bytes in chunks, read from their beginning."""

    def __init__(self, chunks: list[bytes | memoryview]) -> None:
        chunks.reverse()
        self._chunks, self._at = chunks, 0  # the next one is the last
        self.left_bytes = sum(map(len, chunks))

    def tensor(self, kind: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the next bytes as a tensor in memory of its own."""
        values = torch.empty(math.prod(shape), dtype=kind)
        self._fill(raw(values))
        return values.view(shape)

    def take(self, count: int) -> bytearray:
        """Return the next bytes."""
        taken = bytearray(count)
        self._fill(memoryview(taken))
        return taken

    def _fill(self, place: memoryview) -> None:
        self.left_bytes -= len(place)
        while place:
            chunk = memoryview(self._chunks[-1])
            part = chunk[self._at : self._at + len(place)]
            place[: len(part)] = part
            place, self._at = place[len(part) :], self._at + len(part)
            if self._at == len(chunk):
                self._at = 0
                self._chunks.pop()
