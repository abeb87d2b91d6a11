"""The share of its time that a stage computes, by layer width and round trip to its trainer.

SWARM's table (arXiv:2301.11913, section 4.1) is computed by the formula that fits its numbers,
T / (A + RTT), where T is computing time and A the total without latency, and by a simulated stage
with one microbatch at a time; then, beyond the paper, with as many in flight as hide the round
trip.
"""

from typing import Annotated

import msgspec

from farflock.experiments.pipelines.steps import step_s
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact
from farflock.swarm.protocol.depth import HopTime, PipelineTimes, StageTime

Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Layers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of layer: a stage's computing time per microbatch, and its total without latency."""

    computes_ms: Milliseconds
    all_ms: Milliseconds


class Size(Parameters, frozen=True, kw_only=True):
    """Kinds of layers, round trips, and the number of microbatches of a simulated stage."""

    layers: dict[str, Layers]
    round_trips_ms: list[Milliseconds]
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 200


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate the percentage of time spent computing, for each kind and round trip."""
    rows: list[Row] = []
    for number, (kind, layers) in enumerate(size.layers.items(), 1):
        for round_trip_ms in size.round_trips_ms:
            name = f"{kind}, {round_trip_ms:g} ms"
            hidden = stage(layers, round_trip_ms)
            formula = layers.computes_ms / (layers.all_ms + round_trip_ms)
            rows += [
                exact(name, 100 * formula),
                exact(f"{name}, simulated", 100 * busy(hidden, size.microbatches, 1)),
                exact(
                    f"{name}, deeper", 100 * busy(hidden, size.microbatches, hidden.wanted_depth())
                ),
            ]
        progress(number / len(size.layers))
    return Table(rows, f"{size.microbatches} microbatches a simulated stage")


def stage(layers: Layers, round_trip_ms: float) -> PipelineTimes:
    """Return a pipeline of an idle trainer and a stage, whose other time is transfer, half each
    way."""
    wire_s = (layers.all_ms - layers.computes_ms) / 2e3
    times = StageTime(0.0, 0.0), StageTime(layers.computes_ms / 1e3, 0.0)
    return PipelineTimes(times, (HopTime(wire_s, round_trip_ms / 2e3),))


def busy(pipeline: PipelineTimes, microbatches: int, in_flight: int) -> float:
    """Return the share of a step in which the stage computes."""
    taken_s = step_s(pipeline, microbatches, [in_flight, in_flight], "backward_first")
    return microbatches * pipeline.stages[1].total_s / taken_s
