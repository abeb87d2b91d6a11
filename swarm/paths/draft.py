"""Paths that a planner changes a little at a time, without ever breaking a rule of the plan.

The planner changes one or two paths, judges the result, and undoes what is not better. All paths
stay valid, so there is nothing to repair.
"""

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from farflock.swarm.links import PeerId
from farflock.swarm.paths.skippipe import BadPlan, Path, PathPlan, PlanTerms, Stop, require_order
from farflock.swarm.paths.timetable import (
    ComputeTimes,
    Timetable,
    TransferTimes,
    constant,
    timetable,
)

MAX_MICROBATCHES = 4096  # per horizon

Change = dict[int, Path]  # new paths by their index

_ALONE = ("mate", "flip", "shift")
_MOVES = (*_ALONE, "trade", "trade", "exchange")


@dataclass(frozen=True, slots=True)
class Instance:
    """A planning problem.

    `serving[stage]` are a stage's servers; each server of stage 0 begins a lane of `turns`
    microbatches, `per_step` of them per step. Times are the seconds of a forward pass at each peer
    and of a microbatch between two peers. A peer has memory for `memory` microbatches. With `swaps`
    two stages may change places.
    """

    serving: tuple[tuple[PeerId, ...], ...]
    terms: PlanTerms
    forward_s: ComputeTimes
    transfer_s: TransferTimes
    memory: int
    turns: int
    per_step: int
    swaps: bool = True
    head_is_first: bool = True

    def __post_init__(self) -> None:
        if len(self.serving) != len(self.terms.kinds) or not all(self.serving):
            raise ValueError(
                f"{[len(peers) for peers in self.serving]} servers for "
                f"{len(self.terms.kinds)} stages; give each stage at least one"
            )
        if not (self.turns >= 1 and self.microbatches <= MAX_MICROBATCHES and self.memory >= 1):
            raise ValueError(
                f"{len(self.serving[0])} lanes of {self.turns} microbatches, and room for "
                f"{self.memory}, cannot be planned; choose 1 to {MAX_MICROBATCHES} microbatches in "
                "all, and room for at least one"
            )

    @property
    def microbatches(self) -> int:
        """The number of microbatches in the horizon."""
        return len(self.serving[0]) * self.turns

    def timetable(self, plan: PathPlan) -> Timetable:
        """Return the times of all passes if the plan runs over these links."""
        return timetable(
            plan, self.forward_s, self.memory, constant(self.transfer_s), self.head_is_first
        )


class Draft:
    """The paths of all lanes, `different` per lane, each repeated until the horizon is full."""

    def __init__(self, instance: Instance, different: int, chance: random.Random) -> None:
        assert instance.turns % different == 0, (
            f"{different} paths do not fill {instance.turns} turns"
        )
        self._instance, self._chance = instance, chance
        self.different, self.repeats = different, instance.turns // different
        self.paths = even_paths(instance, different)
        self._mean = instance.terms.mean_visits(len(self.paths))
        self._slack = 1.0 if self._mean % 1 else 1.0 / self.repeats
        self._visits = _visits(self.paths)

    def plan(self) -> PathPlan:
        """Return all lanes' paths over the horizon."""
        many, turns = self.different, range(self._instance.turns)
        lanes = [self.paths[start : start + many] for start in range(0, len(self.paths), many)]
        return PathPlan(
            tuple(tuple(lane[turn % many] for turn in turns) for lane in lanes),
            self._instance.per_step,
        )

    def adopt(self, plan: PathPlan) -> None:
        """Take the paths of a plan, and restore their balance with the least delay."""
        self.apply(dict(enumerate(plan.paths)))
        while change := self._mended():
            self.apply(change)

    def _mended(self) -> Change:
        """Return a path with the least visited stage in place of the most visited, or {} if
        stages are balanced."""
        visits = {stage: self._visits[stage] for stage in self._instance.terms.optional}
        if not visits or max(abs(count - self._mean) for count in visits.values()) <= 1:
            return {}
        most, least = max(visits, key=visits.__getitem__), min(visits, key=visits.__getitem__)
        places = [
            (index, place)
            for index, path in enumerate(self.paths)
            for place, stop in enumerate(path)
            if stop.stage == most and all(stop.stage != least for stop in path)
        ]
        changes = [
            {index: _replaced(self.paths[index], place, Stop(least, peer))}
            for index, place in places
            for peer in self._instance.serving[least]
        ]
        return min(changes, key=self._lengthening_s)

    def _lengthening_s(self, change: Change) -> float:
        return sum(
            self._hops_s(path) - self._hops_s(self.paths[index]) for index, path in change.items()
        )

    def _hops_s(self, path: Path) -> float:
        """Return the seconds of all hops one way, and back to the start if the head is there."""
        peers = [stop.peer for stop in path] + [path[0].peer] * self._instance.head_is_first
        pairs = itertools.pairwise(peers)
        return sum(self._instance.transfer_s[here][there] for here, there in pairs if here != there)

    def apply(self, change: Change) -> Change:
        """Put new paths in their places; return the change that undoes it."""
        before = {index: self.paths[index] for index in change}
        for index, path in change.items():
            for stop in self.paths[index]:
                self._visits[stop.stage] -= 1
            for stop in path:
                self._visits[stop.stage] += 1
            self.paths[index] = path
        return before

    def propose(self) -> Change:
        """Return new paths for one or two indices; empty if the random choice is not valid."""
        many = len(self.paths)
        one = self._chance.randrange(many)
        other = (one + self._chance.randrange(1, many)) % many if many > 1 else one
        match self._chance.choice(_MOVES if many > 1 else _ALONE):
            case "mate":
                return self._mate(one)
            case "trade":
                return self._trade(one, other)
            case "flip":
                return self._flip(one)
            case "shift":
                return self._shift(one)
            case _:
                return self._exchange(one, other)

    def _mate(self, index: int) -> Change:
        """Replace a server by another one of the same stage."""
        path = self.paths[index]
        place = self._place(path)
        stop = path[place]
        peer = self._chance.choice(self._instance.serving[stop.stage])
        return (
            {index: _replaced(path, place, Stop(stop.stage, peer))}
            if place and peer != stop.peer
            else {}
        )

    def _trade(self, one: int, other: int) -> Change:
        """Let two microbatches trade a stop each; the visits of stages do not change."""
        here, there = self.paths[one], self.paths[other]
        give, take = self._place(here), self._place(there)
        if not give or here[give] == there[take]:
            return {}
        return self._fitting(
            {one: _replaced(here, give, there[take]), other: _replaced(there, take, here[give])}
        )

    def _flip(self, index: int) -> Change:
        """Swap two neighbouring stages, or restore the stages' own order."""
        path = self.paths[index]
        ordered = _ordered(path)
        if ordered != path:
            return {index: ordered}
        if len(path) < 3 or not self._instance.swaps:
            return {}
        place = self._chance.randrange(1, len(path) - 1)
        return self._fitting(
            {index: (*path[:place], path[place + 1], path[place], *path[place + 2 :])}
        )

    def _shift(self, index: int) -> Change:
        """Replace a stage by another one, as far as balance allows."""
        path, terms = self.paths[index], self._instance.terms
        place = self._place(path)
        if not place or len(terms.optional) < 2:
            return {}
        old, new = path[place].stage, self._chance.choice(terms.optional)
        peer = self._chance.choice(self._instance.serving[new])
        if (
            self._visits[old] - 1 < self._mean - self._slack
            or self._visits[new] + 1 > self._mean + self._slack
        ):
            return {}
        return self._fitting({index: _replaced(path, place, Stop(new, peer))})

    def _exchange(self, one: int, other: int) -> Change:
        """Let two microbatches exchange their paths after the first stop."""
        here, there = self.paths[one], self.paths[other]
        return (
            {one: (here[0], *there[1:]), other: (there[0], *here[1:])}
            if here[1:] != there[1:]
            else {}
        )

    def _place(self, path: Path) -> int:
        """Return a random place in a path except the first; 0 if there is no other."""
        return self._chance.randrange(1, len(path)) if len(path) > 1 else 0

    def _fitting(self, change: Change) -> Change:
        try:
            for path in change.values():
                require_order([stop.stage for stop in path], self._instance.terms)
        except BadPlan:
            return {}
        return change


def even_paths(instance: Instance, different: int) -> list[Path]:
    """Return paths that take the optional stages and their servers in turn, regardless of cost."""
    terms, serving = instance.terms, instance.serving
    optional, count = terms.optional, terms.visited - len(terms.needed)
    visits: Counter[int] = Counter()
    paths = []
    for number in range(len(serving[0]) * different):
        turn = (optional[(number * count + k) % len(optional)] for k in range(count))
        stages = sorted({*terms.needed[1:], *turn})
        stops = [
            Stop(stage, serving[stage][visits[stage] % len(serving[stage])]) for stage in stages
        ]
        visits.update(stages)
        paths.append((Stop(0, serving[0][number // different]), *stops))
    return paths


def _replaced(path: Path, place: int, stop: Stop) -> Path:
    """Replace one stop; if its stage differs, restore the stages' own order."""
    changed = (*path[:place], stop, *path[place + 1 :])
    return changed if path[place].stage == stop.stage else _ordered(changed)


def _ordered(path: Path) -> Path:
    return tuple(sorted(path, key=lambda stop: stop.stage))


def _visits(paths: Iterable[Path]) -> Counter[int]:
    return Counter(stop.stage for path in paths for stop in path)
