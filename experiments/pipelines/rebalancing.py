"""A swarm's speed under churn if one server per period moves to where it is needed most.

The product's own rule runs on traces of joins and departures (SWARM, arXiv:2301.11913, section 4.4
and table 4). The measure is the slowest stage's speed, relative to that with servers spread evenly.
The rule sees queues: their means in a closed network in which a fixed number of microbatches
circulates (mean value analysis, Reiser and Lavenberg, 1980).

Deviation: the paper replays a log of preemptible machines that was not published. Here joins are
Poisson, lifetimes exponential, and the expected number of servers stays constant.
"""

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np

from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, sampled
from farflock.swarm.links import PeerId
from farflock.swarm.protocol.rebalance import (
    MIN_RESIDENCE_S,
    LoadSnapshot,
    RebalanceRule,
    ServerLoad,
    next_move,
    snapshot_number,
)

HOUR_S = 3600.0

Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Event = tuple[float, Literal["join", "leave"], PeerId, int]  # time, kind, peer, stage


class Size(Parameters, frozen=True, kw_only=True):
    """A swarm and its churn; at each period, the rule runs as in the product and as published."""

    stages: Count = 32
    servers: Count = 400
    lifetime_h: Annotated[float, msgspec.Meta(gt=0, le=1000)] = 16.0
    hours: Annotated[float, msgspec.Meta(ge=2, le=1000)] = 32.0
    in_flight: Count = 128  # microbatches that circulate
    periods_s: list[Annotated[float, msgspec.Meta(ge=1, le=86_400)]]
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=100)]


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate percentages of the best throughput by policy: overall, in the first and last
    hour."""
    policies: dict[str, tuple[float, RebalanceRule] | None] = {"none": None}
    for period_s in size.periods_s:
        policies[f"{period_s:g} s"] = period_s, RebalanceRule()
        policies[f"{period_s:g} s, as published"] = (
            period_s,
            RebalanceRule("queue", hysteresis=0.0, min_residence_s=0.0),
        )
    spans = {
        "overall": (0.0, size.hours),
        "first hour": (0.0, 1.0),
        "last hour": (size.hours - 1, size.hours),
    }
    found: dict[str, list[float]] = {f"{name}, {span}": [] for name in policies for span in spans}
    for number, seed in enumerate(size.seeds):
        events = list(trace(size, random.Random(seed)))
        for at, (name, policy) in enumerate(policies.items()):
            speeds = played(size, events, policy)
            for span, (begin_h, end_h) in spans.items():
                found[f"{name}, {span}"].append(
                    100 * share(speeds, begin_h * HOUR_S, end_h * HOUR_S)
                )
            progress((number + (at + 1) / len(policies)) / len(size.seeds))
    rows: list[Row] = [sampled(name, values) for name, values in found.items()]
    return Table(
        rows,
        f"{size.servers} servers in {size.stages} stages, "
        f"{len(size.seeds)} traces of {size.hours:g} h",
    )


def trace(size: Size, chance: random.Random) -> Iterator[Event]:
    """Yield a swarm's events in order; servers begin evenly spread, and newcomers go anywhere."""
    lifetime_s, end_s = size.lifetime_h * HOUR_S, size.hours * HOUR_S
    leaving = [
        (chance.expovariate(1 / lifetime_s), PeerId(f"{number:06}"), number % size.stages)
        for number in range(size.servers)
    ]
    for _, peer, stage in list(leaving):
        yield 0.0, "join", peer, stage
    heapq.heapify(leaving)
    number, joins_s = size.servers, chance.expovariate(size.servers / lifetime_s)
    while min(joins_s, leaving[0][0] if leaving else math.inf) < end_s:
        if leaving and leaving[0][0] < joins_s:
            leaves_s, peer, stage = heapq.heappop(leaving)
            yield leaves_s, "leave", peer, stage
            continue
        peer, stage = PeerId(f"{number:06}"), chance.randrange(size.stages)
        yield joins_s, "join", peer, stage
        heapq.heappush(leaving, (joins_s + chance.expovariate(1 / lifetime_s), peer, stage))
        number, joins_s = number + 1, joins_s + chance.expovariate(size.servers / lifetime_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """The servers of the smallest stage from a moment on, and of each stage in an even spread."""

    since_s: float
    smallest: int
    best: int


class _Swarm:
    """The servers of each stage, with the time of their arrival."""

    def __init__(self, stages: int) -> None:
        self.stages: list[dict[PeerId, float]] = [{} for _ in range(stages)]
        self.where: dict[PeerId, int] = {}

    def join(self, peer: PeerId, stage: int, now_s: float) -> None:
        self.stages[stage][peer] = now_s
        self.where[peer] = stage

    def leave(self, peer: PeerId) -> None:
        del self.stages[self.where.pop(peer)][peer]

    def speed(self, now_s: float) -> Speed:
        return Speed(now_s, min(map(len, self.stages)), len(self.where) // len(self.stages))

    def rebalance(self, number: int, rule: RebalanceRule, in_flight: int, now_s: float) -> None:
        """Make the move that every server computes from the same snapshot."""
        counts = [len(stage) for stage in self.stages]
        if max(counts) - min(counts) < 2:
            return  # even: no move can make the slowest stage faster, and computing queues is slow
        waiting = queues(counts, in_flight)
        stages = tuple(
            tuple(
                ServerLoad(peer, waiting[at] / len(stage), 1.0, 1, now_s - since_s)
                for peer, since_s in stage.items()
            )
            for at, stage in enumerate(self.stages)
        )
        move = next_move(LoadSnapshot(number, stages, (1,) * len(stages)), rule)
        if move is not None:
            self.leave(move.peer)
            self.join(move.peer, move.target, now_s)


def played(
    size: Size, events: Sequence[Event], policy: tuple[float, RebalanceRule] | None
) -> list[Speed]:
    """Replay a trace and return the swarm's speeds; its first servers may move at once."""
    swarm, speeds = _Swarm(size.stages), []
    period_s, rule = policy or (math.inf, RebalanceRule())
    next_s = period_s
    for when_s, what, peer, stage in [*events, (size.hours * HOUR_S, "leave", PeerId(""), 0)]:
        while next_s <= when_s:
            swarm.rebalance(snapshot_number(next_s, period_s), rule, size.in_flight, next_s)
            speeds.append(swarm.speed(next_s))
            next_s += period_s
        if not peer:
            break
        if what == "join":
            swarm.join(peer, stage, when_s - (MIN_RESIDENCE_S if when_s == 0 else 0))
        else:
            swarm.leave(peer)
        speeds.append(swarm.speed(when_s))
    return speeds


def share(speeds: Sequence[Speed], begin_s: float, end_s: float) -> float:
    """Return the work done between two moments as a share of what an even spread would do."""
    done = possible = 0.0
    for at, speed in enumerate(speeds):
        until_s = speeds[at + 1].since_s if at + 1 < len(speeds) else end_s
        lasts_s = max(0.0, min(until_s, end_s) - max(speed.since_s, begin_s))
        done, possible = done + lasts_s * speed.smallest, possible + lasts_s * speed.best
    return done / possible if possible else 0.0


def queues(servers: Sequence[int], in_flight: int) -> list[float]:
    """Return the mean number of microbatches at each stage when `in_flight` of them circulate.

    Servers are equally fast, and a stage counts as one server of their summed speed. If there are
    stages without servers, all microbatches wait there.
    """
    if not all(servers):
        return [in_flight / servers.count(0) if not count else 0.0 for count in servers]
    service_s, waiting = 1 / np.asarray(servers, np.float64), np.zeros(len(servers))
    for count in range(1, in_flight + 1):
        stays_s = service_s * (1 + waiting)
        waiting = count / stays_s.sum() * stays_s
    return [float(one) for one in waiting]
