"""The size of a run's exchanges, from its terms alone: shards, bytes, and seconds on a line.

The method's streams are opened for a model without values, so that a run of any size can be judged
before anything is started.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from farflock.compression.catalog import codec
from farflock.node.errors import Usage
from farflock.node.model.llama import Llama
from farflock.node.model.shapes import ShapeReplica
from farflock.node.run.memory import Exchanged
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.driver import Apply, Driver
from farflock.node.train.exchange_client import layout_of
from farflock.node.train.shards import SHARD_BYTES, ShardLayout
from farflock.optimizers.catalog import METHODS, method, unfolded
from farflock.optimizers.method import Exchange, Method, Progress, RandomGroups, Result
from farflock.optimizers.parts.blocks import shapes_of
from farflock.optimizers.parts.state import Shapes
from farflock.optimizers.parts.state_fields import saved
from farflock.optimizers.parts.stateful import StatefulMethod
from farflock.swarm.messages import MAX_CHUNK_BYTES
from farflock.swarm.peer.peer import STORE_BYTES
from farflock.swarm.peer.round_log import LOG_ROUNDS
from farflock.swarm.protocol.exchange.bundles import max_shards
from farflock.swarm.protocol.exchange.content import SOFT

VALUE_BYTES = 4
MAX_LOOKED_STEPS = 4096  # for two rounds of each stream


@dataclass(frozen=True, slots=True)
class StreamSize:
    """One stream of a run: its shards, and the most bytes of one contribution (`out_bytes`) and of
    one mean (`back_bytes`, 0 if nothing comes back). `steps` are the local steps from one round to
    the next; infinity if there was none in `MAX_LOOKED_STEPS`. `residual_bytes` is the size of what
    all reducers together left out and keep."""

    stream: str
    kind: Literal["mean", "gather", "pair"]
    values: int
    shards: int
    out_bytes: int
    back_bytes: int
    steps: float
    deadline_s: float
    residual_bytes: int = 0

    def sent_bytes(self, members: int) -> float:
        """Return the bytes that one of the members sends in a round; it receives as many.

        In a mean each member reduces its share: it gets that of all contributions, and gives the
        result to all. What is gathered is fetched from any holder, which comes to the same for
        every member."""
        others = members - 1
        match self.kind:
            case "mean":
                return (self.out_bytes + self.back_bytes) * others / members
            case "gather":
                return self.out_bytes * others
            case "pair":
                return self.out_bytes if others else 0.0

    def seconds(self, members: int, bytes_per_s: float) -> float:
        """Return how long a round takes if the slower direction of a line carries this much."""
        return self.sent_bytes(members) / bytes_per_s

    def min_deadline_s(self, members: int, bytes_per_s: float) -> float:
        """Return the least deadline with which a round is complete on such a line: contributions
        count only if they arrive within `SOFT` of it."""
        whole_s = self.seconds(members, bytes_per_s)
        if not whole_s or self.kind == "pair":
            return whole_s
        out_s = whole_s * self.out_bytes / (self.out_bytes + self.back_bytes)
        return max(whole_s, out_s / SOFT)


def stream_sizes(plan: RunPlan, pipeline: PipelinePlan | None = None) -> tuple[StreamSize, ...]:
    """Return the streams of a run, those of all stages if it is a pipeline.

    Raise `Usage` if one of them is too large to travel."""
    sizes: list[StreamSize] = []
    for suffix, shapes, templates in _opened(plan, pipeline):
        streams = [template.key.stream for template in templates]
        steps = _steps_between(method(plan.method, **plan.options), shapes, streams)
        for template in templates:
            stream = template.key.stream
            layout = _layout(template, f"{stream}{suffix}", plan.run_seed)
            sizes.append(_size(template, layout, f"{stream}{suffix}", steps[stream]))
    return tuple(sizes)


def require_carried(plan: RunPlan, pipeline: PipelinePlan | None = None) -> None:
    """Raise `Usage` if a stream of the run is too large to travel."""
    for suffix, _, templates in _opened(plan, pipeline):
        for template in templates:
            _layout(template, f"{template.key.stream}{suffix}", plan.run_seed)


def is_paired(plan: RunPlan) -> bool:
    """Return whether the first stream of a run of whole models is exchanged in pairs: then each
    member has weights of its own."""
    templates = [template for _, _, opened in _opened(plan, None) for template in opened]
    return bool(templates) and isinstance(templates[0].group, RandomGroups)


def state_bytes(plan: RunPlan, *, shared: bool = False) -> int:
    """Return the bytes of the state that the method keeps beside the model, in float32: all of it,
    or what it has in common with other peers."""
    with torch.device("meta"):
        shapes = {name: tuple(x.shape) for name, x in Llama(plan.model).named_parameters()}
    made, small = method(plan.method, **plan.options), _small(shapes)
    _steps_between(made, shapes, [one.key.stream for one in made.streams(ShapeReplica(small))])
    assert isinstance(made, StatefulMethod), f"{plan.method} is not of the catalog"
    kept = saved(made, "shared") | ({} if shared else saved(made, "own"))
    owners = [(key.partition(".")[2], tuple(x.shape)) for key, x in kept.items()]
    return sum(
        VALUE_BYTES * math.prod(shapes[name])
        for name, shape in owners
        if name in shapes and shape == small[name]
    )


def exchanged(
    plan: RunPlan, members: int = 2, streams: Sequence[StreamSize] | None = None
) -> Exchanged:
    """Return what the method of a run takes beside the model and its optimizer; with more members,
    a gather takes more."""
    payloads = residuals = 0
    for size in stream_sizes(plan) if streams is None else streams:
        residuals += size.residual_bytes // members
        gathered = members if size.kind == "gather" else 2  # its own, and what it reduces
        payloads += gathered * size.out_bytes + size.back_bytes
    # what is sent, what came since, and a mean of them, while a round is open
    held = 3 if METHODS[unfolded(plan.method)[0]].keeps_gradients else 0
    pending = residuals + held * VALUE_BYTES * plan.model.parameters()
    kept = min(LOG_ROUNDS * payloads, STORE_BYTES)
    return Exchanged(state_bytes(plan), pending, payloads, kept)


def _opened(
    plan: RunPlan, pipeline: PipelinePlan | None
) -> Iterator[tuple[str, Shapes, list[Exchange]]]:
    """Yield what follows a stream's name, the shapes, and the templates: of the model, or of each
    stage."""
    spans: Sequence[range | None] = pipeline.stages if pipeline is not None else (None,)
    for stage, span in enumerate(spans):
        # Made first: constants of modules that it imports must be real.
        made = method(plan.method, **plan.options)
        with torch.device("meta"):
            parameters = Llama(plan.model, span).named_parameters()
            shapes = {name: tuple(x.shape) for name, x in parameters}
            templates = made.streams(ShapeReplica(shapes))
        yield "" if span is None else f"/{stage}", shapes, templates


def _layout(template: Exchange, name: str, seed: int) -> ShardLayout:
    """Return a stream's layout; raise `Usage` if the swarm cannot carry it."""
    layout, most = layout_of(template, seed), max_shards(template.kind)
    if layout.max_shard_bytes > MAX_CHUNK_BYTES:
        raise Usage(
            f"stream {name}",
            f"a shard of it takes up to {layout.max_shard_bytes:,} bytes, and a chunk holds"
            f" {MAX_CHUNK_BYTES:,}",
            "choose a codec of smaller granules, or a narrower model",
        )
    if len(layout.shards) > most:
        raise Usage(
            f"stream {name}",
            f"it has {len(layout.shards):,} shards, and a {template.kind} carries {most:,}, about"
            f" {most * SHARD_BYTES / 1e12:,.1f} TB",
            "choose a codec of fewer bytes, or a smaller model",
        )
    return layout


def _size(template: Exchange, layout: ShardLayout, name: str, steps: float) -> StreamSize:
    paired = isinstance(template.group, RandomGroups)
    kind: Literal["mean", "gather", "pair"] = "pair" if paired else template.kind
    back = codec(template.return_codec) if kind == "mean" else None
    values = sum(segment.count for shard in layout.shards for segment in shard)
    return StreamSize(
        name,
        kind,
        values,
        len(layout.shards),
        layout.max_bytes(layout.codec),
        0 if back is None else layout.max_bytes(back),
        steps,
        template.deadline_s,
        VALUE_BYTES * values if template.compensate else 0,
    )


def _steps_between(made: Method, shapes: Shapes, streams: Sequence[str]) -> dict[str, float]:
    """Return the local steps between two rounds of each stream.

    The method itself says so, in steps on small tensors of the same names in which every exchange
    is answered at once with its own contribution."""
    replica = ShapeReplica(_small(shapes))
    driver = Driver(made, replica)
    seen: dict[str, list[int]] = {stream: [] for stream in streams}
    for step in range(1, MAX_LOOKED_STEPS + 1):
        progress = Progress(step, step, float(step))
        made.local_step(replica, progress)
        started = driver.after_step(progress)
        while True:
            for exchange in started:
                seen[exchange.key.stream].append(step)
                driver.resolve(exchange.key, _answer(exchange))
            if not isinstance(action := driver.next(progress), Apply):
                break
            started = driver.apply(action, progress)
        if all(len(steps) >= 2 for steps in seen.values()):
            break
    return {
        stream: float(steps[-1] - steps[-2]) if len(steps) >= 2 else math.inf
        for stream, steps in seen.items()
    }


def _small(shapes: Shapes) -> Shapes:
    return {name: tuple(min(side, 8) for side in shape) for name, shape in shapes.items()}


def _answer(exchange: Exchange) -> Result:
    """Return the result of a round with two contributions like this peer's."""
    tensors, peers = exchange.tensors, ("one", "other")
    return Result(
        "ok",
        exchange.key.round + exchange.stride,
        peers,
        (1.0, 1.0),
        mean=tensors,
        gathered=dict.fromkeys(peers, tensors) if exchange.kind == "gather" else None,
        sent=tensors,
        taken={name: ((0, math.prod(x)),) for name, x in shapes_of(tensors).items()},
    )
