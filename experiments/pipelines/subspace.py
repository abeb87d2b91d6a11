"""The gain of a subspace codec on a slow link.

The table has the seconds of a step with the bytes that our codecs really write, and the gain that
is left when more steps are needed (Protocol Models, arXiv:2506.01260, as measured by
ProtocolNanoGPT). The number of steps to the same loss is the source's: nothing is trained here.
"""

from typing import Annotated

import msgspec
import torch

from farflock.compression.activation import ActivationCodec, ActivationContext
from farflock.compression.activation_catalog import activation_codec
from farflock.compression.subspace import Basis
from farflock.experiments.pipelines.steps import one_f_one_b, step_s
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact
from farflock.swarm.protocol.depth import HopTime, PipelineTimes, StageTime

ID_BYTES = 2  # of a token's id, sent next to the payload; there are fewer than 65,536
WAYS = {
    "1F1B": (1, False),
    "1F1B twice as deep": (2, False),
    "1F1B, one line in and out": (1, True),
}

Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=100)]


class Size(Parameters, frozen=True, kw_only=True):
    """A pipeline, its links, a stage's seconds per microbatch, and steps to the same loss."""

    stages: Count = 8
    microbatches: Count = 64
    sequences: Count = 8  # of a microbatch
    length: Count = 1024
    width: Count = 1024
    rank: Count = 160
    bit_per_s: Annotated[float, msgspec.Meta(gt=0)]
    latency_s: Seconds
    computes_s: Annotated[list[Seconds], msgspec.Meta(min_length=1, max_length=8)]
    whole_steps: Count
    subspace_steps: Count


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate bytes per token, seconds per step, and gains."""
    rows: list[Row] = []
    basis = Basis.drawn(size.width, size.rank, seed=0)
    codecs = {
        "whole": activation_codec("bf16,bf16"),
        "subspace": activation_codec(f"subspace:{size.rank}", basis=basis),
    }
    sent = {name: written(codec, size, basis) for name, codec in codecs.items()}
    sent["subspace"] += ID_BYTES * size.sequences * size.length
    rows += [
        exact(f"{name}, bytes a token", each / (size.sequences * size.length))
        for name, each in sent.items()
    ]
    more = size.subspace_steps / size.whole_steps
    rows.append(exact("steps needed, subspace over whole (the source's)", more))
    for number, computes_s in enumerate(size.computes_s, 1):
        for way, (times, shared) in WAYS.items():
            taken = {
                name: step(size, each, computes_s, times, shared) for name, each in sent.items()
            }
            title = f"{way}, stage {computes_s:g} s"
            rows += [exact(f"{name}, {title}", taken_s) for name, taken_s in taken.items()]
            faster = taken["whole"] / taken["subspace"]
            rows += [
                exact(f"steps faster, {title}", faster),
                exact(f"net gain, {title}", faster / more),
            ]
        progress(number / len(size.computes_s))
    return Table(
        rows,
        f"{size.stages} stages, {size.microbatches} microbatches of {size.sequences} x "
        f"{size.length} tokens, {size.bit_per_s / 1e6:g} Mbit/s, {size.latency_s * 1e3:g} ms",
    )


def written(codec: ActivationCodec, size: Size, basis: Basis) -> int:
    """Return the bytes of one microbatch's payload, of values in the subspace."""
    shape = size.sequences, size.length, size.width
    inside = torch.randn(*shape[:2], size.rank, generator=torch.Generator().manual_seed(0))
    context = ActivationContext(shape, tokens=torch.zeros(shape[:2], dtype=torch.int32))
    return codec.encode(inside @ basis.columns_DK.T, context, bytearray())


def step(size: Size, message_bytes: int, computes_s: float, times: int, shared: bool) -> float:
    """Return a step's seconds with messages of this size each way, at `times` the depth of 1F1B.

    The forward pass is a third of the computing.
    """
    hop = HopTime(message_bytes * 8 / size.bit_per_s, size.latency_s)
    stage = StageTime(computes_s / 3, computes_s * 2 / 3)
    pipeline = PipelineTimes((stage,) * size.stages, (hop,) * (size.stages - 1))
    return step_s(
        pipeline, size.microbatches, one_f_one_b(size.stages, times), shared_access=shared
    )
