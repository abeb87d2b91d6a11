"""The ladder of sources for a lost stage's state, from the stage's peers down to a step back of
all.

A pure function of a small description, so that all peers in the same situation choose alike and
state the reason in words. Lossless sources come first, then those that cost one stage some
progress; going back, which costs every stage's, is last."""

from dataclasses import dataclass
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

    By stage: `layers`, its number of layers; `living`, how many peers hold its state and answer;
    `snapshots`, the round of the freshest available one or None.

    `round` is the newest closed round; `ends` says if others hold exact copies of the first stage's
    embedding and of the last one's norm and head; `swapping`, if the run has trained with
    CheckFree+'s swap; `cut` is the last round of which every stage's checkpoint is available."""

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
                f"layers, living and snapshots are of {counts} stages; give one entry a stage of each"
            )


@dataclass(frozen=True, slots=True)
class StateSource:
    """The source of a stage's state.

    `peer`: a download of the run's state from the stage's peers; `snapshot`: the stage's own of
    `round`; `mean` and `copy`: the layers of `stages` (a copied end stage also takes the exact copy
    of its embedding or head); `cut`: every stage's checkpoint of `round`. `reason` says why, and
    why nothing better."""

    kind: RecoveryKind
    stages: tuple[int, ...]
    round: int | None
    reason: str


def plan(now: Situation) -> dict[int, StateSource]:
    """Return the sources of all stages without servers; of every stage, if one can only go back."""
    found = {stage: source(now, stage) for stage, living in enumerate(now.living) if not living}
    back = next((chosen for chosen in found.values() if chosen.kind == "cut"), None)
    return found if back is None else dict.fromkeys(range(len(now.layers)), back)


def source(now: Situation, stage: int) -> StateSource:
    """Return the best source for a peer that takes up this stage; raise `Unrecoverable` if there is
    none. Specs: a peer of the stage, a snapshot younger than `max_age_rounds`, the neighbours' mean
    (a copy at the ends and in swapped pairs), the last consistent cut."""
    refusals: list[str] = []
    for rung in (_peer, _snapshot, _neighbours, _cut):
        found = rung(now, stage)
        if isinstance(found, StateSource):
            return StateSource(
                found.kind, found.stages, found.round, "; ".join((*refusals, found.reason))
            )
        refusals.append(found)
    remedy = "keep checkpoints of every stage at a common round, and begin again from what is left"
    raise Unrecoverable(f"stage {stage} cannot be recovered: {'; '.join(refusals)}; {remedy}")


def _peer(now: Situation, stage: int) -> StateSource | str:
    if living := now.living[stage]:
        return StateSource(
            "peer",
            (stage,),
            now.round,
            f"{living} of stage {stage} {'is' if living == 1 else 'are'} there",
        )
    return f"nobody of stage {stage} is left"


def _snapshot(now: Situation, stage: int) -> StateSource | str:
    taken = now.snapshots[stage]
    if taken is None:
        return "no snapshot of it can be had"
    age = now.round - taken
    if age >= now.max_age_rounds:
        return f"its freshest snapshot is {age} rounds old, {now.max_age_rounds} or more"
    return StateSource(
        "snapshot", (stage,), taken, f"its snapshot of round {taken} is {age} rounds old"
    )


def _neighbours(now: Situation, stage: int) -> StateSource | str:
    last = len(now.layers) - 1
    if stage in (0, last):
        return _end(now, stage)
    twin = _twin(now, stage)
    beside = (stage - 1, stage + 1) if twin is None else (twin,)
    if lost := [other for other in beside if not now.living[other]]:
        return f"{DOUBLE}: stage {lost[0]} is lost too"
    if odd := [other for other in beside if now.layers[other] != now.layers[stage]]:
        return f"{UNEQUAL}: stage {stage} has {now.layers[stage]} layers, stage {odd[0]} {now.layers[odd[0]]}"
    if twin is not None:
        return StateSource(
            "copy", beside, now.round, f"copy of stage {twin}, which was trained to stand in for it"
        )
    return StateSource("mean", beside, now.round, f"mean of stages {stage - 1} and {stage + 1}")


def _end(now: Situation, stage: int) -> StateSource | str:
    first, last = now.ends
    part, beside, held = ("embedding", 1, first) if stage == 0 else ("head", stage - 1, last)
    if not held:
        return f"{END}: nobody has an exact copy of its {part}"
    if len(now.layers) == 1 or not now.living[beside]:
        return f"{DOUBLE}: its only neighbour is lost too"
    if now.layers[beside] != now.layers[stage]:
        return f"{UNEQUAL}: stage {stage} has {now.layers[stage]} layers, stage {beside} {now.layers[beside]}"
    return StateSource(
        "copy", (beside,), now.round, f"copy of stage {beside}, and the exact copy of its {part}"
    )


def _twin(now: Situation, stage: int) -> int | None:
    """Return the stage that a lost first or last block stage is copied from (specs 3.2) if the run
    swaps, else None. The pairs' inner stages take their neighbours' mean, like all others."""
    if not now.swapping or stage not in (1, len(now.layers) - 2):
        return None
    return partners(now.layers)[stage]


def _cut(now: Situation, stage: int) -> StateSource | str:
    if now.cut is None:
        return "there is no round of which every stage has a checkpoint"
    everybody = tuple(range(len(now.layers)))
    return StateSource("cut", everybody, now.cut, f"all stages go back to round {now.cut}")
