"""Tokens per second by bandwidth and activation codec, for GPT2-XL in eight stages.

The setting is that of AQ-SGD (arXiv:2206.01299) and TAH-Quant (arXiv:2506.01352). Bytes are those
that our codecs write; a step is simulated in GPipe's order, as in AQ-SGD's released code. A stage's
computing time comes from the recipe; it is derived from the fastest published number, not measured.
AQ-SGD sends each sample whole the first time, so its bytes are the mean over visits.
"""

import statistics
from typing import Annotated

import msgspec
import torch

from farflock.compression.activation import ActivationCodec, ActivationContext
from farflock.compression.activation_catalog import activation_codec
from farflock.experiments.pipelines.steps import step_s
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact
from farflock.swarm.protocol.depth import HopTime, PipelineTimes, StageTime

Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class Size(Parameters, frozen=True, kw_only=True):
    """The model's shapes, links in Mbit/s from slow to fast, codecs, and epochs (`visits`)."""

    stages: Count = 8
    microbatches: Count = 32
    length: Count = 1024
    width: Count = 1600
    latency_s: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    stage_s: Annotated[float, msgspec.Meta(gt=0, le=100)]
    visits: Annotated[int, msgspec.Meta(ge=1, le=100)] = 10
    mbit_per_s: Annotated[list[float], msgspec.Meta(min_length=2, max_length=16)]
    codecs: Annotated[list[str], msgspec.Meta(min_length=2, max_length=16)]


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate bits per value each way, tokens per second, and their ratios to the first codec."""
    rows: list[Row] = []
    sent = {name: written(name, size) for name in size.codecs}
    for name, (forward, backward) in sent.items():
        rows += [exact(f"{name}, bits a value forward", 8 * forward / (size.length * size.width))]
        rows += [exact(f"{name}, bits a value back", 8 * backward / (size.length * size.width))]
    for number, mbit in enumerate(size.mbit_per_s, 1):
        rates = {name: rate(size, *each, mbit) for name, each in sent.items()}
        rows += [exact(f"{name}, {mbit:g} Mbit/s", tokens) for name, tokens in rates.items()]
        first = rates[size.codecs[0]]
        rows += [
            exact(f"{name} over {size.codecs[0]}, {mbit:g} Mbit/s", rates[name] / first)
            for name in size.codecs[1:]
        ]
        progress(number / len(size.mbit_per_s))
    return Table(
        rows,
        f"{size.stages} stages of {size.stage_s:g} s a microbatch, "
        f"{size.microbatches} microbatches of {size.length} tokens of width {size.width}",
    )


def written(name: str, size: Size) -> tuple[float, float]:
    """Return a microbatch's bytes forward (the mean over visits) and backward."""
    codec = activation_codec(name, edge="edge")
    shape, chance = (1, size.length, size.width), torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=chance)
    forward = [_forward(codec, values + visit / 100, visit) for visit in range(size.visits)]
    back = ActivationContext(shape, samples=(0,), edge="edge", direction="backward")
    return statistics.fmean(forward), codec.encode_grad(values, back, bytearray())


def _forward(codec: ActivationCodec, values: torch.Tensor, epoch: int) -> int:
    shape = values.shape[0], values.shape[1], values.shape[2]
    return codec.encode(
        values, ActivationContext(shape, samples=(0,), edge="edge", epoch=epoch), bytearray()
    )


def rate(size: Size, forward_bytes: float, back_bytes: float, mbit: float) -> float:
    """Return the tokens per second at this bandwidth, for messages of these sizes."""
    forward, back = (
        HopTime(each * 8 / (mbit * 1e6), size.latency_s) for each in (forward_bytes, back_bytes)
    )
    stage = StageTime(size.stage_s / 3, size.stage_s * 2 / 3)
    pipeline = PipelineTimes((stage,) * size.stages, (forward,) * (size.stages - 1))
    all_at_once, hops_back = [size.microbatches] * size.stages, (back,) * (size.stages - 1)
    taken_s = step_s(pipeline, size.microbatches, all_at_once, back=hops_back)
    return size.microbatches * size.length / taken_s
