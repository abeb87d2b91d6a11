"""Tensors to shards and back: the cut, the payloads, and the weighted mean.

A shard is about 1 MiB of raw float32: a run of segments, each a flat range of one tensor, encoded alone. The cut is a
pure function of names, shapes and codec, so all peers make the same without a word. Payload of a shard: for each
segment its length (4 bytes, little endian) and the codec's bytes (docs/wire-format.md).
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflock.compression.codec import Codec, Context, CorruptPayload
from farflock.compression.payload import largest
from farflock.swarm.protocol.exchange.streams import CheckShard

SHARD_VALUES = 262_144
MAX_ABS = 2.0**100  # larger values are no update of anything; bounding them keeps a weighted mean finite
MAX_MEAN = MAX_ABS / 2  # what the return codec rounds up from here is still let in
MIN_WEIGHT = 2.0**-100  # a smaller total may be 0 in float32
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Segment:
    """The flat range [start, stop) of one tensor, which has so many columns (0: a vector)."""

    tensor: str
    start: int
    stop: int
    columns: int = 0

    @property
    def count(self) -> int:
        """Values in the range."""
        return self.stop - self.start


Shard = tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How a stream's tensors are cut into shards, and the codec they travel in."""

    shards: tuple[Shard, ...]
    codec: Codec
    run_seed: int

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], codec: Codec, run_seed: int = 0) -> "ShardLayout":
        """Fill shards up to `SHARD_VALUES`, cutting tensors at multiples of the codec's granule only."""
        shards: list[list[Segment]] = [[]]
        room = SHARD_VALUES
        for segment in _segments(shapes, codec):
            if segment.count > room and shards[-1]:
                shards.append([])
                room = SHARD_VALUES
            shards[-1].append(segment)
            room -= segment.count
        return cls(tuple(tuple(shard) for shard in shards), codec, run_seed)

    @property
    def max_shard_bytes(self) -> int:
        """The most bytes a correct payload of any shard can have; longer ones are refused unseen."""
        return max(sum(_LENGTH.size + self.codec.max_bytes(part.count) for part in shard) for shard in self.shards)

    def encode(self, index: int, round_number: int, tensors: Mapping[str, Tensor]) -> bytes:
        """The payload of one shard of these float32 tensors; `UnencodableTensor` if they are not finite."""
        shard = self.shards[index]
        return self.pack(
            index, round_number, [tensors[part.tensor].reshape(-1)[part.start : part.stop] for part in shard]
        )

    def pack(self, index: int, round_number: int, values: Sequence[Tensor]) -> bytes:
        """The payload of one shard from one flat tensor a segment."""
        out = bytearray()
        for segment, flat in zip(self.shards[index], values, strict=True):
            at = len(out)
            out += bytes(_LENGTH.size)
            written = self.codec.encode(flat, self._context(index, round_number, segment), out)
            _LENGTH.pack_into(out, at, written)
        return bytes(out)

    def decode(self, index: int, round_number: int, payload: bytes) -> list[Tensor]:
        """One flat tensor a segment; `CorruptPayload` for anything that no correct peer encodes."""
        values = [torch.empty(segment.count) for segment in self.shards[index]]
        self.decode_into(index, round_number, payload, values)
        return values

    def decode_into(self, index: int, round_number: int, payload: bytes, values: Sequence[Tensor]) -> None:
        """As `decode`, into flat tensors that are there; after `CorruptPayload` they hold anything."""
        view, at = memoryview(payload), 0
        for segment, out in zip(self.shards[index], values, strict=True):
            if len(view) < at + _LENGTH.size:
                raise CorruptPayload(f"shard {index} ends after {len(view)} bytes, inside {segment.tensor}")
            (length,) = _LENGTH.unpack_from(view, at)
            at += _LENGTH.size
            self.codec.decode(view[at : at + length], self._context(index, round_number, segment), out)
            if largest(out) > MAX_ABS:
                raise CorruptPayload(f"{segment.tensor} holds a value beyond {MAX_ABS:.3g}")
            at += length
        if at != len(view):
            raise CorruptPayload(f"shard {index} has {len(view)} bytes, its segments {at}")

    def _context(self, index: int, round_number: int, segment: Segment) -> Context:
        return Context(self.run_seed, round_number, segment.tensor, index, segment.columns)


def _segments(shapes: Mapping[str, tuple[int, ...]], codec: Codec) -> Iterator[Segment]:
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        granule = codec.granule(shape)
        step = max(SHARD_VALUES // granule, 1) * granule
        for start in range(0, max(count, 1), step):
            yield Segment(name, start, min(start + step, count), shape[-1] if len(shape) > 1 else 0)


def decode_all(
    cut: ShardLayout, round_number: int, payloads: Sequence[bytes], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Whole tensors from all shards of one payload."""
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    flat = {name: tensor.view(-1) for name, tensor in tensors.items()}
    for index, payload in enumerate(payloads):
        places = [flat[part.tensor][part.start : part.stop] for part in cut.shards[index]]
        cut.decode_into(index, round_number, payload, places)
    return tensors


def weighted_mean(inputs: Sequence[tuple[float, Sequence[Tensor]]]) -> list[Tensor]:
    """sum(w_i / W · x_i) in the order given, in separately rounded float32 operations (portable arithmetic)."""
    total = torch.zeros(())
    for weight, _ in inputs:
        total = total + torch.tensor(weight, dtype=torch.float32)
    mean: list[Tensor] = []
    for weight, values in inputs:
        share = torch.tensor(weight, dtype=torch.float32) / total
        scaled = [x * share for x in values]
        mean = [a.add_(b) for a, b in zip(mean, scaled, strict=True)] if mean else scaled
    return mean


def checker(cut: ShardLayout) -> CheckShard:
    """The function that says whether a shard's payload is one that a correct peer can have sent."""

    def check(round_number: int, index: int, payload: bytes) -> bool:
        try:
            cut.decode(index, round_number, payload)
        except CorruptPayload:
            return False
        return True

    return check
