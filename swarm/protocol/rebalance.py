"""The next move of a server to another stage: a pure function of one numbered snapshot.

All servers compute the same move without a coordinator (SWARM, arXiv:2301.11913, section 3.2,
"adaptive swarm rebalancing"). Joins and deaths leave some stages short of servers, and the slowest
stage slows the run. Once a period, one server of the least loaded stage moves to the most loaded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from farflock.swarm.links import PeerId

PERIOD_S = 300.0  # one move per period, so that the loads show its effect before the next
HYSTERESIS = 0.25  # a smaller difference between two stages is noise in their queues
MIN_RESIDENCE_S = 300.0  # at least the time to download a stage's state

LoadMeasure = Literal["wait", "queue"]


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """A server's report: `queue` microbatches waiting (a mean may be fractional), `rate`
    microbatches per second, `memory_bytes` for a stage, `resident_s` in its stage so far."""

    peer: PeerId
    queue: float
    rate: float
    memory_bytes: int
    resident_s: float

    def __post_init__(self) -> None:
        if not (
            0 <= self.queue < math.inf
            and 0 < self.rate < math.inf
            and self.memory_bytes >= 0 <= self.resident_s
        ):
            raise ValueError(
                f"{self} is not a load; give a finite queue >= 0, a finite rate > 0, "
                "memory >= 0 and residence >= 0"
            )


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The servers of each stage in period `number`, in any order, and the bytes each stage needs.

    `replicas` counts the full replicas, which hold all stages and never move."""

    number: int
    stages: tuple[tuple[ServerLoad, ...], ...]
    needs_bytes: tuple[int, ...]
    replicas: int = 0

    def __post_init__(self) -> None:
        if len(self.stages) != len(self.needs_bytes):
            raise ValueError(
                f"{len(self.stages)} stages, but the memory needs of {len(self.needs_bytes)}; "
                "give one for each stage"
            )
        peers = [server.peer for servers in self.stages for server in servers]
        if len(set(peers)) != len(peers):
            raise ValueError("a server is listed in two stages; keep its newest record only")


@dataclass(frozen=True, slots=True)
class Move:
    """`peer` leaves stage `source` for stage `target`, as computed from snapshot `number`."""

    number: int
    peer: PeerId
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class RebalanceRule:
    """A rule for moves. `load` is "wait", the seconds in which a stage works off its queue, or
    "queue", its raw length as in the paper."""

    load: LoadMeasure = "wait"
    hysteresis: float = HYSTERESIS
    min_residence_s: float = MIN_RESIDENCE_S

    def __post_init__(self) -> None:
        if not (0 <= self.hysteresis < math.inf and self.min_residence_s >= 0):
            raise ValueError(f"{self}: hysteresis and residence must not be negative")


def snapshot_number(now_s: float, period_s: float = PERIOD_S) -> int:
    """Return the number of the period of `now_s`, in run time.

    Peers in the same period use the same snapshot."""
    if not 0 < period_s < math.inf:
        raise ValueError(f"a period of {period_s} s; it must be positive and finite")
    return math.floor(now_s / period_s)


def next_move(snapshot: LoadSnapshot, rule: RebalanceRule | None = None) -> Move | None:
    """Return the one move of this period, or None.

    The server with the least to do moves from the stage with the least load to the one with the
    greatest; ties by summed rate, then stage number, and by peer id. No move takes the last server
    of a stage, one that has not served for `min_residence_s`, or one too small for the new stage.

    Deviations from the paper: the load is a time, a stage must be `hysteresis` more loaded than the
    other, and the source must keep more speed than the target had. The last makes every move raise
    the lesser of the two speeds: whatever the queues are, moves alone can never go in a circle. If
    the least loaded stage can spare no server, the next one is considered. A stage without servers
    is the most loaded, and no residence is required to come to its help."""
    rule = rule or RebalanceRule()
    if not snapshot.stages:
        return None
    loads = [_load(servers, rule.load) for servers in snapshot.stages]
    rates = [_rate(servers) for servers in snapshot.stages]
    target = min(range(len(loads)), key=lambda stage: (-loads[stage], rates[stage], stage))
    for source in sorted(range(len(loads)), key=lambda stage: (loads[stage], -rates[stage], stage)):
        if not loads[target] > (1 + rule.hysteresis) * loads[source]:
            return None
        movers = _movers(snapshot, rule, source, target, rates)
        idlest_first = sorted(movers, key=lambda one: (_load([one], rule.load), one.peer))
        if idlest_first:
            return Move(snapshot.number, idlest_first[0].peer, source, target)
    return None


def _movers(
    snapshot: LoadSnapshot, rule: RebalanceRule, source: int, target: int, rates: Sequence[float]
) -> Iterator[ServerLoad]:
    """Yield the servers that may move from `source` to `target`."""
    servers = snapshot.stages[source]
    is_emergency = not snapshot.stages[target]
    for server in servers:
        stays = [other for other in servers if other is not server]
        if (
            _rate(stays) > rates[target]  # no rate is 0, so a stage's last server stays
            and server.memory_bytes >= snapshot.needs_bytes[target]
            and (is_emergency or server.resident_s >= rule.min_residence_s)
        ):
            yield server


def _load(servers: Sequence[ServerLoad], load: LoadMeasure) -> float:
    """Return a stage's load, infinite without servers; `fsum` is exact in any input order."""
    if not servers:
        return math.inf
    queue = math.fsum(server.queue for server in servers)
    return queue / _rate(servers) if load == "wait" else queue


def _rate(servers: Sequence[ServerLoad]) -> float:
    return math.fsum(server.rate for server in servers)
