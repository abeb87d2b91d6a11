"""[pipeline.plan]: the paths that microbatches take with policy `planned`, fixed before the run.

A founder writes the paths, or measurements of the hosts that will serve; from these the paths are
planned when the manifest is resolved (swarm/paths/planner.py). Only paths are signed and sent. A
path is a text such as `0:1 2:0 3:1`: stage 0 by the server at its place 1, and so on. Places number
a stage's servers in the order in which they became members, which all peers read off the same view;
when one leaves, those after it move up. Where hosts are known by name, `2:12D3Koo…` is a peer's id
and stays fixed.

Activations go from a server to the trainer and from there to the next server, so besides a host's
speed only its own line counts, in both directions, whichever host comes before or after it.

Deviations from SkipPipe (arXiv:2502.19913): a server keeps nothing between a microbatch's passes,
so the memory limit has nothing to limit. Its collisions depend on when trainers begin; only certain
ones are refused: two lanes whose paths for the same microbatch begin at one server. Its balance is
required of each lane too, because trainers choose lanes independently and some lanes may have none.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Annotated, Any

import msgspec

from farflock.node.errors import Usage
from farflock.swarm.identity import BadIdentity, public_key
from farflock.swarm.messages import MAX_MEMBERS
from farflock.swarm.paths.draft import Instance
from farflock.swarm.paths.planner import plan_paths
from farflock.swarm.paths.skippipe import (
    BadPlan,
    Path,
    PathPlan,
    PlanTerms,
    StageKind,
    Stop,
    place_name,
    require_paths,
)

MAX_PATHS = 1024  # per lane
MAX_CHARS = 900  # per path: manifest lines are not much longer
MAX_TEXT = 40 * 1024  # characters of all paths; a manifest may have 64 KiB
PLAN_WORK = 200  # plans that the planner examines: some seconds

_STOP = re.compile(r"(0|[1-9][0-9]?):(?:(0|[1-9][0-9]?)|([1-9A-HJ-NP-Za-km-z]{40,64}))", re.ASCII)

PathText = Annotated[str, msgspec.Meta(max_length=MAX_CHARS, pattern=r"^[0-9A-Za-z: ]*$")]
CostSeconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
ByPlace = tuple[
    Annotated[tuple[CostSeconds, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)], ...
]


class PathTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[pipeline.plan]. Each trainer follows one lane; its microbatches take the lane's paths in
    turn, again and again. `servers` is the number of places of each stage; by default, those on the
    paths. A place on no path is a spare: its server takes over where another one is gone."""

    servers: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)], ...], msgspec.Meta(min_length=1)
    ]
    lanes: Annotated[
        tuple[
            Annotated[tuple[PathText, ...], msgspec.Meta(min_length=1, max_length=MAX_PATHS)], ...
        ],
        msgspec.Meta(min_length=1, max_length=MAX_MEMBERS),
    ]


class HostTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A founder's alternative to `lanes`: the number of stages on a path; whether neighbours may
    swap places on it; and, by stage and place, the seconds that a host takes for a forward pass,
    and the seconds that its line takes to carry a microbatch one way."""

    visited: Annotated[int, msgspec.Meta(ge=1)]
    forward_s: ByPlace
    line_s: ByPlace
    turns: Annotated[int, msgspec.Meta(ge=1, le=16)] = 4  # planned paths per server of stage 0
    swaps: bool = False


# reading and writing


def plan_of_texts(lanes: Sequence[Sequence[str]]) -> PathPlan:
    """Return the plan that a manifest's texts describe; raise `BadPlan` if they are invalid."""
    return PathPlan(tuple(tuple(_path(text) for text in texts) for texts in lanes), per_step=1)


def texts_of(plan: PathPlan) -> list[list[str]]:
    """Return a plan as manifest texts; the inverse of `plan_of_texts`."""
    return [[_line(path) for path in paths] for paths in plan.lanes]


def _line(path: Path) -> str:
    return " ".join(_text(stop) for stop in path)


def _path(text: str) -> Path:
    return tuple(_stop(word, text) for word in text.split(" "))


def _stop(word: str, text: str) -> Stop:
    found = _STOP.fullmatch(word)
    if found is None:
        why = f"{word[:64]!r} in the path {text[:64]!r} is not a stage with a server"
        raise BadPlan(
            "stage's server", why, "write a path as 0:1 2:0 3:1, each a stage and a place"
        )
    stage, place, peer = int(found[1]), found[2], found[3]
    if place is not None:
        return Stop(stage, place_name(stage, int(place)))
    try:
        public_key(peer)
    except BadIdentity as error:
        raise BadPlan(
            "stage's server", str(error), f"give a place, such as {stage}:0, or a whole peer id"
        ) from None
    return Stop(stage, peer)


def _text(stop: Stop) -> str:
    return stop.peer if ":" in stop.peer else f"{stop.stage}:{stop.peer}"


# rules


def kinds_of(layers: Sequence[int]) -> tuple[StageKind, ...]:
    """Return the input, output and size of each stage: the first embeds, the last has the loss."""
    last = len(layers) - 1
    return tuple(
        StageKind(
            "tokens" if stage == 0 else "hidden",
            "logits" if stage == last else "hidden",
            ((many,),),
        )
        for stage, many in enumerate(layers)
    )


def require_plan(plan: PathPlan, servers: Sequence[int], layers: Sequence[int], batch: int) -> None:
    """Raise `BadPlan` unless a run can follow the plan: `servers` and `layers` per stage, and
    stages that step after their share of `batch` microbatches."""
    if len(servers) != len(layers):
        why = f"the plan has servers for {len(servers)} stages, and the model has {len(layers)}"
        raise BadPlan("stage's server", why, "plan again for these stages")
    if (size := sum(len(_line(path)) for path in plan.paths)) > MAX_TEXT:
        why = f"the paths have {size:,} characters, and a manifest has room for {MAX_TEXT:,}"
        raise BadPlan("horizon", why, "give fewer paths or lanes, or plan fewer turns")
    _require_members(servers)
    _require_places(plan, servers)
    known, terms = _servers_of(plan, servers), PlanTerms(kinds_of(layers), len(plan.paths[0]))
    for paths in plan.lanes:  # each alone, as a run may have one trainer
        require_paths(PathPlan((paths,), plan.per_step), known, terms)
    _require_apart(plan)
    _require_lanes(plan, len(layers), batch)


def _require_members(servers: Sequence[int]) -> None:
    if sum(servers) >= MAX_MEMBERS:
        why = (
            f"{sum(servers)} servers and a trainer are more than the {MAX_MEMBERS} members that a"
            " run can have"
        )
        raise BadPlan("stage's server", why, "plan for fewer servers")


def _require_places(plan: PathPlan, servers: Sequence[int]) -> None:
    for stop in itertools.chain.from_iterable(plan.paths):
        _, colon, place = stop.peer.partition(":")
        if colon and stop.stage < len(servers) and int(place) >= servers[stop.stage]:
            why = (
                f"a path goes to place {place} of stage {stop.stage}, whose number"
                f" of servers is {servers[stop.stage]}"
            )
            raise BadPlan(
                "stage's server", why, "number places from 0, or enlarge pipeline.plan.servers"
            )


def _servers_of(plan: PathPlan, servers: Sequence[int]) -> list[set[str]]:
    """Return each stage's places and named peers. A peer named for two stages belongs to the
    first."""
    known = [
        {place_name(stage, place) for place in range(many)} for stage, many in enumerate(servers)
    ]
    named: dict[str, int] = {}
    for stop in itertools.chain.from_iterable(plan.paths):
        if ":" not in stop.peer and named.setdefault(stop.peer, stop.stage) == stop.stage < len(
            servers
        ):
            known[stop.stage].add(stop.peer)
    return known


def _require_apart(plan: PathPlan) -> None:
    """Refuse lanes that begin at the same server: all lanes set out at once, so they would
    collide."""
    for turn, paths in enumerate(zip(*plan.lanes, strict=True)):
        first: dict[str, int] = {}
        for lane, path in enumerate(paths):
            before = first.setdefault(path[0].peer, lane)
            if before != lane:
                why = f"lanes {before} and {lane} both begin path {turn} at {_text(path[0])}"
                raise BadPlan(
                    "collision",
                    why,
                    "let each begin at its own server, or plan fewer lanes: trainers share them",
                )


def _require_lanes(plan: PathPlan, stages: int, batch: int) -> None:
    """Require all lanes to visit each stage equally often, and each lane to spread its visits
    evenly, to within half a batch."""
    shares = [_visits(paths) for paths in plan.lanes]
    if never := set(range(stages)) - set(_visits(plan.paths)):
        raise BadPlan(
            "stage balance", f"no path visits stage {min(never)}", "put each stage on some paths"
        )
    for lane, visits in enumerate(shares):
        if visits != shares[0]:
            stage = min(stage for stage in visits | shares[0] if visits[stage] != shares[0][stage])
            why = (
                f"lane {lane} visits stage {stage} {visits[stage]} times, and lane 0"
                f" {shares[0][stage]} times"
            )
            remedy = (
                "let all lanes visit a stage equally often: nothing says how many trainers will"
                " follow each lane"
            )
            raise BadPlan("stage balance", why, remedy)
    for lane, paths in enumerate(plan.lanes):
        _require_steady(lane, paths, shares[0], batch)


def _require_steady(lane: int, paths: Sequence[Path], visits: Counter[int], batch: int) -> None:
    seen: Counter[int] = Counter()
    for number, path in enumerate(paths, 1):
        seen.update(stop.stage for stop in path)
        for stage, many in visits.items():
            share = Fraction(many, len(paths))
            if abs(seen[stage] - share * number) > max(share * batch / 2, Fraction(1)):
                why = (
                    f"lane {lane} visits stage {stage} {seen[stage]} times on its first {number}"
                    f" paths, and {many} times on all {len(paths)}"
                )
                raise BadPlan(
                    "stage balance",
                    why,
                    "mix the paths, so that all stages fill their batches at the same time",
                )


def _visits(paths: Sequence[Path]) -> Counter[int]:
    return Counter(stop.stage for path in paths for stop in path)


# planning


def fill_plan(given: Mapping[str, Any], layers: Sequence[int], seed: int) -> dict[str, Any]:
    """Return a founder's [pipeline.plan] with hosts turned into lanes and `servers` filled in.
    Errors in lanes are reported later."""
    if "lanes" in given:
        return {"servers": _counted(given["lanes"], len(layers))} | dict(given)
    try:
        hosts = msgspec.convert(dict(given), HostTerms)
    except msgspec.ValidationError as error:
        raise Usage(
            "pipeline.plan", str(error), "give lanes, or visited, forward_s and line_s of the hosts"
        ) from None
    sizes = [[len(places) for places in table] for table in (hosts.forward_s, hosts.line_s)]
    if sizes[0] != sizes[1] or len(sizes[0]) != len(layers):
        why = (
            f"forward_s is given for {sizes[0]} hosts, line_s for {sizes[1]}, and there are"
            f" {len(layers)} stages"
        )
        raise Usage(
            "pipeline.plan",
            why,
            "give both a row per stage, with a number for each of its hosts",
        )
    _require_members(sizes[0])  # before planning, which takes a minute for hundreds
    return {"servers": sizes[0], "lanes": texts_of(planned(hosts, layers, seed))}


def _counted(lanes: object, stages: int) -> list[int]:
    """Return the number of servers of each stage on these paths, at least one."""
    try:
        plan = plan_of_texts(msgspec.convert(lanes, list[list[str]]))
    except (msgspec.ValidationError, BadPlan):
        return [1] * stages
    stops = set(itertools.chain.from_iterable(plan.paths))
    return [max(sum(stop.stage == stage for stop in stops), 1) for stage in range(stages)]


def planned(hosts: HostTerms, layers: Sequence[int], seed: int) -> PathPlan:
    """Plan paths for these hosts by their places; raise `BadPlan` if there are none. Each lane
    takes all lanes' paths in turn, so one trainer alone uses all servers and trains all stages
    equally."""
    serving = tuple(
        tuple(place_name(stage, at) for at in range(len(row)))
        for stage, row in enumerate(hosts.forward_s)
    )
    names = list(itertools.chain.from_iterable(serving))
    lines = dict(zip(names, itertools.chain.from_iterable(hosts.line_s), strict=True))
    instance = Instance(
        serving=serving,
        terms=PlanTerms(kinds_of(layers), hosts.visited),
        forward_s=dict(zip(names, itertools.chain.from_iterable(hosts.forward_s), strict=True)),
        transfer_s={here: {there: lines[here] + lines[there] for there in names} for here in names},
        memory=len(serving[0]) * hosts.turns,  # nothing is kept between passes
        turns=hosts.turns,
        per_step=1,
        swaps=hosts.swaps,
        head_is_first=False,
    )
    return _by_turns(plan_paths(instance, seed, PLAN_WORK))


def _by_turns(plan: PathPlan) -> PathPlan:
    """Return a plan with the same paths, in which every lane takes all of them and begins with
    its own."""
    lanes, turns = len(plan.lanes), len(plan.lanes[0])
    order = [
        [((lane + at) % lanes, turn) for turn in range(turns) for at in range(lanes)]
        for lane in range(lanes)
    ]
    return PathPlan(
        tuple(tuple(plan.lanes[lane][turn] for lane, turn in way) for way in order), plan.per_step
    )
