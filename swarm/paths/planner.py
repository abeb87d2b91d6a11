"""A planner of paths that skip and reorder stages, so that the last microbatch is back early.

SkipPipe (arXiv:2502.19913) searches each path alone and then resolves conflicts branch by branch,
in places in factorial time. Here all paths exist from the start and change a little at a time
(swarm/paths/draft.py): another server of a stage, two microbatches that trade a stop, two stages
swapped. Simulated annealing follows an estimate that costs microseconds, then the timetable
(swarm/paths/timetable.py) or any other judge. It begins with one path for all microbatches of a
lane, a small problem whose answer keeps lanes on their servers, then plans each on its own, from
there or from the plan that takes all in turn, whichever is better.

The estimate: a server with room for m microbatches needs at least the time for which it holds all
of its own, over m, and the time for which it computes. The server where a lane begins holds a
microbatch for its whole round trip.

Work is counted, never timed: the same seed and work give the same plan.
"""

import math
import random
from collections.abc import Callable, Sequence

from farflock.swarm.links import PeerId
from farflock.swarm.paths.draft import Draft, Instance
from farflock.swarm.paths.skippipe import BadPlan, Path, PathPlan, require_paths, require_timetable
from farflock.swarm.paths.timetable import BACKWARD_SHARE, LOSS_SHARE

WORK, MIN_WORK = 600, 4  # judged plans

_LEADS, _MIN_LEADS = 1_000, 12_000  # estimates per stop of the lanes' paths, and the minimum
_SHARED_WORK = 0.3  # of the work, spent with one path per lane
_MEAN_SHARE = 0.1  # of the mean in the cost: most changes leave the slowest alone
# Temperatures as shares of the start's cost: for estimates, for timetables, at the end.
_HOT, _WARM, _COLD = 0.3, 0.01, 0.001

PlanCost = Callable[[PathPlan], float]  # the seconds that a plan takes
_Stays = tuple[tuple[PeerId, float, float], ...]  # server, seconds held, seconds computed


def plan_paths(
    instance: Instance, seed: int, work: int = WORK, judge: PlanCost | None = None
) -> PathPlan:
    """Return a valid plan that takes little time, by `judge` or else by the planner's timetable.

    By that measure it is never worse than the plan that takes stages and servers in turn.
    """
    if work < MIN_WORK:
        raise ValueError(
            f"a planner cannot work with {work} judged plans; "
            f"allow at least {MIN_WORK}, usually {WORK}"
        )
    chance, judged = random.Random(seed), judge or _timed(instance)
    shared, own = Draft(instance, 1, chance), Draft(instance, instance.turns, chance)
    even, shared_work = own.plan(), max(1, int(_SHARED_WORK * work))
    stops = instance.terms.visited * len(shared.paths)
    _lead(shared, LaneBounds(instance), chance, max(_MIN_LEADS, _LEADS * stops))
    own.adopt(_anneal(shared, judged, chance, shared_work))
    if judged(even) < judged(own.plan()):
        own.adopt(even)
    best = _anneal(own, judged, chance, work - shared_work - 2)
    require(best, instance)
    return best


def require(plan: PathPlan, instance: Instance) -> None:
    """Raise `BadPlan` unless paths, balance and timetable keep all rules."""
    require_paths(plan, instance.serving, instance.terms)
    times = instance.timetable(plan)
    if not math.isfinite(times.makespan_s):
        raise BadPlan(
            "memory",
            f"{times.microbatches - len(times.finished_s)} microbatches wait for ever, "
            "each for room that another one takes",
            "give servers room for more, or forbid swaps",
        )
    require_timetable(times.works, instance.memory)


def _timed(instance: Instance) -> PlanCost:
    def judge(plan: PathPlan) -> float:
        times = instance.timetable(plan)
        return times.makespan_s + _MEAN_SHARE * times.mean_s

    return judge


def _lead(draft: Draft, estimate: "LaneBounds", chance: random.Random, steps: int) -> None:
    """Anneal by the estimate, and leave the best paths seen in the draft."""
    cost = best_cost = scale = estimate(draft.paths)
    best = list(draft.paths)
    for step in range(steps):
        change = draft.propose()
        if not change:
            continue
        back = draft.apply(change)
        new = estimate(draft.paths)
        if not _is_taken(new - cost, scale * _HOT * (_COLD / _HOT) ** (step / steps), chance):
            draft.apply(back)
            continue
        cost = new
        if cost < best_cost:
            best_cost, best = cost, list(draft.paths)
    draft.apply(dict(enumerate(best)))


def _anneal(draft: Draft, judge: PlanCost, chance: random.Random, work: int) -> PathPlan:
    """Anneal by the judge, asked at most `work` times; return the best plan seen."""
    best = draft.plan()
    cost = best_cost = judge(best)
    scale = cost if math.isfinite(cost) else 1.0
    for step in range(1, work):
        change = draft.propose()
        if not change:
            continue
        back = draft.apply(change)
        plan = draft.plan()
        new = judge(plan)
        if not _is_taken(new - cost, scale * _WARM * (_COLD / _WARM) ** (step / work), chance):
            draft.apply(back)
            continue
        cost = new
        if cost < best_cost:
            best_cost, best = cost, plan
    return best


def _is_taken(worse_by: float, heat: float, chance: random.Random) -> bool:
    return not worse_by > 0 or (heat > 0 and chance.random() < math.exp(-worse_by / heat))


class LaneBounds:
    """A lower bound on the slowest lane's time plus its delay by others, with one path per lane."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._at_once = min(instance.memory, instance.turns)
        self._known: dict[Path, _Stays] = {}

    def __call__(self, paths: Sequence[Path]) -> float:
        """Return the seconds for one path per lane."""
        known = [self._known.get(path) or self._learn(path) for path in paths]
        held_s = dict.fromkeys(self._instance.forward_s, 0.0)
        computed_s = held_s.copy()
        for stays in known:
            for peer, held, computed in stays:
                held_s[peer] += held
                computed_s[peer] += computed
        # A path's first server holds its microbatch from end to end; other visitors may delay it.
        lanes_s = [
            stays[-1][1] + sum([held_s[peer] - held for peer, held, _ in stays]) for stays in known
        ]
        longest_s = max(
            max(lanes_s) / self._at_once,
            max(held_s.values()) / self._instance.memory,
            max(computed_s.values()),
        )
        return self._instance.turns * (
            longest_s + _MEAN_SHARE * sum(lanes_s) / len(lanes_s) / self._at_once
        )

    def _learn(self, path: Path) -> _Stays:
        """Return for each stop, last first: its server, the seconds held without waits, and the
        seconds computed."""
        forward_s, transfer_s = self._instance.forward_s, self._instance.transfer_s
        first, last = path[0].peer, path[-1].peer
        loss_at = first if self._instance.head_is_first else last
        held_s = LOSS_SHARE * forward_s[loss_at]
        if loss_at != last:
            held_s += transfer_s[last][first] + transfer_s[first][last]
        stays, behind = [], None
        for stop in reversed(path):
            peer = stop.peer
            own_s = (1 + BACKWARD_SHARE) * forward_s[peer]
            held_s += own_s + (
                transfer_s[peer][behind] + transfer_s[behind][peer] if behind is not None else 0.0
            )
            stays.append((peer, held_s, own_s))
            behind = peer
        self._known[path] = tuple(stays)
        return self._known[path]
