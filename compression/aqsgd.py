"""AQ-SGD: if a sample has crossed this edge before, only its change since then is sent, in 4 bits.

A model changes slowly, so the second time the difference is small, and quantising it does less harm
than quantising the activation (Wang et al., arXiv:2206.01299). For each sample, both ends keep the
value m that the receiver last used; differences are taken to m, so errors do not accumulate. It
pays where samples recur (fine-tuning), and only on a pinned edge.

The two ends must hold the same m to the bit, whatever is lost, sent twice or restarted. So a
message states for each sample what m was before and what it will be after, as 64 bits of its
BLAKE2b. A receiver that holds another m keeps it and raises `ResyncNeeded`; the sender forgets
these samples and sends them whole. That suffices: after any history, a receiver returns the
sender's m or nothing.

If a third party carries the messages and submits them again for a backward pass, a sample that is
already held is sent as its tag alone; `written`, `deltas` and `value` are for such a carrier
(node/pipeline/contrib/sample_memory.py).

Deviations from the paper's code: tags instead of trust; differences in blocks of 64 with a scale
each instead of one scale per tensor; a sample that does not fit into the cache is sent whole and is
not an error.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from farflock.compression.activation import (
    ActivationContext,
    CodecOffer,
    FlatGradient,
    Scope,
    flattened,
    require_direction,
    require_exact_length,
    restored,
)
from farflock.compression.codec import Buffer, Codec, CorruptPayload, require_finite, require_length
from farflock.compression.floats import Half
from farflock.compression.int4 import Int4
from farflock.compression.int8 import Int8
from farflock.compression.payload import append

MAX_SAMPLES = 20_000  # held by one end, as in the paper's code
MAX_CACHE_BYTES = 1 << 30
MAX_ABSENT_CACHEFULS = 4  # cachefuls of other samples after which an absent one makes room
FULL, KEPT, DIFFERENCE, HELD = 0, 1, 2, 3
TAG_BYTES = 8
NO_TAG = bytes(TAG_BYTES)
_HEAD_BYTES = 1 + 2 * TAG_BYTES  # per sample
_LIMIT = torch.finfo(torch.float16).max
_WHOLE = Half("fp16")


class ResyncNeeded(Exception):
    """Raised if the receiver does not hold the base of these samples' differences: the sender must
    `forget` them and encode again."""

    def __init__(self, samples: tuple[int, ...]) -> None:
        super().__init__(
            f"the differences of samples {samples[:8]} are to values not held here; send them whole"
        )
        self.samples = samples


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """The value that both ends last used for a sample, float16 (L, D), its tag, and the cache's
    clock at that time."""

    values: Tensor
    tag: bytes
    used: int


@dataclass(slots=True)
class Cache:
    """Samples in order of last use, bounded in number and bytes; the least recent leave first."""

    max_samples: int
    max_bytes: int
    held_bytes: int = 0
    clock: int = 0  # samples passed so far
    _held: dict[int, CacheEntry] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[int]:
        """Iterate over the samples held, those used longest ago first."""
        return iter(self._held)

    def get(self, sample: int) -> CacheEntry | None:
        """Return the entry of this sample, or None."""
        return self._held.get(sample)

    def put(self, sample: int, values: Tensor, tag: bytes) -> None:
        """Hold a value as the most recent and drop the oldest to make room. A value that is too
        large is not held."""
        self.drop(sample)
        if values.nbytes > self.max_bytes or not self.max_samples:
            return
        while not self._fits(values.nbytes):
            self.drop(next(iter(self._held)))
        self._held[sample] = CacheEntry(values, tag, self.clock)
        self.held_bytes += values.nbytes

    def drop(self, sample: int) -> None:
        """Forget this sample."""
        entry = self._held.pop(sample, None)
        self.held_bytes -= entry.values.nbytes if entry else 0

    def admits(self, size_bytes: int) -> bool:
        """Drop samples that were absent for too long; return whether a new one then has room.

        Samples come in shuffled epochs. If newcomers always displaced the oldest, a cache for half
        of the samples would lose nearly all of them before their next use; if newcomers wait, it
        keeps half.
        """
        while self._held and not self._fits(size_bytes):
            oldest = next(iter(self._held))
            if self.clock - self._held[oldest].used <= MAX_ABSENT_CACHEFULS * len(self._held):
                break
            self.drop(oldest)
        return self._fits(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return len(self._held) < self.max_samples and self.held_bytes + size_bytes <= self.max_bytes


@dataclass(frozen=True, slots=True)
class SampleDelta:
    """One sample in a message: the tags of m before and after, and what is sent, if anything."""

    kind: int
    before: bytes
    after: bytes
    payload: Buffer


@dataclass(slots=True, eq=False)
class AqSgd(FlatGradient):
    """One end of a pinned edge. The sender calls `encode` and `decode_grad`, the receiver the other
    two.

    `decode` returns the sender's m, bit for bit: the first time, the activation rounded to fp16;
    later, a value within the difference codec's bound of it, plus a rounding to fp16. Magnitudes
    above 65504 are clamped. If `decode` raises `ResyncNeeded`, it has already applied the message's
    other samples; the same message, sent again, gives the same values. The sender decides whether a
    sample is held. A receiver with less room would ask for it again each time, so the bounds are
    part of the digest. Gradients go through `gradient`, without any state.
    """

    edge: str = ""
    difference: Codec = field(default_factory=Int4)
    gradient: Codec = field(default_factory=Int8)
    max_samples: int = MAX_SAMPLES
    max_cache_bytes: int = MAX_CACHE_BYTES
    cache: Cache = field(init=False)

    scope: ClassVar[Scope] = "edge_sample"
    version: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.difference.name not in ("int4", "int8"):
            raise ValueError(
                f"differences as {self.difference.name!r} are not allowed; choose int4 or int8"
            )
        require_exact_length(self.gradient)
        self.cache = Cache(self.max_samples, self.max_cache_bytes)

    @property
    def name(self) -> str:
        """`aqsgd4,GRADIENT` or `aqsgd8,GRADIENT`."""
        return f"aqsgd{self.difference.name.removeprefix('int')},{self.gradient.name}"

    @property
    def digest(self) -> bytes:
        """Digest of the cache's bounds."""
        return hashlib.sha256(f"aqsgd {self.max_samples} {self.max_cache_bytes}".encode()).digest()

    @property
    def held_bytes(self) -> int:
        """Bytes of the held values."""
        return self.cache.held_bytes

    def offers(self, epoch: int) -> tuple[CodecOffer, ...]:
        """Return an offer of the codec itself, with its bounds."""
        return (CodecOffer.of(self),)

    def max_bytes(self, ctx: ActivationContext) -> int:
        """Return an upper bound forward, and the exact length backward.

        The bound is the larger of all samples whole and all as differences."""
        if ctx.direction == "backward":
            return self.gradient.max_bytes(ctx.count)
        each = ctx.shape[1] * ctx.shape[2]
        return ctx.shape[0] * (
            _HEAD_BYTES + max(_WHOLE.max_bytes(each), self.difference.max_bytes(each))
        )

    def tag(self, sample: int) -> bytes:
        """Return the tag of the value that this end holds for a sample; `NO_TAG` if there is
        none."""
        entry = self.cache.get(sample)
        return NO_TAG if entry is None else entry.tag

    def forget(self, samples: Iterable[int]) -> None:
        """Forget samples: a sender sends them whole next time, a receiver asks for them."""
        for sample in samples:
            self.cache.drop(sample)

    def encode(self, x: Tensor, ctx: ActivationContext, out: bytearray) -> int:
        """Append all kinds and tags, then all contents; hold the values that the receiver will
        hold."""
        self._require_pinned(ctx)
        rows = require_finite(flattened(x, ctx, "forward")).clamp(-_LIMIT, _LIMIT).view(ctx.shape)
        deltas = [
            self._send(sample, row, ctx) for sample, row in zip(ctx.samples, rows, strict=True)
        ]
        message = written(deltas)
        out += message
        return len(message)

    def decode(self, payload: Buffer, ctx: ActivationContext) -> Tensor:
        """Return the sender's m of all samples. `ResyncNeeded` names the samples that cannot be
        restored; the others are held as sent."""
        self._require_pinned(ctx)
        require_direction(ctx, "forward")
        deltas = self.deltas(payload, ctx)
        rows = torch.empty(ctx.shape, dtype=torch.float32)
        for delta, row in zip(deltas, rows, strict=True):
            self._read(delta, ctx, row)
        lost = []
        for sample, delta, row in zip(ctx.samples, deltas, rows, strict=True):
            if not self._take_over(sample, delta, row):
                lost.append(sample)
        if lost:
            raise ResyncNeeded(tuple(lost))
        return restored(rows.view(-1), ctx)

    def _require_pinned(self, ctx: ActivationContext) -> None:
        if ctx.edge != self.edge:
            raise ValueError(
                f"{self.name} remembers the samples of edge {self.edge!r} and cannot serve "
                f"{ctx.edge!r}: pin the route, or choose a memoryless codec such as int8"
            )
        if len(ctx.samples) != ctx.shape[0]:
            raise ValueError(
                f"{self.name} needs the id of each of the {ctx.shape[0]} samples, "
                f"got {len(ctx.samples)}"
            )

    def _send(self, sample: int, row: Tensor, ctx: ActivationContext) -> SampleDelta:
        """Return the part to send for one sample (L, D), and hold what the receiver will hold."""
        self.cache.clock += 1
        entry, payload = self.cache.get(sample), bytearray()
        if entry is not None and entry.values.shape == row.shape:
            self.difference.encode((row - entry.values.float()).view(-1), ctx.flat(), payload)
            change = torch.empty(row.numel(), dtype=torch.float32)
            self.difference.decode(payload, ctx.flat(), change)
            values = _advanced(entry.values, change)
            self.cache.put(sample, values, _tag(values))
            return SampleDelta(DIFFERENCE, entry.tag, _tag(values), payload)
        self.cache.drop(sample)
        values = row.to(torch.float16)
        keep = self.cache.admits(values.nbytes)
        if keep:
            self.cache.put(sample, values, _tag(values))
        return whole(values, _tag(values), keep)

    def value(
        self, delta: SampleDelta, before: CacheEntry | None, ctx: ActivationContext
    ) -> Tensor | None:
        """Return m after this part, float16 (L, D), for an end that holds `before`; None if the
        part does not build on `before`. Raise `CorruptPayload` if no sender could have written the
        part."""
        row = torch.empty(ctx.shape[1:], dtype=torch.float32)
        self._read(delta, ctx, row)
        return _after(delta, before, row)

    def deltas(self, payload: Buffer, ctx: ActivationContext) -> list[SampleDelta]:
        """Return the message split into samples, with all lengths checked. Nothing is copied."""
        payload = memoryview(payload)
        count, each = ctx.shape[0], ctx.shape[1] * ctx.shape[2]
        kinds = bytes(payload[:count])
        if len(kinds) < count or max(kinds, default=0) > HELD:
            raise CorruptPayload(
                f"{self.name} of {count} samples begins with {len(kinds)} kinds, or one is unknown"
            )
        whole, change = _WHOLE.max_bytes(each), self.difference.max_bytes(each)
        size = {FULL: whole, KEPT: whole, DIFFERENCE: change, HELD: 0}
        lengths = [size[kind] for kind in kinds]
        require_length(
            payload,
            count * _HEAD_BYTES + sum(lengths),
            f"{self.name} of {count} samples of {each} values",
        )
        deltas, tags, at = [], count, count * _HEAD_BYTES
        for kind, length in zip(kinds, lengths, strict=True):
            before, after = struct.unpack_from("8s8s", payload, tags)
            deltas.append(SampleDelta(kind, before, after, payload[at : at + length]))
            tags, at = tags + 2 * TAG_BYTES, at + length
        return deltas

    def _read(self, delta: SampleDelta, ctx: ActivationContext, row: Tensor) -> None:
        """Fill `row` (L, D) with the sample or its difference, if either was sent; refuse an
        invalid part."""
        if delta.kind == HELD:
            if delta.before != delta.after:
                raise CorruptPayload(f"a sample of {self.name} that is held as it is has two tags")
            return
        if delta.kind == DIFFERENCE:
            self.difference.decode(delta.payload, ctx.flat(), row.view(-1))
            return
        _WHOLE.decode(delta.payload, ctx.flat(), row.view(-1))
        if delta.before != NO_TAG or delta.after != _tag(row.to(torch.float16)):
            raise CorruptPayload(
                f"a whole sample of {self.name} does not have the value that its tag names"
            )

    def _take_over(self, sample: int, delta: SampleDelta, row: Tensor) -> bool:
        """Hold the sender's m and copy it to `row`; False if the part builds on another m."""
        self.cache.clock += 1
        if delta.kind == FULL:
            self.cache.drop(sample)
            return True
        values = _after(delta, self.cache.get(sample), row)
        if values is None:
            return False
        self.cache.put(sample, values, delta.after)
        row.copy_(values)
        return True


def written(deltas: Sequence[SampleDelta]) -> bytes:
    """Return a message of these samples: all kinds, all tags, then all contents."""
    kinds = bytes(delta.kind for delta in deltas)
    tags = b"".join(delta.before + delta.after for delta in deltas)
    return kinds + tags + b"".join(delta.payload for delta in deltas)


def whole(values: Tensor, tag: bytes, kept: bool) -> SampleDelta:
    """Return a part with a sample's value, float16 (L, D); `kept` asks the receiver to hold it."""
    payload = bytearray()
    append(payload, values.reshape(-1))
    return SampleDelta(KEPT if kept else FULL, NO_TAG, tag, payload)


def _after(delta: SampleDelta, before: CacheEntry | None, row: Tensor) -> Tensor | None:
    """Return m after a part whose content is in `row` (L, D); None if the part does not build on
    `before`."""
    if delta.kind in (FULL, KEPT):
        return row.to(torch.float16)
    if before is None or before.values.shape != row.shape:
        return None
    values = before.values
    if delta.kind == DIFFERENCE and before.tag == delta.before:
        values = _advanced(values, row.view(-1))
    return values if _tag(values) == delta.after else None


def _advanced(values: Tensor, change: Tensor) -> Tensor:
    """Return m plus the decoded difference as float16, by operations equal on every machine."""
    moved = values.float() + change.view(values.shape)
    return moved.clamp_(-_LIMIT, _LIMIT).to(torch.float16)


def _tag(values: Tensor) -> bytes:
    """Return a 64-bit digest of the exact bits of a value (L, D)."""
    shape = struct.pack("<II", *values.shape)
    raw = values.contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(shape + raw.tobytes(), digest_size=TAG_BYTES).digest()
