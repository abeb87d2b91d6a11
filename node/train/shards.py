"""Tensors to shards and back: the layout, the payloads, and a reducer's mean of a shard.

A shard is at most about 1 MiB encoded, less in a mean of a small model, so that its members can
share the work evenly: a list of segments, each a flat range of one tensor, encoded separately. The
layout is a pure function of names, shapes and codecs, so all peers compute the same one without
communication. A shard's payload: for each segment its length (4 bytes, little endian) and the
codec's bytes (docs/wire-format.md).
"""

import bisect
import functools
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from farflock.compression import floats
from farflock.compression.codec import Codec, Context, CorruptPayload
from farflock.compression.elementwise import add_share, shares
from farflock.compression.payload import largest
from farflock.optimizers.method import TensorBlock
from farflock.optimizers.parts.blocks import LazyTensors, merged, read
from farflock.optimizers.parts.state import WrongState
from farflock.swarm.protocol.exchange.bundles import MAX_MEAN_BUNDLES
from farflock.swarm.protocol.exchange.streams import Reduction

SEGMENT_VALUES = 262_144  # 1 MiB of float32: what a peer decodes, adds and encodes at a time
SHARD_BYTES = 1024 * 1024  # encoded, in the codec of whichever direction needs more
MIN_SHARD_BYTES = 256 * 1024  # in a mean that has fewer than `MANY_SHARDS` longer ones
MANY_SHARDS = MAX_MEAN_BUNDLES // 2  # so that each of them, if cut in two, is a bundle of its own
MAX_ABS = 2.0**100  # no real update is larger; the bound keeps a weighted mean finite
MAX_MEAN = MAX_ABS / 2  # leaves room for the return codec to round up
MIN_WEIGHT = 2.0**-100  # a smaller total may be 0 in float32
_LENGTH = struct.Struct("<I")


class Segment(msgspec.Struct, frozen=True, gc=False):
    """The flat range [start, stop) of one tensor with `columns` columns (0: a vector).

    `number` counts the tensor's segments. A large model has so many that a garbage collection
    would take long to visit them."""

    tensor: str
    start: int
    stop: int
    columns: int = 0
    number: int = 0

    @property
    def count(self) -> int:
        """The number of values in the range."""
        return self.stop - self.start


Shard = tuple[Segment, ...]
Inputs = Sequence[tuple[str, float, bytes]]  # peer, weight, payload
RunInputs = Sequence[tuple[str, float, Sequence[bytes]]]  # the same, payloads of several shards
Values = list[Tensor]  # one flat tensor per segment


@dataclass(frozen=True)
class ShardLayout:
    """The cut of a stream's tensors into shards, and their codec."""

    shards: tuple[Shard, ...]
    codec: Codec
    run_seed: int

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        codec: Codec,
        run_seed: int = 0,
        back: Codec | None = None,
    ) -> "ShardLayout":
        """Cut tensors into segments at multiples of the codec's granule, and fill shards with them
        up to `SHARD_BYTES`, as encoded for the way out, or for the way `back` if that is more.

        What comes back is a mean, of which each member reduces some shards: there are many."""
        codecs = (codec,) if back is None else (codec, back)

        @functools.cache  # most segments have the same length
        def max_bytes_of(count: int) -> int:
            return max(each.max_bytes(count) for each in codecs)

        segments = [(segment, max_bytes_of(segment.count)) for segment in _segments(shapes, codec)]
        most = SHARD_BYTES
        if back is not None:
            share = sum(size for _, size in segments) // MANY_SHARDS
            most = min(max(share, MIN_SHARD_BYTES), SHARD_BYTES)
        shards: list[list[Segment]] = [[]]
        room = most
        for segment, size in segments:
            if size > room and shards[-1]:
                shards.append([])
                room = most
            shards[-1].append(segment)
            room -= size
        return cls(tuple(tuple(shard) for shard in shards), codec, run_seed)

    @functools.cached_property
    def places(self) -> Mapping[str, tuple[list[int], list[tuple[int, int]]]]:
        """For each tensor the starts of its segments, and their places: shard, and number in it."""
        found: dict[str, tuple[list[int], list[tuple[int, int]]]] = {}
        for index, shard in enumerate(self.shards):
            for number, segment in enumerate(shard):
                starts, places = found.setdefault(segment.tensor, ([], []))
                starts.append(segment.start)
                places.append((index, number))
        return found

    @functools.cached_property
    def runs(self) -> list[range]:
        """The shards in runs of small ones that are coded together (compression/floats.py)."""
        return floats.runs(self.counts) if self.shards else []

    @functools.cached_property
    def counts(self) -> list[int]:
        """The number of values in each shard."""
        return [sum(segment.count for segment in shard) for shard in self.shards]

    @property
    def max_shard_bytes(self) -> int:
        """The size of the largest correct payload of any shard; longer ones are refused unread."""
        max_bytes_of = functools.cache(self.codec.max_bytes)
        counts = ([each.count for each in shard] for shard in self.shards)
        most = (sum(_LENGTH.size + max_bytes_of(count) for count in each) for each in counts)
        return max(most, default=0)

    def max_bytes(self, codec: Codec) -> int:
        """Return the most bytes that the payloads of all shards take together in this codec."""
        max_bytes_of = functools.cache(codec.max_bytes)
        return sum(
            _LENGTH.size + max_bytes_of(each.count) for shard in self.shards for each in shard
        )

    def encode(self, index: int, round_number: int, tensors: Mapping[str, Tensor]) -> bytes:
        """Encode one shard of these float32 tensors, of which it reads one segment at a time;
        raise `UnencodableTensor` if they are not finite."""
        shard = self.shards[index]
        values = (read(tensors, TensorBlock(each.tensor, each.start, each.stop)) for each in shard)
        return self.pack(index, round_number, values)

    def encode_run(
        self, run: range, round_number: int, tensors: Mapping[str, Tensor]
    ) -> list[bytes]:
        """Encode a run of shards as `encode` does each."""
        if not self.joins(run):
            return [self.encode(index, round_number, tensors) for index in run]
        segments = (segment for index in run for segment in self.shards[index])
        blocks = (TensorBlock(each.tensor, each.start, each.stop) for each in segments)
        # Clones, because what is read is valid until the next read only.
        values = torch.cat([read(tensors, block).clone() for block in merged(blocks)])
        return self.pack_run(run, round_number, values)

    def pack_run(self, run: range, round_number: int, values: Tensor) -> list[bytes]:
        """Encode a run that `joins`, given its values one after the other."""
        out = bytearray()
        self.codec.encode(values, self._context(round_number, self.shards[run.start][0]), out)
        return floats.dressed(self._sizes(run), bytes(out))

    def decode_run(
        self, run: range, round_number: int, payloads: Sequence[bytes], values: Tensor
    ) -> bool:
        """Decode a run that `joins` into a flat tensor; return False, with undefined values, if one
        of the payloads is corrupt."""
        raw = floats.bare(self._sizes(run), payloads)
        if raw is None:
            return False
        try:
            self.codec.decode(raw, self._context(round_number, self.shards[run.start][0]), values)
        except CorruptPayload:
            return False
        return largest(values) <= MAX_ABS

    def joins(self, run: range) -> bool:
        """Return whether the segments of these neighbouring shards are coded together."""
        many = len(run) > 1 or len(self.shards[run.start]) > 1
        return (
            bool(many and floats.value_bytes(self.codec)) and self.count(run) <= floats.RUN_VALUES
        )

    def count(self, run: range) -> int:
        """Return the number of values in a run of shards."""
        return sum(self.counts[run.start : run.stop])

    def _sizes(self, run: range) -> floats.Sizes:
        each = floats.value_bytes(self.codec)
        return [[each * segment.count for segment in self.shards[index]] for index in run]

    def pack(self, index: int, round_number: int, values: Iterable[Tensor]) -> bytes:
        """Encode one shard, given one flat tensor per segment."""
        out = bytearray()
        for segment, flat in zip(self.shards[index], values, strict=True):
            at = len(out)
            out += bytes(_LENGTH.size)
            written = self.codec.encode(flat, self._context(round_number, segment), out)
            _LENGTH.pack_into(out, at, written)
        return bytes(out)

    def decode(self, index: int, round_number: int, payload: bytes) -> list[Tensor]:
        """Return one flat tensor per segment; raise `CorruptPayload` for bytes that no correct
        peer sends."""
        values = [torch.empty(segment.count, dtype=torch.float32) for segment in self.shards[index]]
        self.decode_into(index, round_number, payload, values)
        return values

    def decode_into(
        self, index: int, round_number: int, payload: bytes, values: Sequence[Tensor]
    ) -> None:
        """Decode into existing flat tensors; after `CorruptPayload` their values are undefined."""
        raws = self.split(index, payload)
        for segment, raw, out in zip(self.shards[index], raws, values, strict=True):
            self.decode_segment(segment, round_number, raw, out)

    def split(self, index: int, payload: bytes) -> list[memoryview]:
        """Return each segment's bytes; raise `CorruptPayload` unless they fill the payload."""
        view, at = memoryview(payload), 0
        raws = []
        for segment in self.shards[index]:
            if len(view) < at + _LENGTH.size:
                raise CorruptPayload(
                    f"shard {index} ends after {len(view)} bytes, inside {segment.tensor}"
                )
            (length,) = _LENGTH.unpack_from(view, at)
            at += _LENGTH.size
            raws.append(view[at : at + length])
            at += length
        if at != len(view):
            raise CorruptPayload(f"shard {index} has {len(view)} bytes, but its segments have {at}")
        return raws

    def decode_segment(
        self, segment: Segment, round_number: int, raw: memoryview, out: Tensor
    ) -> None:
        """Decode a segment's bytes; after `CorruptPayload` the values of `out` are undefined."""
        self.codec.decode(raw, self._context(round_number, segment), out)
        if largest(out) > MAX_ABS:
            raise CorruptPayload(f"{segment.tensor} holds a value above {MAX_ABS:.3g}")

    def is_valid(self, index: int, round_number: int, payload: bytes) -> bool:
        """Return whether a correct peer could have sent this payload of a shard."""
        try:
            self.require_valid(index, round_number, payload)
        except CorruptPayload:
            return False
        return True

    def require_valid(self, index: int, round_number: int, payload: bytes) -> None:
        """Raise `CorruptPayload` unless a correct peer could have sent this payload of a shard."""
        shard = self.shards[index]
        scratch = torch.empty(max(segment.count for segment in shard), dtype=torch.float32)
        for segment, raw in zip(shard, self.split(index, payload), strict=True):
            self.decode_segment(segment, round_number, raw, scratch[: segment.count])

    def require_valid_run(self, run: range, round_number: int, payloads: Sequence[bytes]) -> None:
        """Raise `CorruptPayload` unless a correct peer could have sent each of these payloads."""
        if self.joins(run):
            values = torch.empty(self.count(run), dtype=torch.float32)
            if self.decode_run(run, round_number, payloads, values):
                return
        for index, payload in zip(run, payloads, strict=True):
            self.require_valid(index, round_number, payload)

    def _context(self, round_number: int, segment: Segment) -> Context:
        return Context(self.run_seed, round_number, segment.tensor, segment.number, segment.columns)


def _segments(shapes: Mapping[str, tuple[int, ...]], codec: Codec) -> Iterator[Segment]:
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        granule = codec.granule(shape)
        step = max(SEGMENT_VALUES // granule, 1) * granule
        columns = shape[-1] if len(shape) > 1 else 0
        for number, start in enumerate(range(0, max(count, 1), step)):
            yield Segment(name, start, min(start + step, count), columns, number)


class _LastDecoded(threading.local):
    """The segment that a thread decoded last."""

    def __init__(self) -> None:
        self.split: tuple[int, list[memoryview]] = -1, []  # the shard that was split last
        self.here: Segment | None = None  # the segment in `values`
        self.values = torch.empty(0, dtype=torch.float32)


class DecodedTensors(LazyTensors):
    """The tensors in a round's payloads, decoded segment by segment when they are read.

    The segment that a thread decoded last is kept, so that blocks in order decode each segment
    once. Values are decoded on the device `home` (None: the CPU)."""

    def __init__(
        self,
        layout: ShardLayout,
        round_number: int,
        payloads: Sequence[bytes],
        shapes: Mapping[str, tuple[int, ...]],
        home: torch.device | None = None,
    ) -> None:
        super().__init__(shapes)
        self._layout, self._round, self._payloads = layout, round_number, payloads
        self._home, self._last = home, _LastDecoded()

    def values_of(self, name: str, start: int, stop: int) -> Tensor:
        starts, places = self._layout.places[name]
        number = bisect.bisect_right(starts, start) - 1
        past = bisect.bisect_left(starts, stop, number + 1)
        if past - number > 1:
            joint = self._joined(places[number:past], start, stop)
            if joint is not None:
                return joint
        if self._segment(places[number]).stop >= stop:
            return self._range(places[number], start, stop)
        whole = torch.empty(stop - start, dtype=torch.float32, device=self._home)
        rest = whole
        while len(rest):
            segment = self._segment(places[number])
            values = rest[: segment.stop - start]
            if len(values) == segment.count:
                self._decode(places[number], values)
            else:
                values.copy_(self._range(places[number], start, stop))
            rest, start, number = rest[len(values) :], start + len(values), number + 1
        return whole

    def _joined(self, places: Sequence[tuple[int, int]], start: int, stop: int) -> Tensor | None:
        """Return a range, decoded from small segments at once; None if they cannot be joined."""
        layout, last = self._layout, self._last
        each = floats.value_bytes(layout.codec)
        segments = [layout.shards[index][number] for index, number in places]
        if not each or segments[-1].stop - segments[0].start > 2 * floats.RUN_VALUES:
            return None
        raws = []
        for (index, number), segment in zip(places, segments, strict=True):
            if last.split[0] != index:
                last.split = index, layout.split(index, self._payloads[index])
            raws.append(last.split[1][number])
            if len(raws[-1]) != each * segment.count:
                return None
        first = each * (start - segments[0].start)
        raw = b"".join(raws)[first : first + each * (stop - start)]
        values = torch.empty(stop - start, dtype=torch.float32, device=self._home)
        whole = Segment(segments[0].tensor, start, stop)
        layout.decode_segment(whole, self._round, memoryview(raw), values)
        return values

    def _range(self, place: tuple[int, int], start: int, stop: int) -> Tensor:
        """Return what the segment at `place` (shard, number in it) holds of a range."""
        segment, last = self._segment(place), self._last
        if segment is not last.here:
            if len(last.values) < segment.count:
                last.values = torch.empty(segment.count, dtype=torch.float32, device=self._home)
            last.here = None  # until the values are whole
            self._decode(place, last.values[: segment.count])
            last.here = segment
        return last.values[start - segment.start : min(stop, segment.stop) - segment.start]

    def _segment(self, place: tuple[int, int]) -> Segment:
        index, number = place
        return self._layout.shards[index][number]

    def _decode(self, place: tuple[int, int], values: Tensor) -> None:
        (index, number), last = place, self._last
        if last.split[0] != index:
            last.split = index, self._layout.split(index, self._payloads[index])
        raw = last.split[1][number]
        self._layout.decode_segment(self._segment(place), self._round, raw, values)


def decode_all(
    layout: ShardLayout,
    round_number: int,
    payloads: Sequence[bytes],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Tensor]:
    """Return whole tensors from the payloads of all shards."""
    return dict(DecodedTensors(layout, round_number, payloads, shapes))


class _CorruptInput(Exception):
    """The payload of `peer` cannot be decoded."""

    def __init__(self, peer: str) -> None:
        self.peer = peer


@dataclass(frozen=True, slots=True)
class _Undecided:
    """An undecided reduction: its inputs, its payload, and the payload's error, in which the
    earlier residual is contained if there was one."""

    inputs: Inputs
    payload: bytes
    left_out: Values
    compensated: bool


class Reducer:
    """A peer's work as a reducer: the weighted mean of a shard, encoded with the return codec.

    Reductions run in a worker, while the event loop may settle an earlier round.

    Without compensation, the error of a coarse return codec is lost to every peer. Where the
    exchange says `compensate`, the reducer keeps it as the shard's residual and adds it to that
    shard's next mean (DoubleSqueeze, Tang et al., arXiv:1905.05957, algorithm 1, the server's
    error; deviations: the reducer of a shard may change, and a round may fail).

    Only the reduction that the group agreed on counts. If that is this peer's, its error is the new
    residual. If the round fails, the earlier residual is computed back from the error, up to its
    rounding, so that no second copy waits for the decision. If the group takes another peer's
    reduction, the residual is dropped: other peers reduce this shard now, and the error of their
    mean is unknown here.
    """

    def __init__(self, layout: ShardLayout, back: Codec, *, compensate: bool) -> None:
        self._layout, self._back = layout, ShardLayout(layout.shards, back, layout.run_seed)
        self._compensate = compensate
        self._lock = threading.Lock()  # held while tensors are coded only after a failed round
        self._residuals: dict[int, Values] = {}  # by shard
        self._undecided: dict[tuple[int, int], _Undecided] = {}  # by round and shard

    def reduce(self, round_number: int, index: int, inputs: Inputs) -> Reduction:
        """Decode the inputs in peer order and encode their weighted mean.

        Corrupt payloads are left out and named."""
        usable, rejected = sorted(inputs), set()
        while sum(weight for _, weight, _ in usable) >= MIN_WEIGHT:
            try:
                mean = self._mean(round_number, index, usable)
            except _CorruptInput as error:
                rejected.add(error.peer)
                usable = [entry for entry in usable if entry[0] != error.peer]
            else:
                if self._compensate:
                    payload = self._encode_compensated(round_number, index, mean, usable)
                else:
                    payload = self._encode(round_number, index, mean)
                return Reduction(payload, tuple(sorted(rejected)))
        return Reduction(None, tuple(peer for peer, _, _ in inputs))

    def reduce_run(self, round_number: int, run: range, inputs: RunInputs) -> list[Reduction]:
        """Reduce neighbouring shards, of which each input has the payloads, as `reduce` does
        each."""
        layout, back = self._layout, self._back
        usable = sum(weight for _, weight, _ in inputs) >= MIN_WEIGHT
        if usable and not self._compensate and layout.joins(run) and back.joins(run):
            mean = self._joined_mean(round_number, run, sorted(inputs))
            if mean is not None:
                mean.clamp_(-MAX_MEAN, MAX_MEAN)
                return [Reduction(data) for data in back.pack_run(run, round_number, mean)]
        return [
            self.reduce(
                round_number,
                index,
                [(peer, weight, payloads[n]) for peer, weight, payloads in inputs],
            )
            for n, index in enumerate(run)
        ]

    def _joined_mean(self, round_number: int, run: range, inputs: RunInputs) -> Tensor | None:
        """Return the weighted mean of a run that joins; None if a payload is corrupt."""
        layout = self._layout
        values = torch.empty(layout.count(run), dtype=torch.float32)
        mean = torch.empty_like(values)
        by_share = shares(tuple(weight for _, weight, _ in inputs))
        for number, (share, (_, _, payloads)) in enumerate(zip(by_share, inputs, strict=True)):
            if not layout.decode_run(run, round_number, payloads, values):
                return None
            add_share(mean, values, share, first=number == 0)
        return mean

    def _mean(self, round_number: int, index: int, inputs: Inputs) -> Values:
        """Return the weighted mean, segment by segment: of the inputs, only one segment each is
        decoded at a time. Raise `_CorruptInput` for the first input that cannot be decoded."""
        peer, raws, mean = "", {}, []
        by_share = shares(tuple(weight for _, weight, _ in inputs))
        try:
            for peer, _, payload in inputs:
                raws[peer] = self._layout.split(index, payload)
            for number, segment in enumerate(self._layout.shards[index]):
                values = torch.empty(segment.count, dtype=torch.float32)
                total = torch.empty_like(values)
                for share, (peer, _, _) in zip(by_share, inputs, strict=True):
                    self._layout.decode_segment(segment, round_number, raws[peer][number], values)
                    add_share(total, values, share, first=peer == inputs[0][0])
                mean.append(total)
        except CorruptPayload as error:
            raise _CorruptInput(peer) from error
        return mean

    def settle(self, round_number: int, decided: Sequence[bytes] | None) -> None:
        """Note that a round is over: `decided` are its shards' payloads, None if it failed."""
        with self._lock:
            compensated = self._residuals or self._undecided
            for index, payload in enumerate(decided or ()) if compensated else ():
                mine = self._undecided.get((round_number, index))
                if mine is None or mine.payload != payload:
                    self._residuals.pop(index, None)
            for number, index in [key for key in self._undecided if key[0] <= round_number]:
                mine = self._undecided.pop((number, index))
                if decided is None or number < round_number:
                    self._keep(index, self._added(number, index, mine))
                elif decided[index] == mine.payload:
                    self._keep(index, mine.left_out)

    def feedback(self) -> dict[str, Tensor]:
        """Return the residuals for a checkpoint, as if every undecided round had failed."""
        with self._lock:
            residuals = {index: list(values) for index, values in self._residuals.items()}
            for (number, index), mine in self._undecided.items():
                added = self._added(number, index, mine)
                residuals[index] = _sum(residuals.get(index), added) or []
        return {
            f"{index}.{number}": x.clone()
            for index, values in residuals.items()
            for number, x in enumerate(values)
        }

    def load_state(self, feedback: Mapping[str, Tensor]) -> None:
        """Restore a checkpoint's residuals; raise `WrongState` if they do not fit the layout."""
        places = {
            f"{index}.{number}": segment
            for index, shard in enumerate(self._layout.shards)
            for number, segment in enumerate(shard)
        }
        fits = (name in places and x.shape == (places[name].count,) for name, x in feedback.items())
        if not all(fits):
            raise WrongState("a reducer's residuals belong to another layout of shards")
        self._residuals = {}
        for index, shard in enumerate(self._layout.shards):
            values = [
                feedback[name]
                for number in range(len(shard))
                if (name := f"{index}.{number}") in feedback
            ]
            if values and len(values) != len(shard):
                missing = len(shard) - len(values)
                raise WrongState(f"a reducer's residual of shard {index} lacks {missing} segments")
            self._keep(index, values)

    def _encode_compensated(
        self, round_number: int, index: int, mean: Values, inputs: Inputs
    ) -> bytes:
        """Encode the sum of a mean and the residual, and store the error, all in the residual's
        memory."""
        with self._lock:
            if (earlier := self._undecided.pop((round_number, index), None)) is not None:
                # this reduction replaces it
                self._keep(index, self._added(round_number, index, earlier))
            added = self._residuals.pop(index, None)
        total = mean if added is None else added
        for x, y in zip(total, mean, strict=True) if added is not None else ():
            x.add_(y)
        payload = self._encode(round_number, index, total)
        for x, decoded in zip(total, self._decoded(round_number, index, payload), strict=True):
            x.sub_(decoded)
        with self._lock:
            self._undecided[round_number, index] = _Undecided(
                inputs, payload, total, added is not None
            )
        return payload

    def _added(self, round_number: int, index: int, mine: _Undecided) -> Values | None:
        """Return the residual that an undecided reduction contains."""
        if not mine.compensated:
            return None
        added = self._mean(round_number, index, mine.inputs)
        decoded = self._decoded(round_number, index, mine.payload)
        for x, left_out, taken in zip(added, mine.left_out, decoded, strict=True):
            torch.sub(left_out + taken, x, out=x)
        return added

    def _decoded(self, round_number: int, index: int, payload: bytes) -> Iterator[Tensor]:
        """Yield this payload's values, each segment in the same memory."""
        segments = self._layout.shards[index]
        scratch = torch.empty(max(segment.count for segment in segments), dtype=torch.float32)
        for segment, raw in zip(segments, self._back.split(index, payload), strict=True):
            self._back.decode_segment(segment, round_number, raw, scratch[: segment.count])
            yield scratch[: segment.count]

    def _encode(self, round_number: int, index: int, mean: Values) -> bytes:
        return self._back.pack(index, round_number, [x.clamp_(-MAX_MEAN, MAX_MEAN) for x in mean])

    def _keep(self, index: int, values: Values | None) -> None:
        """Add to a residual. Zeros are not kept: adding them could change a mean's sign of zero."""
        if values and any(bool(x.any()) for x in values):
            self._residuals[index] = _sum(values, self._residuals.get(index)) or values


def _sum(one: Values | None, other: Values | None) -> Values | None:
    """Return the sum of two lists of values, either of which may be None."""
    if one is None or other is None:
        return one if other is None else other
    return [x + y for x, y in zip(one, other, strict=True)]
