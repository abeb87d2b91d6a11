"""SkipPipe's plans on a network whose links queue, and what each of its three ideas is worth there.

The published comparison changes three things at once: paths visit four stages instead of six, five data nodes begin them
instead of three, and a planner chooses them. Here thirty microbatches are always on their way, and one thing changes at a time.
Links are those of the released instance, but a wire carries one message at a time, and so do a node's line in and its line out,
which its wires share. Nothing is forgotten, and nobody rests.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from farflock.experiments.pipelines import planned, released
from farflock.experiments.pipelines.table import Parameters, Progress, Row, Table, exact, sampled
from farflock.experiments.placement import regions
from farflock.experiments.placement.layout import LinkCosts
from farflock.swarm.links import PeerId
from farflock.swarm.paths import planner as skip_planner
from farflock.swarm.paths.skippipe import PathPlan
from farflock.swarm.paths.timetable import timetable

MICROBATCHES = 30
FEW_ORIGINS = 3  # as many as the later stages have nodes


class Wires:
    """Links that queue: a message begins when the wire, its sender's line out and its receiver's line in are free, is on all
    three for size / bandwidth, and arrives after the latency and the overhead. For one run, whose time begins at 0."""

    def __init__(
        self,
        names: Sequence[PeerId],
        links: LinkCosts,
        size_bytes: float,
        overhead_s: float = 0.0,
        shared_lines: bool = True,
    ) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._wire_s = (size_bytes / links.bandwidth).tolist()
        self._late_s = (links.latency_s + overhead_s).tolist()
        self._shared_lines = shared_lines
        self._free_s: defaultdict[tuple[str, ...], float] = defaultdict(float)

    def send(self, sender: PeerId, receiver: PeerId, now_s: float) -> float:
        """When a microbatch that is ready now arrives."""
        i, j = self._index[sender], self._index[receiver]
        used: list[tuple[str, ...]] = [(sender, receiver)]
        if self._shared_lines:
            used += [("out of", sender), ("in to", receiver)]
        sent_s = max(now_s, *(self._free_s[line] for line in used)) + self._wire_s[i][j]
        self._free_s.update(dict.fromkeys(used, sent_s))
        arrives_s: float = sent_s + self._late_s[i][j]
        return arrives_s


@dataclass(frozen=True, slots=True)
class Setting:
    """The network and the work: seconds of a forward pass, the table's mistake or not, lines shared or not."""

    forward_s: float = released.FORWARD_S
    mistaken: bool = False
    shared_lines: bool = True

    def makespan_s(self, plan: PathPlan) -> float:
        """Seconds until the last microbatch of a plan is back."""
        gcp = regions.load()["gcp"]
        return self._run(plan, gcp.links(gcp.turns(released.NODES), released=self.mistaken))

    def _run(self, plan: PathPlan, links: LinkCosts) -> float:
        wires = Wires(planned.NAMES, links, released.MICROBATCH_BYTES, released.OVERHEAD_S, self.shared_lines)
        forward_s = dict.fromkeys(planned.NAMES, self.forward_s)
        return timetable(plan, forward_s, released.MEMORY, wires.send).makespan_s

    def planned(self, seed: int, work: int) -> PathPlan:
        """Our planner's plan for this network: its estimates know no queues, its judge is this simulation."""
        gcp = regions.load()["gcp"]
        links = gcp.links(gcp.turns(released.NODES), released=self.mistaken)
        wanted = planned.instance(released.delays_s(self.mistaken), self.forward_s)
        return skip_planner.plan_paths(wanted, seed, work, lambda plan: self._run(plan, links))


@dataclass(frozen=True, slots=True)
class Effects:
    """Makespans in seconds of thirty microbatches. `full` visits all six stages by three chains of nodes, `skipping` four by
    the five chains that were drawn by chance; every origin takes all chains in turn, which three origins do, or all five. The
    others have five origins and the paths that somebody chose: drawn by chance, the released plans, and ours."""

    full_three: float
    full_five: float
    skipping_three: float
    skipping_five: float
    random: float
    not_collision_aware: float
    collision_aware: float
    ours: float

    @property
    def fewer_hops(self) -> tuple[float, float]:
        """How many times as fast skipping is, from three origins and from five."""
        return self.full_three / self.skipping_three, self.full_five / self.skipping_five

    @property
    def more_origins(self) -> tuple[float, float]:
        """How many times as fast five origins are as three, with full paths and with skipping ones."""
        return self.full_three / self.full_five, self.skipping_three / self.skipping_five

    @property
    def path_choice(self) -> tuple[float, float]:
        """How many times as fast chosen paths are as those drawn by chance: the released plan's, and ours."""
        return self.random / self.collision_aware, self.random / self.ours

    @property
    def collision_awareness(self) -> float:
        """How many times as fast the released plan is as the one made without regard to collisions."""
        return self.not_collision_aware / self.collision_aware


def effects(setting: Setting, seed: int = 0, work: int = skip_planner.WORK) -> Effects:
    """The three effects, one at a time."""
    full = _chains(released.FULL)
    skipping = _chains(released.RANDOM)
    plans = (
        _in_turn(full, FEW_ORIGINS),
        _in_turn(full, len(released.PARTITION[0])),
        _in_turn(skipping, FEW_ORIGINS),
        _in_turn(skipping, len(released.PARTITION[0])),
        planned.as_plan(released.RANDOM.values()),
        planned.as_plan(released.NOT_COLLISION_AWARE.values()),
        planned.as_plan(released.COLLISION_AWARE.values()),
        setting.planned(seed, work),
    )
    return Effects(*map(setting.makespan_s, plans))


def _chains(paths: released.Paths) -> list[released.Path]:
    """The different ways after the first stop."""
    return sorted({path[1:] for each in paths.values() for path in each})


def _in_turn(chains: Sequence[released.Path], origins: int) -> PathPlan:
    """Each origin takes all chains in turn, each beginning with another."""
    lanes = []
    for lane, origin in enumerate(released.PARTITION[0][:origins]):
        lanes.append([(origin, *chains[(lane + turn) % len(chains)]) for turn in range(MICROBATCHES // origins)])
    return planned.as_plan(lanes, MICROBATCHES // origins)


class Size(Parameters, frozen=True, kw_only=True):
    """Seconds of a forward pass, how many plans our planner may judge, and its seeds."""

    forward_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = released.FORWARD_S
    work: Annotated[int, msgspec.Meta(ge=skip_planner.LEAST_WORK, le=100_000)] = skip_planner.WORK
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=100)]


def compute(size: Size, progress: Progress) -> Table:
    """Makespans in seconds where links queue, how many times as fast each idea makes them, and how many times as long the
    released plan takes as our planner's: where links queue, and in the released simulation."""
    setting = Setting(forward_s=size.forward_s)
    made, besides = [], []
    for number, seed in enumerate(size.seeds, 1):
        made.append(effects(setting, seed, size.work))
        besides.append(planned.beside(seed, size.work, size.forward_s))
        progress(number / len(size.seeds))
    ours = [
        sampled("ours", [one.ours for one in made]),
        sampled("path choice, ours", [one.path_choice[1] for one in made]),
        sampled("theirs over ours, links queue", [one.collision_aware / one.ours for one in made]),
        sampled(
            "theirs over ours, their simulation", [one.theirs_simulated / one.ours_judged_simulated for one in besides]
        ),
    ]
    return Table(
        [*_released(made[0]), *ours],
        f"{MICROBATCHES} microbatches, {released.NODES} nodes, {size.work} plans judged, {len(size.seeds)} seeds",
    )


def _released(found: Effects) -> list[Row]:
    """What the planner's seed has no part in."""
    return [
        exact("full, three origins", found.full_three),
        exact("full, five origins", found.full_five),
        exact("skipping, three origins", found.skipping_three),
        exact("skipping, five origins", found.skipping_five),
        exact("random", found.random),
        exact("not collision-aware", found.not_collision_aware),
        exact("collision-aware", found.collision_aware),
        exact("fewer hops, three origins", found.fewer_hops[0]),
        exact("fewer hops, five origins", found.fewer_hops[1]),
        exact("more origins, full", found.more_origins[0]),
        exact("more origins, skipping", found.more_origins[1]),
        exact("path choice, theirs", found.path_choice[0]),
        exact("collision awareness", found.collision_awareness),
    ]
