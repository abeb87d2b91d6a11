"""One step of a synchronous pipeline, event by event, to check formulas and schedules.

Links are full duplex: each direction of a hop sends one message after another, and latency only
delays their arrival. With `shared_access`, a machine has one line out and one line in for both
neighbours, so its forwards and gradients wait for each other.
"""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.protocol.depth import HopTime, PipelineTimes

Order = Literal["fixed", "backward_first"]
Kind = Literal["forward", "backward"]


@dataclass(slots=True)
class _Stage:
    """Waiting work, and counts of begun forwards and finished backwards."""

    forwards: int = 0  # waiting
    backwards: int = 0
    begun: int = 0
    finished: int = 0
    busy: bool = False


@dataclass(slots=True)
class _Step:
    pipeline: PipelineTimes
    microbatches: int
    depths: Sequence[int]
    order: Order
    shared_access: bool
    back: Sequence[HopTime]
    stages: list[_Stage] = field(init=False)
    # Time, serial number, stage, kind, and whether a message arrives (else work ends).
    events: list[tuple[float, int, int, Kind, bool]] = field(default_factory=list)
    free_s: dict[tuple[str, int, int], float] = field(default_factory=dict)  # by wire or line
    number: int = 0

    def __post_init__(self) -> None:
        self.stages = [_Stage() for _ in self.pipeline.stages]
        self.stages[0].forwards = self.microbatches

    def run(self) -> float:
        """Return the seconds until all microbatches are back."""
        now_s = 0.0
        self.begin(0, now_s)
        while self.events:
            now_s, _, stage, kind, arrives = heapq.heappop(self.events)
            if arrives:
                self.take(stage, kind)
            else:
                self.finish(stage, kind, now_s)
            self.begin(stage, now_s)
        assert all(stage.finished == self.microbatches for stage in self.stages), (
            "a stage waits forever"
        )
        return now_s

    def take(self, stage: int, kind: Kind) -> None:
        if kind == "forward":
            self.stages[stage].forwards += 1
        else:
            self.stages[stage].backwards += 1

    def finish(self, number: int, kind: Kind, now_s: float) -> None:
        stage, last = self.stages[number], len(self.stages) - 1
        stage.busy = False
        if kind == "backward":
            stage.finished += 1
            if number > 0:
                self.send(number, number - 1, kind, now_s)
        elif number < last:
            self.send(number, number + 1, kind, now_s)
        else:
            stage.backwards += 1  # its loss is known at once

    def begin(self, number: int, now_s: float) -> None:
        """Start the next work of a stage if it has arrived."""
        stage, times = self.stages[number], self.pipeline.stages[number]
        kind = self.next_kind(stage, self.depths[number])
        if stage.busy or kind is None:
            return
        stage.busy = True
        if kind == "forward":
            stage.forwards, stage.begun = stage.forwards - 1, stage.begun + 1
        else:
            stage.backwards -= 1
        takes_s = times.forward_s if kind == "forward" else times.backward_s + times.weight_s
        self.push(now_s + takes_s, number, kind, arrives=False)

    def next_kind(self, stage: _Stage, depth: int) -> Kind | None:
        may = stage.begun < self.microbatches and stage.begun - stage.finished < depth
        if self.order == "fixed":  # with room, a forward comes next, even if it is not there yet
            if may:
                return "forward" if stage.forwards else None
            return "backward" if stage.backwards else None
        if stage.backwards:
            return "backward"
        return "forward" if may and stage.forwards else None

    def send(self, source: int, target: int, kind: Kind, now_s: float) -> None:
        hop = (self.pipeline.hops if source < target else self.back)[min(source, target)]
        used = [("wire", source, target)]
        if self.shared_access:
            used += [("up", source, source), ("down", target, target)]
        start_s = max(now_s, *(self.free_s.get(line, 0.0) for line in used))
        self.free_s |= dict.fromkeys(used, start_s + hop.wire_s)
        self.push(start_s + hop.wire_s + hop.latency_s, target, kind, arrives=True)

    def push(self, when_s: float, stage: int, kind: Kind, arrives: bool) -> None:
        self.number += 1
        heapq.heappush(self.events, (when_s, self.number, stage, kind, arrives))


def step_s(
    pipeline: PipelineTimes,
    microbatches: int,
    depths: Sequence[int],
    order: Order = "fixed",
    shared_access: bool = False,
    back: Sequence[HopTime] | None = None,
) -> float:
    """Return the seconds of a step with at most `depths[s]` microbatches in flight at stage s.

    `fixed` is the order of 1F1B: as many forwards as there is room for, then a backward and a
    forward in turn; depths of p - s are 1F1B's own, depths of all microbatches are GPipe's.
    `backward_first` takes a gradient whenever there is one. Gradients take the pipeline's hops, or
    `back` if their size differs from that of activations. Raise `ValueError` unless each stage has
    a depth of at least 1, or if a fixed order would wait forever.
    """
    if microbatches < 1 or len(depths) != len(pipeline.stages) or min(depths) < 1:
        raise ValueError(
            f"{microbatches} microbatches and depths {tuple(depths)} make no step of "
            f"{len(pipeline.stages)} stages; give at least 1 microbatch, and a depth of at least 1 "
            "for each stage"
        )
    if order == "fixed" and any(
        depth < min(after, microbatches) for depth, after in itertools.pairwise(depths)
    ):
        raise ValueError(
            f"depths {tuple(depths)}: a stage would wait for more forward passes than the stage "
            "before it sends; give depths that never grow from stage to stage"
        )
    hops = pipeline.hops if back is None else back
    return _Step(pipeline, microbatches, depths, order, shared_access, hops).run()


def one_f_one_b(stages: int, times: int = 1) -> list[int]:
    """Return the depths of 1F1B, multiplied by `times`."""
    return [times * (stages - stage) for stage in range(stages)]
