"""A stage's initial state: from its servers, this node's disk, its neighbours or the run's seed.

The order of preference is in node/pipeline/recovery/policy.py. This module describes the
situation to it, downloads other stages' states and turns them into tensors, however the method
stores them."""

import logging
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from farflock.node.model.llama import build
from farflock.node.model.replica import PlainReplica
from farflock.node.pipeline.lifecycle.first_weights import fetch_first
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.pipeline.recovery.policy import Situation, source
from farflock.node.pipeline.recovery.rebuild import (
    GradientScale,
    Neighbour,
    Unrecoverable,
    neighbour_mean,
    partner_copy,
)
from farflock.node.run.policies import SWAP
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.checkpoint import Checkpoint
from farflock.node.train.state_sync import (
    MARK,
    NEXT,
    STATE,
    CorruptSnapshot,
    decode_state,
    max_state_bytes,
)
from farflock.optimizers.catalog import method
from farflock.optimizers.method import Tensors
from farflock.optimizers.parts.state import WrongState
from farflock.swarm.chunk_store import digest_of
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable

SCALE = "scale"  # name of the snapshot with a stage's gradient scale
SCALE_TIMEOUT_S = 30.0  # for a neighbour's scale, a single number
_SCALE = struct.Struct("<d")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InitialState:
    """The start of a stage whose state no peer has: its tensors (None if the initial weights or
    a checkpoint are already in place), their kind, and the reason."""

    kind: str
    reason: str
    tensors: Tensors | None = None


def living(peer: Peer, stages: int) -> tuple[int, ...]:
    """Return how many other peers serve each stage and are not known to be gone."""
    view, context = peer.context.views.newest, peer.context
    mates = [[view.peers[index] for index in view.serving(stage)] for stage in range(stages)]
    return tuple(
        sum(mate != context.me and not context.gone(view, mate) for mate in each) for each in mates
    )


async def begin_anew(
    peer: Peer,
    plan: RunPlan,
    pipeline: PipelinePlan,
    index: int,
    after: int,
    saved: Checkpoint | None,
    ends: Tensors | None = None,
) -> InitialState:
    """Choose the state for a stage whose state no peer has, after round `after` of its stream
    (-1: at the run's start). `ends` are exact copies of an end stage's own tensors, if any."""
    snapshot, stages = round_of(saved), pipeline.stages
    if after < 0:
        if snapshot is not None:
            return InitialState("snapshot", f"the run resumes after round {snapshot}")
        if plan.weights is None:
            return InitialState("initial", "the run begins")
        first = await fetch_first(peer, plan, stages[index], index)
        return InitialState("first", "the run begins with its founder's weights", first)
    now = Situation(
        round=after,
        layers=tuple(map(len, stages)),
        living=living(peer, len(stages)),
        snapshots=tuple(snapshot if stage == index else None for stage in range(len(stages))),
        ends=(ends is not None and index == 0, ends is not None and index == len(stages) - 1),
        swapping=pipeline.policy == SWAP,
    )
    try:
        chosen = source(now, index)
        if chosen.kind == "peer":
            raise LifeOver(f"stage {index} has servers again: {chosen.reason}")
        if chosen.kind == "mean":
            return InitialState("mean", chosen.reason, await _mean(peer, plan, stages, index))
        if chosen.kind == "copy":
            partner = await _neighbour(peer, plan, stages, chosen.stages[0])
            copied = partner_copy(plan.model, stages[index], partner, ends)
            return InitialState("copy", chosen.reason, copied)
        if chosen.kind == "snapshot":
            return InitialState("snapshot", chosen.reason)
        raise Unrecoverable(f"{chosen.kind}: {chosen.reason}")
    except (Unrecoverable, SnapshotUnavailable) as reason:
        log.warning("stage %d starts again from initial weights: %s", index, reason)
        if plan.weights is not None:
            first = await fetch_first(peer, plan, stages[index], index)
            return InitialState("first", str(reason), first)
        return InitialState("initial", str(reason))


def round_of(saved: Checkpoint | None) -> int | None:
    """Return the last round in a checkpoint of this stage; None if there is no checkpoint."""
    if saved is None:
        return None
    rounds = saved.meta["node"]["place"]["rounds"]
    return min(rounds.values()) if rounds else None


async def _mean(
    peer: Peer, plan: RunPlan, stages: Sequence[range], index: int
) -> dict[str, torch.Tensor]:
    before = await _neighbour(peer, plan, stages, index - 1)
    after = await _neighbour(peer, plan, stages, index + 1)
    return neighbour_mean(plan.model, stages[index], before, after)


async def _neighbour(peer: Peer, plan: RunPlan, stages: Sequence[range], stage: int) -> Neighbour:
    """Return a stage's tensors, as its members would evaluate them, and its gradient's scale."""
    model = build(plan.model, plan.run_seed, stages[stage])
    replica = PlainReplica(model, plan.inner_of(model))
    most = max_state_bytes(replica.shapes)
    snapshot = await peer.snapshots.fetch(f"{STATE}/{stage}", None, stage=stage, max_bytes=most)
    kept = method(plan.method, **plan.options)
    try:
        found = decode_state(snapshot)
        state = {name: x for name, x in found.items() if not name.startswith((NEXT, MARK))}
        kept.restore(replica, state, "adopt")
    except (CorruptSnapshot, WrongState) as error:
        raise Unrecoverable(f"the state of stage {stage} cannot be used: {error}") from None
    return Neighbour(stages[stage], dict(kept.eval_params(replica)), await _scale(peer, stage))


async def _scale(peer: Peer, stage: int) -> float:
    """Return a stage's weight in the mean; 0 if no peer serves one, as for a stage that never
    trained (two zeros weigh the same)."""
    try:
        snapshot = await peer.snapshots.fetch(
            f"{SCALE}/{stage}", SCALE_TIMEOUT_S, stage=stage, max_bytes=_SCALE.size
        )
        (omega,) = _SCALE.unpack(b"".join(snapshot.chunks))
    except (SnapshotUnavailable, struct.error):
        return 0.0
    return float(omega) if math.isfinite(omega) and omega >= 0 else 0.0


def scale_snapshot(round_number: int, scale: GradientScale) -> Snapshot:
    """Return the snapshot served as `SCALE`."""
    content = _SCALE.pack(scale.omega())
    return Snapshot(max(round_number, -1), digest_of(content), 0, (content,))
