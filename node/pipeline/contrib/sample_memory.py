"""The memory of samples at the ends of a pipeline's edges.

It serves a codec that sends the change since a sample's last visit (compression/aqsgd.py, decision
018).

A stage's output goes to the trainer, which passes it to the next stage, and again for the backward
pass. So an edge has three ends: the server before it, the trainer, and the server behind it. The
trainer decodes each output and keeps its value m, float16, with a tag. Each request says what the
trainer holds of a sample; the server before the edge sends the difference if it holds the same
value, and otherwise sends everything. The trainer passes on the difference if the server behind the
edge is known to hold the previous m, only a tag if that server already holds m, and otherwise the
whole m. An end that does not hold what a message refers to answers `Lacks` and gets the whole m.

So whatever is lost, doubled, late or restarted costs only bytes. A stage computes with the
trainer's m, bit for bit, in the forward pass and in the backward pass of the same microbatch,
however far other visits have moved the sample's m in the meantime: the trainer keeps the m of each
microbatch until it counts.

Shapes: B sequences, L positions, D model width."""

import collections
import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from farflock.compression.activation import ActivationContext
from farflock.compression.aqsgd import (
    DIFFERENCE,
    FULL,
    HELD,
    MAX_SAMPLES,
    NO_TAG,
    TAG_BYTES,
    AqSgd,
    Cache,
    CacheEntry,
    ResyncNeeded,
    SampleDelta,
    whole,
    written,
)
from farflock.compression.codec import CorruptPayload
from farflock.node.pipeline.passes.edges import Edges
from farflock.node.pipeline.passes.requests import (
    Backward,
    Forward,
    HeldOutForward,
    StagePass,
    Visit,
)
from farflock.node.pipeline.server.edge_ends import EdgeEnds, NotHeld


class ServerMemory(EdgeEnds):
    """A stage server's ends (node/pipeline/server/edge_ends.py), for the outputs that the server
    sent and the inputs that it received. Each end holds at most the codec's bound of bytes, for
    all trainers together. Samples are kept apart by trainer, and inputs by the stage that they
    come from."""

    def __init__(self, edges: Edges) -> None:
        self.edges, self.sent, self.received = edges, fresh(edges), fresh(edges)

    @property
    def held_bytes(self) -> int:
        """Bytes of remembered values."""
        return self.sent.held_bytes + self.received.held_bytes

    def misfit(self, request: StagePass) -> str | None:
        """As `EdgeEnds.misfit`: each sequence needs a sample id, in a `Forward` also a tag."""
        if isinstance(request, HeldOutForward):
            return None
        visit = request.visit
        if visit is None or len(visit.samples) != self.edges.batch:
            return f"it needs the ids of {self.edges.batch} samples"
        held = self.edges.batch * TAG_BYTES if isinstance(request, Forward) else 0
        return None if len(visit.held) == held else f"it needs {held} bytes of tags"

    def output(
        self,
        caller: str,
        y_BLD: Tensor,
        request: Forward | HeldOutForward,
        tokens_BL: Tensor | None = None,
        came: bytes | None = None,
    ) -> bytes:
        """As `EdgeEnds.output`, relative to the values that the request says the trainer holds."""
        if isinstance(request, HeldOutForward):
            measured = bytearray()
            _forgetful(self.edges).encode(y_BLD, _unnamed(self.edges, request), measured)
            return bytes(measured)
        visit = _visit(request)
        names = _names(caller, request.stage, visit)
        held = [visit.held[at : at + TAG_BYTES] for at in range(0, len(visit.held), TAG_BYTES)]
        self.sent.forget(
            name for name, tag in zip(names, held, strict=True) if self.sent.tag(name) != tag
        )
        out = bytearray()
        self.sent.encode(y_BLD, _context(self.edges, request, names), out)
        return bytes(out)

    def input(
        self,
        caller: str,
        payload: bytes,
        request: StagePass,
        tokens_BL: Tensor | None = None,
    ) -> Tensor:
        """As `EdgeEnds.input`: return the trainer's m (B, L, D), bit for bit."""
        if isinstance(request, HeldOutForward):
            try:
                context = _unnamed(self.edges, request)
                return _forgetful(self.edges).decode(payload, context)
            except ResyncNeeded as needed:
                raise CorruptPayload(str(needed)) from None
        names = _names(caller, request.source, _visit(request))
        try:
            return self.received.decode(payload, _context(self.edges, request, names))
        except ResyncNeeded as needed:
            lost = set(needed.samples)
            raise NotHeld(tuple(row for row, name in enumerate(names) if name in lost)) from None


@dataclass(frozen=True, slots=True)
class Known:
    """The outputs of a stage that a trainer held when it asked; the reply refers to them."""

    samples: tuple[int, ...]
    entries: tuple[CacheEntry | None, ...]

    @property
    def visit(self) -> Visit:
        """The samples and tags, in the form that a request names them."""
        return Visit(
            self.samples, b"".join(NO_TAG if entry is None else entry.tag for entry in self.entries)
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One sample's activation in one microbatch: m, float16 (L, D), and its tag; if it came as a
    difference, that difference and the tag of the m before; and whether the sender holds m, so that
    the next visit may be a difference."""

    values: Tensor
    tag: bytes
    before: bytes
    change: bytes
    kept: bool

    def delta(self, there: bytes) -> SampleDelta:
        """Encode the row for an end that holds the value with tag `there`."""
        if there == self.tag:
            return SampleDelta(HELD, self.tag, self.tag, b"")
        if self.change and there == self.before:
            return SampleDelta(DIFFERENCE, self.before, self.tag, self.change)
        return whole(self.values, self.tag, self.kept)


class TrainerMemory:
    """A trainer's end of every edge: by stage, the last m of its samples' outputs, at most the
    codec's bound of bytes, and the tags that the servers behind the edge are known to hold. A
    microbatch keeps its own `Row`s."""

    def __init__(self, edges: Edges) -> None:
        self._edges, self._end = edges, fresh(edges)
        self.caches: dict[int, Cache] = {}
        # by stage: tag by (server life, sample), most recently used last
        self._there: dict[int, dict[tuple[str, int], bytes]] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    @property
    def held_bytes(self) -> int:
        """Bytes of remembered values."""
        return sum(cache.held_bytes for cache in self.caches.values())

    def known(self, stage: int, samples: tuple[int, ...]) -> Known:
        """Return the held outputs of a stage for these samples."""
        cache = self._cache(stage)
        return Known(samples, tuple(cache.get(sample) for sample in samples))

    def received(self, payload: bytes, request: Forward, known: Known) -> tuple[Row, ...]:
        """Decode and remember an output relative to `known`; may raise `CorruptPayload`."""
        context = _context(self._edges, request, known.samples)
        latest, rows = dict(zip(known.samples, known.entries, strict=True)), []
        for sample, delta in zip(known.samples, self._end.deltas(payload, context), strict=True):
            values = None if delta.kind == HELD else self._end.value(delta, latest[sample], context)
            if values is None:
                raise CorruptPayload(
                    f"the difference of sample {sample} is not from the value that is held here"
                )
            latest[sample] = CacheEntry(values, delta.after, 0) if delta.kind != FULL else None
            change = bytes(delta.payload) if delta.kind == DIFFERENCE else b""
            rows.append(Row(values, delta.after, delta.before, change, delta.kind != FULL))
        self._remember(request.stage, latest)
        self.counts.update("differences" if row.change else "whole samples" for row in rows)
        return tuple(rows)

    def handed(self, stage: int, server: str, samples: Sequence[int], rows: Sequence[Row]) -> bytes:
        """Encode a stage's input for this server life, relative to the values that it is known
        to hold."""
        there, deltas = self._there.setdefault(stage, {}), []
        latest = {sample: there.get((server, sample), NO_TAG) for sample in samples}
        for sample, row in zip(samples, rows, strict=True):
            deltas.append(row.delta(latest[sample]))
            latest[sample] = row.tag if row.kept else NO_TAG
        return written(deltas)

    def taken(
        self,
        stage: int,
        server: str,
        samples: Sequence[int],
        rows: Sequence[Row],
        lacking: Collection[int] = (),
    ) -> None:
        """Note that a server has read this input, except the rows in `lacking`.

        After a failed call nothing is noted: the server has the sample's m either from before
        the call or from after it, and can read a difference with both."""
        there = self._there.setdefault(stage, {})
        for at, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            there.pop((server, sample), None)
            if row.kept and at not in lacking:
                there[server, sample] = row.tag
        while len(there) > MAX_SAMPLES:
            del there[next(iter(there))]
        self.counts["not held"] += len(lacking)

    def _remember(self, stage: int, latest: dict[int, CacheEntry | None]) -> None:
        cache = self._cache(stage)
        for sample, entry in latest.items():
            if entry is None:
                cache.drop(sample)
            else:
                cache.put(sample, entry.values, entry.tag)

    def _cache(self, stage: int) -> Cache:
        return self.caches.setdefault(
            stage, Cache(self._end.max_samples, self._end.max_cache_bytes)
        )


def fresh(edges: Edges) -> AqSgd:
    """Return a codec like the run's, for one end, that remembers nothing yet."""
    assert isinstance(edges.codec, AqSgd), f"{edges.codec.name} remembers no samples"
    return dataclasses.replace(edges.codec)


def _forgetful(edges: Edges) -> AqSgd:
    """Return a codec like the run's that sends and reads whole values, and keeps none."""
    return dataclasses.replace(fresh(edges), max_samples=0)


def _unnamed(edges: Edges, request: HeldOutForward) -> ActivationContext:
    """Return the codec's context of a pass on held-out text, whose sequences have no names."""
    return _context(edges, request, tuple(range(edges.batch)))


def refers(payload: bytes, rows: Sequence[int], batch: int) -> bool:
    """True if all these rows of an input refer to held values, which a server may have dropped."""
    return bool(rows) and all(row < batch and payload[row] in (DIFFERENCE, HELD) for row in rows)


def _visit(request: Forward | Backward) -> Visit:
    assert request.visit is not None, "`misfit` refuses a request without samples"
    return request.visit


def _names(caller: str, source: int, visit: Visit) -> tuple[int, ...]:
    """Return the codec's names for a trainer's samples out of a stage. A collision is improbable
    and would cost a resync: values are known by their tags."""
    texts = (f"{caller}/{source}/{sample}".encode() for sample in visit.samples)
    return tuple(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) for text in texts)


def _context(edges: Edges, request: StagePass, samples: tuple[int, ...]) -> ActivationContext:
    """Return the codec's context of a forward pass; a backward request carries the same input."""
    return ActivationContext(
        (edges.batch, edges.seq, edges.dim),
        edges.dtype,
        microbatch=request.number,
        samples=samples,
        epoch=max(request.epoch, 0),
        run_seed=edges.run_seed,
    )
