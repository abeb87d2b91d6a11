"""The sources for a lost stage's state in order of preference, from the stage's peers down to a
common rollback.

The choice is a pure function of a small description, so that all peers in the same situation
choose alike and give the same reason. Lossless sources come first, then those that cost one
stage some progress; a rollback, which costs all stages progress, comes last."""

from dataclasses import dataclass, replace
from typing import Literal

from farflock.node.pipeline.recovery.rebuild import DOUBLE, END, UNEQUAL, Unrecoverable
from farflock.swarm.paths.checkfree import partners

# Snapshots this old are worse than the neighbours' mean. A choice, not a measurement: a mean cost
# about 30 steps in experiments/pipelines/checkfree.py; one old stage should cost less than its age.
MAX_AGE_ROUNDS = 100

RecoveryKind = Literal["peer", "snapshot", "mean", "copy", "cut"]


@dataclass(frozen=True, slots=True)
class Situation:
    """The available sources.

    By stage: `layers`, its number of layers; `living`, the number of peers that hold its state and
    answer; `snapshots`, the round of the freshest available snapshot, or None.

    `round` is the newest closed round; `ends`, whether other peers hold exact copies of the
    first stage's embedding and of the last one's norm and head; `swapping`, whether the run has
    trained with CheckFree+'s swap; `cut`, the last round of which every stage's checkpoint is
    available."""

    round: int
    layers: tuple[int, ...]
    living: tuple[int, ...]
    snapshots: tuple[int | None, ...]
    ends: tuple[bool, bool] = (False, False)
    swapping: bool = False
    cut: int | None = None
    max_age_rounds: int = MAX_AGE_ROUNDS

    def __post_init__(self) -> None:
        if not len(self.layers) == len(self.living) == len(self.snapshots) or not self.layers:
            counts = len(self.layers), len(self.living), len(self.snapshots)
            raise ValueError(
                f"layers, living and snapshots have {counts} entries; give each one entry per stage"
            )


@dataclass(frozen=True, slots=True)
class StateSource:
    """The source of a stage's state.

    `peer`: a download of the run's state from the stage's peers; `snapshot`: the stage's own
    snapshot of `round`; `mean` and `copy`: the layers of `stages` (a copied end stage also takes
    the exact copy of its embedding or head); `cut`: every stage's checkpoint of `round`.
    `reason` says why this source was chosen, and why no better one."""

    kind: RecoveryKind
    stages: tuple[int, ...]
    round: int | None
    reason: str


def plan(now: Situation) -> dict[int, StateSource]:
    """Return the sources of all stages without servers; if one of them needs a rollback, those
    of every stage."""
    found = {stage: source(now, stage) for stage, living in enumerate(now.living) if not living}
    back = next((chosen for chosen in found.values() if chosen.kind == "cut"), None)
    return found if back is None else dict.fromkeys(range(len(now.layers)), back)


def source(now: Situation, stage: int) -> StateSource:
    """Return the best source for a peer that takes over this stage; raise `Unrecoverable` if
    there is none. In order: a peer of the stage, a snapshot younger than `max_age_rounds`, the
    neighbours' mean (a copy at the ends and in swapped pairs), the last consistent cut."""
    refusals: list[str] = []
    for rung in (_peer, _snapshot, _neighbours, _cut):
        found = rung(now, stage)
        if isinstance(found, StateSource):
            return replace(found, reason="; ".join((*refusals, found.reason)))
        refusals.append(found)
    remedy = "keep checkpoints of every stage at a common round, and start again from what is left"
    raise Unrecoverable(f"stage {stage} cannot be recovered: {'; '.join(refusals)}; {remedy}")


def _peer(now: Situation, stage: int) -> StateSource | str:
    if living := now.living[stage]:
        peers = "1 peer holds it" if living == 1 else f"{living} peers hold it"
        return StateSource("peer", (stage,), now.round, peers)
    return f"no peer of stage {stage} is left"


def _snapshot(now: Situation, stage: int) -> StateSource | str:
    taken = now.snapshots[stage]
    if taken is None:
        return "there is no snapshot of it"
    age = now.round - taken
    if age >= now.max_age_rounds:
        return f"its freshest snapshot is {age} rounds old, the limit is {now.max_age_rounds}"
    reason = f"its snapshot of round {taken} is {age} rounds old"
    return StateSource("snapshot", (stage,), taken, reason)


def _neighbours(now: Situation, stage: int) -> StateSource | str:
    last = len(now.layers) - 1
    if stage in (0, last):
        return _end(now, stage)
    twin = _twin(now, stage)
    beside = (stage - 1, stage + 1) if twin is None else (twin,)
    if lost := [other for other in beside if not now.living[other]]:
        return f"{DOUBLE}: stage {lost[0]} is lost too"
    if odd := [other for other in beside if now.layers[other] != now.layers[stage]]:
        return _unequal(now, stage, odd[0])
    if twin is not None:
        reason = f"copy of stage {twin}, which was trained to stand in for it"
        return StateSource("copy", beside, now.round, reason)
    return StateSource("mean", beside, now.round, f"mean of stages {stage - 1} and {stage + 1}")


def _end(now: Situation, stage: int) -> StateSource | str:
    first, last = now.ends
    end, beside, held = ("embedding", 1, first) if stage == 0 else ("head", stage - 1, last)
    if not held:
        return f"{END}: no peer has an exact copy of its {end}"
    if len(now.layers) == 1 or not now.living[beside]:
        return f"{DOUBLE}: its only neighbour is lost too"
    if now.layers[beside] != now.layers[stage]:
        return _unequal(now, stage, beside)
    reason = f"copy of stage {beside}, and the exact copy of its {end}"
    return StateSource("copy", (beside,), now.round, reason)


def _unequal(now: Situation, stage: int, other: int) -> str:
    mine, theirs = now.layers[stage], now.layers[other]
    return f"{UNEQUAL}: stage {stage} has {mine} layers, stage {other} has {theirs}"


def _twin(now: Situation, stage: int) -> int | None:
    """Return the stage that a lost first or last block stage is copied from (CheckFree+, section
    3.2) if the run swaps, else None. All other stages take the mean of their neighbours."""
    if not now.swapping or stage not in (1, len(now.layers) - 2):
        return None
    return partners(now.layers)[stage]


def _cut(now: Situation, stage: int) -> StateSource | str:
    if now.cut is None:
        return "there is no round of which every stage has a checkpoint"
    stages = tuple(range(len(now.layers)))
    return StateSource("cut", stages, now.cut, f"all stages go back to round {now.cut}")
