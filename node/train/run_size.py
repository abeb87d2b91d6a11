"""The size of a run's exchanges, from its terms alone: shards, bytes, and seconds on a line.

The method's streams are opened for a model without values, so that a run of any size can be judged
before anything is started.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from farflock.compression.catalog import codec
from farflock.node.errors import Usage
from farflock.node.model.llama import Llama
from farflock.node.model.shapes import ShapeReplica
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.driver import Apply, Driver
from farflock.node.train.exchange_client import layout_of
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Exchange, Method, Progress, RandomGroups, Result
from farflock.swarm.messages import MAX_CHUNK_BYTES
from farflock.swarm.protocol.exchange.bundles import max_shards
from farflock.swarm.protocol.exchange.content import SOFT

MAX_LOOKED_STEPS = 4096  # for two rounds of each stream
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StreamSize:
    """One stream of a run: its shards, and the most bytes of one contribution (`out_bytes`) and of
    one mean (`back_bytes`, 0 if nothing comes back). `steps` are the local steps from one round to
    the next; infinity if there was none in `MAX_LOOKED_STEPS`."""

    stream: str
    kind: Literal["mean", "gather", "pair"]
    values: int
    shards: int
    out_bytes: int
    back_bytes: int
    steps: float
    deadline_s: float

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
    spans: Sequence[range | None] = pipeline.stages if pipeline is not None else (None,)
    sizes: list[StreamSize] = []
    for stage, span in enumerate(spans):
        # Made first: constants of modules that it imports must be real.
        opened, made = (method(plan.method, **plan.options) for _ in range(2))
        with torch.device("meta"):
            parameters = Llama(plan.model, span).named_parameters()
            shapes = {name: tuple(x.shape) for name, x in parameters}
            templates = opened.streams(ShapeReplica(shapes))
        suffix = "" if span is None else f"/{stage}"
        steps = _steps_between(made, shapes, [each.key.stream for each in templates])
        sizes += [
            _size(each, f"{each.key.stream}{suffix}", steps[each.key.stream], plan.run_seed)
            for each in templates
        ]
    return tuple(sizes)


def _size(template: Exchange, name: str, steps: float, seed: int) -> StreamSize:
    layout, paired = layout_of(template, seed), isinstance(template.group, RandomGroups)
    kind: Literal["mean", "gather", "pair"] = "pair" if paired else template.kind
    back = codec(template.return_codec) if kind == "mean" else None
    if layout.max_shard_bytes > MAX_CHUNK_BYTES:
        raise Usage(
            f"stream {name}",
            f"a shard of it takes up to {layout.max_shard_bytes:,} bytes, and a chunk holds"
            f" {MAX_CHUNK_BYTES:,}",
            "choose a codec of smaller granules, or a narrower model",
        )
    if len(layout.shards) > (most := max_shards(template.kind)):
        raise Usage(
            f"stream {name}",
            f"it has {len(layout.shards):,} shards, and a {template.kind} carries {most:,}",
            "choose a codec of fewer bytes, or a smaller model",
        )
    return StreamSize(
        name,
        kind,
        sum(part.count for shard in layout.shards for part in shard),
        len(layout.shards),
        layout.max_bytes(layout.codec),
        0 if back is None else layout.max_bytes(back),
        steps,
        template.deadline_s,
    )


def _steps_between(made: Method, shapes: Shapes, streams: Sequence[str]) -> dict[str, float]:
    """Return the local steps between two rounds of each stream.

    The method itself says so, in steps on small tensors of the same names in which every exchange
    is answered at once with its own contribution."""
    replica = ShapeReplica({name: tuple(min(side, 8) for side in x) for name, x in shapes.items()})
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
        taken={name: ((0, x.numel()),) for name, x in tensors.items()},
    )
