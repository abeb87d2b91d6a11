"""Plans of paths that skip stages or swap two of them: their form, their rules, and their policy.

Where a stage has several servers, a microbatch may visit K of S stages, for fewer hops that avoid
slow links (SkipPipe, arXiv:2502.19913). The model tolerates it if every stage is trained equally
often and stages only change places with a neighbour; servers do if none holds more microbatches
than fit or is needed twice at a time. A plan that breaks a rule is refused here, before anything
runs.

Deviations from the released code: visits of a stage are held to the mean ± 1, not only below a cap;
its further limit on how far a path may run ahead (four stages) is left out, since among paths that
the rules for swaps and skips allow it only forbids skips of more than three stages; and a path need
not return to its start if the last stage has the head.
"""

import collections
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.paths.policy import FixedPaths, Microbatch, StageServers

MAX_DISPLACED = 2  # stages of a path out of their place among those visited
MAX_DISPLACEMENT = 1  # places that each of them is away
_ROUNDING_S = 1e-9  # rounding error of sums of seconds

PlanRule = Literal[
    "horizon",
    "stage's server",
    "first stage",
    "one visit",
    "skip ratio",
    "swap bound",
    "swap of unequal stages",
    "missing stage",
    "stage balance",
    "memory",
    "collision",
]


class BadPlan(ValueError):
    """A plan that breaks a rule; the message gives the rule, the reason and a remedy."""

    def __init__(self, rule: PlanRule, why: str, remedy: str) -> None:
        super().__init__(f"{rule}: {why}; {remedy}")
        self.rule, self.why, self.remedy = rule, why, remedy


@dataclass(frozen=True, slots=True)
class StageKind:
    """A stage's input, output and weight shapes; only stages of equal kind may change places."""

    takes: str
    gives: str
    shapes: tuple[tuple[int, ...], ...] = ()


class Stop(msgspec.Struct, frozen=True, gc=False):
    """A stage of a path and its server: a peer, or a place among the stage's servers."""

    stage: int
    peer: PeerId

    def server(self, serving: StageServers) -> PeerId | None:
        """Return the peer of this stop; None if no server has that place."""
        _, colon, place = self.peer.partition(":")
        return serving.at(self.stage, int(place)) if colon else self.peer


def place_name(stage: int, place: int) -> str:
    """Return the stand-in for a peer known only by its place; no peer's id has a colon."""
    return f"{stage}:{place}"


Path = tuple[Stop, ...]


@dataclass(frozen=True, slots=True)
class PathPlan:
    """A plan: `lanes[lane][turn]` is the path of a lane's microbatch.

    A lane starts `per_step` microbatches a step on its paths in turn, over and over. One pass over
    them is the horizon over which visits are balanced.
    """

    lanes: tuple[tuple[Path, ...], ...]
    per_step: int

    def __post_init__(self) -> None:
        lengths = {len(paths) for paths in self.lanes}
        if len(lengths) != 1 or 0 in lengths or self.per_step < 1:
            raise BadPlan(
                "horizon",
                f"lanes of {sorted(lengths)} paths, with {self.per_step} microbatches per step",
                "give every lane equally many paths and every step microbatches, at least one",
            )

    def path(self, microbatch: Microbatch) -> Path:
        """Return the path of a microbatch; lanes beyond those planned share the paths of others."""
        paths = self.lanes[microbatch.lane % len(self.lanes)]
        return paths[(microbatch.step * self.per_step + microbatch.index) % len(paths)]

    @property
    def paths(self) -> list[Path]:
        """All paths of the horizon."""
        return [path for paths in self.lanes for path in paths]

    @property
    def pinned(self) -> bool:
        """True if a lane's microbatches all take one path."""
        return all(len(set(paths)) == 1 for paths in self.lanes)


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """Terms of a plan: the stages, and how many of them a path visits (K)."""

    kinds: tuple[StageKind, ...]
    visited: int

    def __post_init__(self) -> None:
        if not len(self.needed) <= self.visited <= len(self.kinds):
            raise BadPlan(
                "skip ratio",
                f"paths cannot visit {self.visited} of {len(self.kinds)} stages: "
                f"no path may skip {len(self.needed)} of them",
                f"choose {len(self.needed)} to {len(self.kinds)} stages",
            )

    @property
    def needed(self) -> tuple[int, ...]:
        """Stages on every path: the first, and any whose output and input differ in kind."""
        return tuple(
            stage for stage, kind in enumerate(self.kinds) if stage == 0 or kind.takes != kind.gives
        )

    @property
    def optional(self) -> tuple[int, ...]:
        """The stages that a path may skip."""
        needed = self.needed
        return tuple(stage for stage in range(len(self.kinds)) if stage not in needed)

    def mean_visits(self, microbatches: int) -> float:
        """Return each optional stage's equal share of visits: M (K - needed) / (S - needed)."""
        optional = len(self.optional)
        return microbatches * (self.visited - len(self.needed)) / optional if optional else 0.0


def require_paths(plan: PathPlan, serving: Sequence[Collection[PeerId]], terms: PlanTerms) -> None:
    """Raise `BadPlan` if a path or the balance breaks a rule; `serving[stage]` are its servers."""
    for path in plan.paths:
        for stop in path:
            if not 0 <= stop.stage < len(serving) or stop.peer not in serving[stop.stage]:
                raise BadPlan(
                    "stage's server",
                    f"a path goes to {stop.peer} for stage {stop.stage}, which it does not serve",
                    "plan again for the present servers",
                )
        require_order([stop.stage for stop in path], terms)
    _require_balance(plan, terms)


def require_order(order: Sequence[int], terms: PlanTerms) -> None:
    """Raise `BadPlan` unless these stages make a path."""
    if not order or order[0] != 0:
        raise BadPlan(
            "first stage", f"a path visits stages {list(order)}", "begin with stage 0, which embeds"
        )
    if len(set(order)) != len(order):
        raise BadPlan(
            "one visit", f"a path visits stages {list(order)}", "visit each stage at most once"
        )
    if len(order) != terms.visited:
        skipped, wanted = 1 - len(order) / len(terms.kinds), 1 - terms.visited / len(terms.kinds)
        raise BadPlan(
            "skip ratio",
            f"a path visits {len(order)} of {len(terms.kinds)} stages, so it skips "
            f"{skipped:.4g} of them, not {wanted:.4g}",
            f"visit {terms.visited} stages",
        )
    if missing := set(terms.needed) - set(order):
        raise BadPlan(
            "missing stage",
            f"a path visits stages {list(order)} and not {sorted(missing)}",
            "visit all stages whose output differs in kind from their input",
        )
    _require_swaps(order, terms.kinds)


def _require_swaps(order: Sequence[int], kinds: Sequence[StageKind]) -> None:
    place = {stage: index for index, stage in enumerate(sorted(order))}
    moved = [
        abs(place[stage] - index) for index, stage in enumerate(order) if place[stage] != index
    ]
    if len(moved) > MAX_DISPLACED or max(moved, default=0) > MAX_DISPLACEMENT:
        raise BadPlan(
            "swap bound",
            f"a path visits stages {list(order)}, {len(moved)} of them out of place, "
            f"one by {max(moved)}",
            f"displace at most {MAX_DISPLACED} stages, each by at most {MAX_DISPLACEMENT}",
        )
    for before, after in itertools.pairwise(order):
        if before > after and kinds[before] != kinds[after]:
            raise BadPlan(
                "swap of unequal stages",
                f"a path visits stage {before}, {kinds[before]}, "
                f"before stage {after}, {kinds[after]}",
                "visit stages that differ in input, output or shapes in their own order",
            )


def _require_balance(plan: PathPlan, terms: PlanTerms) -> None:
    paths = plan.paths
    visits = collections.Counter(stop.stage for path in paths for stop in path)
    mean = terms.mean_visits(len(paths))
    for stage in terms.optional:
        if abs(visits[stage] - mean) > 1:
            raise BadPlan(
                "stage balance",
                f"stage {stage} is visited {visits[stage]} times by {len(paths)} microbatches, "
                f"and the mean is {mean:.4g}",
                "train every stage equally often, up to one visit",
            )


class ScheduledPass(msgspec.Struct, frozen=True, gc=False):
    """One computation of a peer on a microbatch, named as (lane, turn)."""

    peer: PeerId
    microbatch: tuple[int, int]
    start_s: float
    end_s: float


def require_timetable(works: Iterable[ScheduledPass], memory: int) -> None:
    """Raise `BadPlan` if a peer does two things at a time or holds more than `memory` microbatches.

    One is held from the start of the peer's first work on it to the end of the last.
    """
    by_peer: dict[PeerId, list[ScheduledPass]] = collections.defaultdict(list)
    for work in works:
        by_peer[work.peer].append(work)
    for peer in sorted(by_peer):
        mine = sorted(by_peer[peer], key=lambda work: (work.start_s, work.end_s))
        _require_one_at_a_time(peer, mine)
        _require_memory(peer, mine, memory)


def _require_one_at_a_time(peer: PeerId, works: Sequence[ScheduledPass]) -> None:
    for work, following in itertools.pairwise(works):
        if following.start_s < work.end_s - _ROUNDING_S:
            raise BadPlan(
                "collision",
                f"{peer} works on microbatch {work.microbatch} until {work.end_s:.4f} s and on "
                f"{following.microbatch} from {following.start_s:.4f} s",
                "let one of them wait, or send it to another server of the stage",
            )


def _require_memory(peer: PeerId, works: Sequence[ScheduledPass], memory: int) -> None:
    first: dict[tuple[int, int], float] = {}
    last: dict[tuple[int, int], float] = {}
    for work in works:
        first.setdefault(work.microbatch, work.start_s)
        last[work.microbatch] = work.end_s
    changes = sorted(
        [(at_s, 1) for at_s in first.values()]
        + [(at_s - _ROUNDING_S, -1) for at_s in last.values()]
    )
    held = 0
    for at_s, change in changes:
        held += change
        if held > memory:
            raise BadPlan(
                "memory",
                f"{peer} holds {held} microbatches at {at_s:.4f} s and has room for {memory}",
                "start them later, or send some to another server of the stage",
            )


class PlannedPaths(FixedPaths):
    """The policy that follows a plan.

    Where the planned server is gone or excluded, the other servers of its stage take over. Lanes
    and turns start with different ones, so that no server inherits all the work. For a stage that
    the path skips, which callers should not ask for, any of its servers is returned.
    """

    def __init__(self, plan: PathPlan, stages: int) -> None:
        super().__init__(stages, _mates_after(plan), plan.pinned)
        self._plan = plan

    def stage_order(self, microbatch: Microbatch) -> tuple[int, ...]:
        return tuple(stop.stage for stop in self._plan.path(microbatch))

    def share(self, stage: int) -> Fraction:
        paths = self._plan.paths
        return Fraction(sum(stop.stage == stage for path in paths for stop in path), len(paths))


def _mates_after(plan: PathPlan) -> Callable[[Microbatch, int, StageServers], list[PeerId]]:
    def line(microbatch: Microbatch, stage: int, serving: StageServers) -> list[PeerId]:
        peers = serving.peers(stage)
        named = [stop.server(serving) for stop in plan.path(microbatch) if stop.stage == stage]
        planned = [peer for peer in named if peer is not None and peer in peers]
        mates = [peer for peer in peers if peer not in planned]
        turn = 0 if plan.pinned else microbatch.step * plan.per_step + microbatch.index
        start = (microbatch.lane + turn) % len(mates) if mates else 0
        return planned + mates[start:] + mates[:start]

    return line
