"""The duration of a step by the number of microbatches in flight, if hops take longer than stages.

1F1B keeps as many in flight as there are stages, which is too few over a wide area
(swarm/protocol/depth.py). Stages compute nothing here, so all time is spent waiting for wires.
"""

from farflock.experiments.pipelines.steps import one_f_one_b, step_s
from farflock.experiments.pipelines.table import Parameters, Progress, Table, exact
from farflock.swarm.protocol.depth import HopTime, PipelineTimes, StageTime, gpipe_s


class Size(Parameters, frozen=True, kw_only=True):
    """A pipeline of equal hops; a microbatch sends `message_bytes` over each."""

    stages: int = 8
    microbatches: int = 64
    message_bytes: int = 1 << 24
    bit_per_s: float = 200e6
    latency_s: float = 0.05


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate the seconds of a step, by simulation and, where there is one, by formula."""
    hop = HopTime(size.message_bytes * 8 / size.bit_per_s, size.latency_s)
    idle = StageTime(0.0, 0.0)
    pipeline = PipelineTimes((idle,) * size.stages, (hop,) * (size.stages - 1))
    wanted = [
        pipeline.wanted_depth(stage) if stage < size.stages - 1 else 1
        for stage in range(size.stages)
    ]

    def simulated(depths: list[int], shared: bool = False, greedy: bool = False) -> float:
        return step_s(
            pipeline, size.microbatches, depths, "backward_first" if greedy else "fixed", shared
        )

    rows = [
        exact("wire alone", size.microbatches * hop.wire_s),
        exact("GPipe, formula", gpipe_s(size.stages, size.microbatches, hop, idle)),
        exact("GPipe", simulated([size.microbatches] * size.stages)),
        exact("1F1B", simulated(one_f_one_b(size.stages))),
        exact("1F1B, twice as deep", simulated(one_f_one_b(size.stages, 2))),
        exact("1F1B, three times as deep", simulated(one_f_one_b(size.stages, 3))),
        exact("as deep as wanted, bound", pipeline.step_bound_s(size.microbatches, wanted[0])),
        exact("as deep as wanted", simulated(wanted)),
        exact("as deep as wanted, backward first", simulated(wanted, greedy=True)),
        exact(
            "three times as deep, backward first",
            simulated(one_f_one_b(size.stages, 3), greedy=True),
        ),
        exact("1F1B, one line in and out", simulated(one_f_one_b(size.stages), shared=True)),
        exact(
            "1F1B, twice as deep, one line in and out",
            simulated(one_f_one_b(size.stages, 2), shared=True),
        ),
        exact("microbatches in flight that are wanted", wanted[0]),
    ]
    progress(1.0)
    return Table(
        rows, f"{size.stages} stages, {size.microbatches} microbatches of {hop.wire_s:.4f} s a hop"
    )
