"""Layers and machines of each stage when machines differ in compute, memory and bandwidth.

Equal stages waste strong machines and exclude weak ones. The slowest stage sets the pace: its
machines' summed rates over its work, or what their links carry. Boundaries are fixed for a whole
run, since parameters must match, so they are chosen before it starts. The procedure is our own:
greedy max-min as in list scheduling (Graham, "Bounds on multiprocessing timing anomalies", 1969),
then exchanges that help the slowest stage, then moves of layers between stages.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from farflock.node.run.terms import MAX_STAGES

REPLICAS = 3  # per stage: it survives one failure while another machine is away

SMALL = 6  # two stages with at most this many machines: all their divisions are tried
FEW = 50  # at most this many choices of boundaries: all are tried
ENOUGH = 0.99  # of the machines' ideal rate: more stages would only send more

_NOTHING = 1e-9  # smaller relative gains are rounding


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """Measured samples per second through one layer, both passes; memory; bytes per second."""

    rate: float
    memory_bytes: float
    up: float
    down: float

    def __post_init__(self) -> None:
        for name in ("rate", "memory_bytes", "up", "down"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"a machine's {name} is {value}, but must be finite and above 0; "
                    "measure it again or leave the machine out"
                )

    @property
    def link(self) -> float:
        """The slower direction: a stage carries as much in as out."""
        return min(self.up, self.down)


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """The needs of a model's parts; bytes are of parameters, gradients and optimizer together."""

    layers: int
    layer_bytes: float
    embedding_bytes: float
    head_bytes: float
    head_layers: float  # the head's work, in layers: about its parameters over a layer's
    edge_bytes: float  # a sample's activations between two stages
    inner_bytes: float = 0.0  # a sample's activations inside one layer during recomputation
    microbatch: int = 1  # samples
    in_flight: int = 1  # microbatches whose inputs a stage keeps

    def __post_init__(self) -> None:
        if self.layers < 1 or self.microbatch < 1 or self.in_flight < 1:
            raise ValueError(
                f"a model of {self.layers} layers with {self.in_flight} microbatches of "
                f"{self.microbatch} samples in flight cannot run; give at least 1 of each"
            )
        for name in (
            "layer_bytes",
            "embedding_bytes",
            "head_bytes",
            "head_layers",
            "edge_bytes",
            "inner_bytes",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"a model's {name} is {value}; give a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class StageShare:
    """One stage's share of the model."""

    model: ModelCosts
    begin: int  # its first layer
    end: int  # the first layer after it
    stage: int
    stages: int

    @property
    def memory_bytes(self) -> float:
        """Memory per machine: model part, inputs in flight, one microbatch being recomputed."""
        model, layers = self.model, self.end - self.begin
        extra = (self.stage == 0) * model.embedding_bytes + (
            self.stage == self.stages - 1
        ) * model.head_bytes
        sample = (self.stage > 0) * model.in_flight * model.edge_bytes + layers * model.inner_bytes
        return layers * model.layer_bytes + extra + model.microbatch * sample

    @property
    def work(self) -> float:
        """Work per sample, in layers; an embedding look-up counts as no work."""
        return self.end - self.begin + (self.stage == self.stages - 1) * self.model.head_layers

    @property
    def crossed(self) -> int:
        """Boundaries to other stages; a sample crosses each twice, as value and as gradient."""
        return (self.stage > 0) + (self.stage < self.stages - 1)

    def samples_per_s(self, machines: Sequence[MachineProfile]) -> float:
        """Return the throughput of these machines as servers of this stage."""
        computed = sum(machine.rate for machine in machines) / self.work
        crossing = self.crossed * self.model.edge_bytes
        carried = sum(machine.link for machine in machines)
        return min(computed, carried / crossing) if crossing > 0 else computed

    def __str__(self) -> str:
        extra = " and the embedding" * (self.stage == 0) + " and the head" * (
            self.stage == self.stages - 1
        )
        return f"stage {self.stage} of {self.stages}, {self.end - self.begin} layers{extra},"


@dataclass(frozen=True, slots=True)
class Split:
    """Each stage's layers and machines, the slowest's throughput, and spare machines (trainers)."""

    layers: tuple[int, ...]
    machines: tuple[tuple[int, ...], ...]
    samples_per_s: float
    spare: tuple[int, ...]


def split(
    model: ModelCosts,
    machines: Sequence[MachineProfile],
    stages: int | None = None,
    replicas: int = REPLICAS,
) -> Split:
    """Return the fastest split found into this many stages, each with at least `replicas` machines.

    If `stages` is None, try every number and prefer fewer; stop once close to the sum of all rates.
    Raise `ValueError` with the stage and the remedy if there is none.
    """
    if replicas < 1:
        raise ValueError(
            f"{replicas} replicas cannot serve a stage; give at least 1, usually {REPLICAS}"
        )
    most = min(model.layers, len(machines) // replicas, MAX_STAGES)
    wanted = 1 if stages is None else stages
    if not 1 <= wanted <= most:
        raise ValueError(
            f"{len(machines)} machines, {replicas} per stage, and {model.layers} layers "
            f"cannot form {wanted} stages; give 1 to {max(most, 1)} stages, more machines, "
            "or fewer replicas"
        )
    if stages is not None:
        return _refined(model, machines, stages, replicas)
    ideal = sum(machine.rate for machine in machines) / (model.layers + model.head_layers)
    best, reason = None, None
    for count in range(1, most + 1):
        try:
            found = _refined(model, machines, count, replicas)
        except ValueError as error:
            reason = error
            continue
        if best is None or found.samples_per_s > best.samples_per_s * (1 + _NOTHING):
            best = found
        if best.samples_per_s >= ENOUGH * ideal:
            break
    if best is None:
        assert reason is not None
        raise reason
    return best


def stage_shares(model: ModelCosts, layers: Sequence[int]) -> tuple[StageShare, ...]:
    """Return the stages of a model that is cut into these numbers of layers."""
    ends = tuple(itertools.accumulate(layers))
    return tuple(
        StageShare(model, begin, end, stage, len(ends))
        for stage, (begin, end) in enumerate(itertools.pairwise((0, *ends)))
    )


def assigned(
    stages: Sequence[StageShare], machines: Sequence[MachineProfile], replicas: int = REPLICAS
) -> Split:
    """Assign machines to stages, dealt by rate or by link, whichever is better.

    Raise `ValueError` if too few machines can hold a stage.
    """
    _require_servable(stages, machines, replicas)
    numbers = range(len(machines))
    by_rate = sorted(numbers, key=lambda number: -machines[number].rate)
    by_link = sorted(numbers, key=lambda number: -machines[number].link)
    casts = [_Cast(stages, machines, replicas) for _ in range(2)]
    for cast, order in zip(casts, (by_rate, by_link), strict=True):
        cast.deal(order)
        cast.exchange()
    best = max(casts, key=lambda cast: min(cast.speeds))
    served = set(itertools.chain(*best.teams))
    return Split(
        layers=tuple(share.end - share.begin for share in stages),
        machines=tuple(tuple(sorted(team)) for team in best.teams),
        samples_per_s=min(best.speeds),
        spare=tuple(number for number in numbers if number not in served),
    )


def _require_servable(
    stages: Sequence[StageShare], machines: Sequence[MachineProfile], replicas: int
) -> None:
    """Raise `ValueError` if too few machines can hold a stage, and so all smaller ones."""
    for taken, share in enumerate(sorted(stages, key=lambda share: -share.memory_bytes)):
        fitting = sum(machine.memory_bytes >= share.memory_bytes for machine in machines)
        if fitting < (taken + 1) * replicas:
            others = f", and the larger stages need {taken * replicas} of them" if taken else ""
            raise ValueError(
                f"{share} needs {share.memory_bytes / 2**20:.0f} MiB: "
                f"{fitting} of {len(machines)} machines have that much{others}, "
                f"but {replicas} must serve it; take more stages, "
                "keep fewer or smaller microbatches in flight, or use fewer replicas"
            )


class _Cast:
    """An assignment of machines, by number, to stages while it is being made."""

    def __init__(
        self, stages: Sequence[StageShare], machines: Sequence[MachineProfile], replicas: int
    ) -> None:
        self.replicas = replicas
        self.teams: list[list[int]] = [[] for _ in stages]
        self.speeds = [0.0] * len(stages)
        self._needs = [share.memory_bytes for share in stages]
        self._work = [share.work for share in stages]
        self._crossing = [share.crossed * share.model.edge_bytes for share in stages]
        self._large_first = sorted(range(len(stages)), key=lambda stage: -self._needs[stage])
        self._memory = [machine.memory_bytes for machine in machines]
        self._rate = [machine.rate for machine in machines]
        self._link = [machine.link for machine in machines]

    def deal(self, order: Sequence[int]) -> None:
        """Give each machine in turn to the slowest stage so far that it can hold, if any.

        Skip a stage if another one would then be left with too few replicas.
        """
        for turn, number in enumerate(order):
            later = order[turn + 1 :]
            fitting = [
                stage for stage, need in enumerate(self._needs) if need <= self._memory[number]
            ]
            for stage in sorted(fitting, key=self.speeds.__getitem__):
                self.teams[stage].append(number)
                if self._servable(later):
                    self.speeds[stage] = self._speed(stage, self.teams[stage])
                    break
                self.teams[stage].pop()

    def exchange(self) -> None:
        """Exchange machines of the slowest stage and another while the slower of both gains."""
        while True:
            slow = self.speeds.index(min(self.speeds))
            for other in range(len(self.teams)):
                if other != slow and (change := self._change(slow, other)) is not None:
                    for stage, team in zip((slow, other), change, strict=True):
                        self.teams[stage], self.speeds[stage] = team, self._speed(stage, team)
                    break
            else:
                return

    def _speed(self, stage: int, team: Sequence[int]) -> float:
        computed = sum([self._rate[number] for number in team]) / self._work[stage]
        if not self._crossing[stage]:
            return computed
        return min(computed, sum([self._link[number] for number in team]) / self._crossing[stage])

    def _servable(self, later: Sequence[int]) -> bool:
        needed = 0
        for stage in self._large_first:
            lacking = self.replicas - len(self.teams[stage])
            if lacking > 0:
                needed += lacking
                if sum([self._memory[number] >= self._needs[stage] for number in later]) < needed:
                    return False
        return True

    def _change(self, slow: int, other: int) -> tuple[list[int], list[int]] | None:
        """Return the first better division of both teams, or None."""
        limit = self.speeds[slow] * (1 + _NOTHING)
        for mine, theirs in _divided(self.teams[slow], self.teams[other]):
            if (
                min(len(mine), len(theirs)) >= self.replicas
                and self._speed(slow, mine) > limit
                and self._speed(other, theirs) > limit
                and all(self._memory[number] >= self._needs[slow] for number in mine)
                and all(self._memory[number] >= self._needs[other] for number in theirs)
            ):
                return mine, theirs
        return None


def _divided(mine: list[int], theirs: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield new divisions of two teams: all if they are small, else those one move or exchange
    away."""
    both = [*mine, *theirs]
    if len(both) <= SMALL:
        for chosen in itertools.product((True, False), repeat=len(both)):
            yield (
                list(itertools.compress(both, chosen)),
                list(itertools.compress(both, [not mine for mine in chosen])),
            )
        return
    for comes in theirs:
        rest = [number for number in theirs if number != comes]
        yield [*mine, comes], rest
        for goes in mine:
            yield [comes, *(number for number in mine if number != goes)], [*rest, goes]


def _refined(
    model: ModelCosts, machines: Sequence[MachineProfile], count: int, replicas: int
) -> Split:
    """Try all boundaries if few; else move layers off the slowest stage as long as it helps."""
    even = _even(model, [model.layers] * count)
    starts = [even, *_even_within_memory(model, machines, count, replicas)]
    few = math.comb(model.layers - 1, count - 1) <= FEW
    servable = [
        found
        for layers in (_cut(model.layers, count) if few else starts)
        if (found := _if_servable(model, layers, machines, replicas)) is not None
    ]
    if not servable:
        _require_servable(stage_shares(model, even), machines, replicas)
    tried = servable if few else [_climbed(model, machines, found, replicas) for found in servable]
    return max(tried, key=lambda found: found.samples_per_s)


def _cut(layers: int, count: int) -> Iterator[list[int]]:
    for cuts in itertools.combinations(range(1, layers), count - 1):
        yield [end - begin for begin, end in itertools.pairwise((0, *cuts, layers))]


def _climbed(
    model: ModelCosts, machines: Sequence[MachineProfile], best: Split, replicas: int
) -> Split:
    while True:
        stages = stage_shares(model, best.layers)
        teams = [[machines[number] for number in members] for members in best.machines]
        speeds = [share.samples_per_s(team) for share, team in zip(stages, teams, strict=True)]
        giving = speeds.index(min(speeds))
        for taking in range(len(stages)):
            layers = list(best.layers)
            layers[giving] -= 1
            layers[taking] += 1
            found = (
                _if_servable(model, layers, machines, replicas)
                if layers[giving] and taking != giving
                else None
            )
            if found is not None and found.samples_per_s > best.samples_per_s * (1 + _NOTHING):
                best = found
                break
        else:
            return best


def _if_servable(
    model: ModelCosts, layers: Sequence[int], machines: Sequence[MachineProfile], replicas: int
) -> Split | None:
    try:
        return assigned(stage_shares(model, layers), machines, replicas)
    except ValueError:
        return None


def _even(model: ModelCosts, max_layers: Sequence[int]) -> list[int]:
    """Return each stage's layers, up to `max_layers`: one, and more where there is least work."""
    layers = [1] * len(max_layers)
    for _ in range(model.layers - len(max_layers)):
        open_stages = [
            share
            for share in stage_shares(model, layers)
            if layers[share.stage] < max_layers[share.stage]
        ]
        layers[min(open_stages, key=lambda share: share.work).stage] += 1
    return layers


def _even_within_memory(
    model: ModelCosts, machines: Sequence[MachineProfile], count: int, replicas: int
) -> Iterator[list[int]]:
    """Yield an even split within the machines' memory, unless they cannot hold the model.

    The largest machines serve one stage, the next largest another, and so on. All that matters is
    which of these groups serve the ends, where the embedding and the head take memory as well; the
    choice that holds the most layers is taken.
    """
    memory = sorted((machine.memory_bytes for machine in machines), reverse=True)
    groups = [memory[(group + 1) * replicas - 1] for group in range(count)]
    most: list[int] = []
    for ends in itertools.permutations(range(count), min(count, 2)):
        inner = [group for group in range(count) if group not in ends]
        order = [ends[0], *inner, *ends[1:]]
        holds = [_holds(model, stage, count, groups[group]) for stage, group in enumerate(order)]
        if min(holds) >= 1 and sum(holds) > sum(most):
            most = holds
    if sum(most) >= model.layers:
        yield _even(model, most)


def _holds(model: ModelCosts, stage: int, stages: int, memory_bytes: float) -> int:
    """Return the number of layers of this stage that fit into this much memory."""
    none, one = (StageShare(model, 0, layers, stage, stages).memory_bytes for layers in (0, 1))
    if one <= none:
        return model.layers if none <= memory_bytes else 0
    return max(0, min(model.layers, math.floor((memory_bytes - none) / (one - none))))
