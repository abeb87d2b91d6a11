"""The number of microbatches in flight over slow links, and a lower bound on the time of a step.

1F1B keeps one per stage in flight, which is enough if hops cost nothing. Over a wide area network a
microbatch is in transit for much longer than the slowest stage computes on it, and the depth must
cover that time.

Formulas of synchronous pipelines (GPipe, arXiv:1811.06965; PipeDream-Flush, arXiv:2006.09503) with
a wire time and a latency per hop. Links are full duplex; a wire is busy while it sends, latency
only delays.
"""

import collections
import math
from dataclasses import dataclass, field

_ROUNDING = 1e-9  # a ratio this near to an integer counts as one
# Servers are chosen regardless of queues: with two thirds of what is in flight queued, no server is
# idle.
SLACK = 3.0
ALPHA = 0.1  # weight of a new round trip in the moving average
MIN_ENDS = 8  # microbatches needed to measure a rate


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds per microbatch of forward pass, input gradient and weight gradient."""

    forward_s: float
    backward_s: float
    weight_s: float = 0.0

    def __post_init__(self) -> None:
        _check_times(self.forward_s, self.backward_s, self.weight_s)

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s + self.weight_s


@dataclass(frozen=True, slots=True)
class HopTime:
    """Seconds that a microbatch keeps a wire busy, then is in transit, in one direction."""

    wire_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        _check_times(self.wire_s, self.latency_s)


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """The times of stages and of the hops between them: `hops[s]` joins stages `s` and `s + 1`."""

    stages: tuple[StageTime, ...]
    hops: tuple[HopTime, ...]

    def __post_init__(self) -> None:
        if not self.stages or len(self.hops) != len(self.stages) - 1:
            raise ValueError(
                f"{len(self.stages)} stages and {len(self.hops)} hops; "
                "give at least one stage, and one hop between each two"
            )

    def round_trip_s(self, stage: int = 0) -> float:
        """R_s: the time from a microbatch's start at a stage to the end of its backward there."""
        there_and_back_s = 2 * math.fsum(hop.wire_s + hop.latency_s for hop in self.hops[stage:])
        return there_and_back_s + math.fsum(times.total_s for times in self.stages[stage:])

    @property
    def bottleneck_s(self) -> float:
        """The least time between two microbatches: that of the slowest stage or wire."""
        return max(
            *(times.total_s for times in self.stages), *(hop.wire_s for hop in self.hops), 0.0
        )

    def wanted_depth(self, stage: int = 0) -> int:
        """K*: the fewest microbatches in flight from this stage on that keep it from waiting."""
        if not self.bottleneck_s:
            raise ValueError(
                "no stage and no wire takes any time, so no depth keeps one busy; "
                "give at least one of them a time above 0"
            )
        return max(1, math.ceil(self.round_trip_s(stage) / self.bottleneck_s - _ROUNDING))

    def depth(self, stage: int, memory: int) -> int:
        """K_s: `wanted_depth`, capped by the `memory` microbatches that a server can keep."""
        if memory < 1:
            raise ValueError(
                f"a server of stage {stage} has room for {memory} microbatches; it needs at least 1"
            )
        return min(memory, self.wanted_depth(stage))

    def step_bound_s(self, microbatches: int, in_flight: int) -> float:
        """Return the least time of a step, with at most `in_flight` microbatches out at stage 0.

        This is the greatest of three bounds. A place in flight makes its round trips one after the
        other. A wire sends all microbatches, and one of them also makes the rest of its trip. A
        stage computes on all microbatches, after the first has come to it and before the last goes
        back from it."""
        if microbatches < 1 or in_flight < 1:
            raise ValueError(
                f"a step of {microbatches} microbatches with {in_flight} in flight; "
                "both must be at least 1"
            )
        trip_s = self.round_trip_s()
        waits = [math.ceil(microbatches / in_flight) * trip_s]
        waits += [trip_s + (microbatches - 1) * hop.wire_s for hop in self.hops]
        waits += [
            trip_s - self.round_trip_s(stage) + microbatches * times.total_s
            for stage, times in enumerate(self.stages)
        ]
        return max(waits)


@dataclass(slots=True)
class Depth:
    """K* as one trainer measures it, from `min_depth` to `max_depth` microbatches in flight.

    The bottleneck is the time between two of its microbatches coming back; the round trip is the
    time of one in passes and in transit, without queues, which the depth itself causes. The rate
    grows with what is in flight until the slowest stage is busy, and so does the wanted depth: it
    doubles each round trip, then stays. `SLACK` is our own; without it a depth of one would stay
    one."""

    min_depth: int
    max_depth: int
    wanted: int = 0
    _trip_s: float | None = None
    _ends_s: collections.deque[float] = field(default_factory=collections.deque)

    def __post_init__(self) -> None:
        if not 1 <= self.min_depth <= self.max_depth:
            raise ValueError(
                f"a depth of {self.min_depth} to {self.max_depth} microbatches is not a range; "
                "choose a minimum of at least 1 and no more than the maximum"
            )
        self.wanted = self.min_depth

    def came_back(self, now_s: float, trip_s: float) -> None:
        """Note a microbatch that came back at `now_s` after `trip_s` without queueing."""
        self._trip_s = (
            trip_s if self._trip_s is None else self._trip_s + ALPHA * (trip_s - self._trip_s)
        )
        self._ends_s.append(now_s)
        # About one round trip's worth: long enough to average over, short enough to be recent.
        while len(self._ends_s) > max(MIN_ENDS, self.wanted) + 1:
            self._ends_s.popleft()
        taken_s = now_s - self._ends_s[0]
        if len(self._ends_s) > MIN_ENDS and taken_s > 0:
            wanted = math.ceil(SLACK * self._trip_s * (len(self._ends_s) - 1) / taken_s - _ROUNDING)
            self.wanted = min(max(wanted, self.min_depth), self.max_depth)


def gpipe_s(stages: int, microbatches: int, hop: HopTime, times: StageTime) -> float:
    """Return the time of a GPipe step with equal stages and hops: all forwards, then all backwards.

    At zero compute this is 2 [(p - 1) (x + l) + (M - 1) x]."""
    if stages < 1 or microbatches < 1:
        raise ValueError(
            f"a step of {stages} stages and {microbatches} microbatches; both must be at least 1"
        )
    wire_s = hop.wire_s if stages > 1 else 0.0
    way_s = (stages - 1) * (hop.wire_s + hop.latency_s)
    forward_s = way_s + stages * times.forward_s + (microbatches - 1) * max(times.forward_s, wire_s)
    back_s = times.backward_s + times.weight_s
    return forward_s + way_s + stages * back_s + (microbatches - 1) * max(back_s, wire_s)


def _check_times(*times_s: float) -> None:
    if not all(0 <= time_s < math.inf for time_s in times_s):
        raise ValueError(f"times of {times_s} s; each must be finite and not negative")
