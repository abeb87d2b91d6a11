"""SkipPipe's plans on a network whose links queue, and the gain of each of its three ideas there.

The published comparison changes three things at once: paths visit four stages instead of six, five
data nodes begin them instead of three, and a planner chooses them. Here every plan sends thirty
microbatches, and one thing changes at a time. Links are those of the released instance, but a wire
carries one message at a time, and so do a node's line in and line out, which its wires share. No
microbatch is forgotten, and no node rests.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from farflock.experiments.pipelines import planned, released
from farflock.experiments.pipelines.table import Parameters, Progress, Table, exact, sampled
from farflock.experiments.placement.layout import LinkCosts
from farflock.swarm.links import PeerId
from farflock.swarm.paths import planner as skip_planner
from farflock.swarm.paths.skippipe import PathPlan
from farflock.swarm.paths.timetable import timetable

MICROBATCHES = 30
FEW_ORIGINS = 3  # as many as the later stages have nodes
IDEAS = {  # the plans without and with each idea
    "fewer hops, three origins": ("full, three origins", "skipping, three origins"),
    "fewer hops, five origins": ("full, five origins", "skipping, five origins"),
    "more origins, full": ("full, three origins", "full, five origins"),
    "more origins, skipping": ("skipping, three origins", "skipping, five origins"),
    "path choice, theirs": ("random", "collision-aware"),
    "collision awareness": ("not collision-aware", "collision-aware"),
}


class Wires:
    """Links that queue, for one run whose time begins at 0.

    A message starts when the wire, its sender's line out and its receiver's line in are free,
    occupies all three for size / bandwidth, and arrives after the latency and the overhead.
    """

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
        """Send a microbatch that is ready at `now_s`; return the time at which it arrives."""
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
    """The network and the work: seconds of a forward pass, and whether lines are shared."""

    forward_s: float = released.FORWARD_S
    shared_lines: bool = True

    def makespan_s(self, plan: PathPlan) -> float:
        """Return the seconds until the last microbatch of a plan is back."""
        links = released.links(mistaken=False)
        wires = Wires(
            planned.NAMES, links, released.MICROBATCH_BYTES, released.OVERHEAD_S, self.shared_lines
        )
        forward_s = dict.fromkeys(planned.NAMES, self.forward_s)
        return timetable(plan, forward_s, released.MEMORY, wires.send).makespan_s

    def planned(self, seed: int, work: int) -> PathPlan:
        """Return our planner's plan: its estimates ignore queues, but this simulation judges it."""
        wanted = planned.instance(released.delays_s(mistaken=False), self.forward_s)
        return skip_planner.plan_paths(wanted, seed, work, self.makespan_s)


def makespans(setting: Setting) -> dict[str, float]:
    """Return the seconds of thirty microbatches by plan.

    `full` visits all six stages on three chains of nodes, `skipping` four of them on the random
    plan's chains; each of three or five origins takes all chains in turn. The other plans have five
    origins and given paths: the random ones, and those of the released plans.
    """
    full, skipping, every = (
        chains_of(released.FULL),
        chains_of(released.RANDOM),
        len(released.PARTITION[0]),
    )
    plans = {
        "full, three origins": paths_in_turn(full, FEW_ORIGINS),
        "full, five origins": paths_in_turn(full, every),
        "skipping, three origins": paths_in_turn(skipping, FEW_ORIGINS),
        "skipping, five origins": paths_in_turn(skipping, every),
        "random": planned.as_plan(released.RANDOM.values()),
        "not collision-aware": planned.as_plan(released.NOT_COLLISION_AWARE.values()),
        "collision-aware": planned.as_plan(released.COLLISION_AWARE.values()),
    }
    return {name: setting.makespan_s(plan) for name, plan in plans.items()}


def effects(made_s: Mapping[str, float]) -> dict[str, float]:
    """Return the speed-up that each idea brings alone."""
    return {idea: made_s[without] / made_s[with_it] for idea, (without, with_it) in IDEAS.items()}


def chains_of(paths: released.Paths) -> list[released.Path]:
    """Return the distinct paths without their first stops."""
    return sorted({path[1:] for each in paths.values() for path in each})


def paths_in_turn(chains: Sequence[released.Path], origins: int) -> PathPlan:
    """Return a plan whose origins take all chains in turn, each starting at a different one."""
    lanes = []
    for lane, origin in enumerate(released.PARTITION[0][:origins]):
        lanes.append(
            [
                (origin, *chains[(lane + turn) % len(chains)])
                for turn in range(MICROBATCHES // origins)
            ]
        )
    return planned.as_plan(lanes, MICROBATCHES // origins)


class Size(Parameters, frozen=True, kw_only=True):
    """Seconds of a forward pass, the number of plans that our planner may judge, and its seeds."""

    forward_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = released.FORWARD_S
    work: Annotated[int, msgspec.Meta(ge=skip_planner.MIN_WORK, le=100_000)] = skip_planner.WORK
    seeds: Annotated[list[int], msgspec.Meta(min_length=1, max_length=100)]


def compute(size: Size, progress: Progress) -> Table:
    """Tabulate makespans, speed-ups, and SkipPipe's plan over ours, here and in its simulation."""
    setting = Setting(forward_s=size.forward_s)
    made_s, ours_s, over = makespans(setting), [], []
    for number, seed in enumerate(size.seeds, 1):
        ours_s.append(setting.makespan_s(setting.planned(seed, size.work)))
        over.append(planned.theirs_over_ours(seed, size.work, size.forward_s))
        progress(number / len(size.seeds))
    return Table(
        [
            *(exact(name, value) for name, value in (made_s | effects(made_s)).items()),
            sampled("ours", ours_s),
            sampled("path choice, ours", [made_s["random"] / one for one in ours_s]),
            sampled(
                "theirs over ours, links queue", [made_s["collision-aware"] / one for one in ours_s]
            ),
            sampled("theirs over ours, their simulation", over),
        ],
        f"{MICROBATCHES} microbatches, {released.NODES} nodes, {size.work} plans judged, "
        f"{len(size.seeds)} seeds",
    )
