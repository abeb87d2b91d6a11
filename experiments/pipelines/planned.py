"""Our planner on SkipPipe's released instance, next to its plan in its own simulation.

Both programs get the same problem: 20 nodes in six stages, paths through four of them, thirty
microbatches, and memory for three per node. The released simulation may forget a microbatch
(experiments/pipelines/skippipe.py), which makes a plan look short; here such a plan counts as
endless.
"""

import math
from collections.abc import Iterable, Sequence

from farflock.experiments.pipelines import released
from farflock.experiments.pipelines.released import Start
from farflock.experiments.pipelines.skippipe import simulate
from farflock.swarm.paths import planner as skip_planner
from farflock.swarm.paths.draft import Instance
from farflock.swarm.paths.skippipe import PathPlan, PlanTerms, StageKind, Stop
from farflock.swarm.paths.timetable import TransferTimes

VISITED = 4  # of six stages: a third is skipped
TURNS = 6  # microbatches of each data node
NAMES = tuple(f"node {number:02d}" for number in range(released.NODES))
# The data nodes also have the head, so that every stage takes and returns the same kind of value.
TERMS = PlanTerms((StageKind("hidden", "hidden"),) * len(released.PARTITION), VISITED)

Delays = Sequence[Sequence[float]]


def instance(delays_s: Delays, forward_s: float = released.FORWARD_S) -> Instance:
    """Return the released instance with these delays."""
    return Instance(
        serving=tuple(tuple(NAMES[node] for node in nodes) for nodes in released.PARTITION),
        terms=TERMS,
        forward_s=dict.fromkeys(NAMES, forward_s),
        transfer_s=transfer_s(delays_s),
        memory=released.MEMORY,
        turns=TURNS,
        per_step=TURNS,
    )


def transfer_s(delays_s: Delays) -> TransferTimes:
    """Return the matrix of delays keyed by node names."""
    return {
        name: dict(zip(NAMES, row, strict=True)) for name, row in zip(NAMES, delays_s, strict=True)
    }


def as_plan(lanes: Iterable[Sequence[released.Path]], turns: int = TURNS) -> PathPlan:
    """Return a plan with `turns` microbatches per lane, which take the lane's paths in turn."""
    return PathPlan(
        tuple(tuple(_stops(paths[turn % len(paths)]) for turn in range(turns)) for paths in lanes),
        turns,
    )


def _stops(path: released.Path) -> tuple[Stop, ...]:
    return tuple(Stop(released.STAGE_OF[node], NAMES[node]) for node in path)


def starts(plan: PathPlan) -> list[Start]:
    """Return a plan's microbatches, started like those of the released collision-aware plan."""
    lanes = [
        tuple(tuple(NAMES.index(stop.peer) for stop in path) for path in paths)
        for paths in plan.lanes
    ]
    return list(released.planned_starts({paths[0][0]: paths for paths in lanes}))


def simulated_s(plan: PathPlan, delays_s: Delays, forward_s: float = released.FORWARD_S) -> float:
    """Return a plan's makespan in the released simulation; infinite if it forgets a microbatch."""
    outcome = simulate(starts(plan), delays_s, forward_s)
    return math.inf if outcome.forgotten else outcome.makespan_s


def judged(seed: int, work: int, forward_s: float = released.FORWARD_S) -> PathPlan:
    """Return our planner's plan, with the released simulation as its judge."""
    delays_s = released.delays_s()
    wanted = instance(delays_s, forward_s)
    return skip_planner.plan_paths(
        wanted, seed, work, lambda plan: simulated_s(plan, delays_s, forward_s)
    )


def theirs_over_ours(seed: int, work: int, forward_s: float) -> float:
    """Return the released collision-aware plan's time over ours, in the released simulation."""
    plans = as_plan(released.COLLISION_AWARE.values()), judged(seed, work, forward_s)
    theirs_s, ours_s = (simulated_s(plan, released.delays_s(), forward_s) for plan in plans)
    return theirs_s / ours_s
