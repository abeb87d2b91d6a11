"""The first weights of a pipeline's stages, where only the run's founder has them.

The founder serves those of each stage that it does not serve itself, read from its folder once a
server of that stage asks. Later servers adopt the state of the first one, as ever.
"""

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from farflock.node.model.replica import in_memory
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.pipeline.lifecycle.rebalancer import LifeOver
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.spool import filled, tensors_of
from farflock.node.train.state_sync import HEAD_BYTES, CorruptSnapshot, Spool, decode_state
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.compute import Compute
from farflock.swarm.peer.peer import Peer
from farflock.swarm.peer.snapshots import Snapshot, SnapshotUnavailable

FIRST = "first"  # name of the snapshots


def serve_first(
    peer: Peer,
    weights: WeightsFolder,
    pipeline: PipelinePlan,
    stages: Iterable[int],
    compute: Compute,
    spool: Spool | None,
) -> None:
    """Serve the first weights of these stages from now on; each is read once it is asked for."""
    spool = spool or Spool(compute, in_memory)

    async def read(span: range) -> Snapshot:
        async with spool.turn:
            found: Snapshot = await spool.compute(partial(_snapshot, weights, span, spool))
        return found

    for index in stages:
        peer.snapshots.serve(f"{FIRST}/{index}", partial(read, pipeline.stages[index]), lambda: 0)


def _snapshot(weights: WeightsFolder, span: range, spool: Spool) -> Snapshot:
    file, chunks, digests = filled(shapes_of(weights.config, span), weights.fill, spool.storage)
    return Snapshot(-1, state_hash(tensors_of(file)), 0, chunks, digests)


async def fetch_first(peer: Peer, plan: RunPlan, span: range, index: int) -> dict[str, Tensor]:
    """Download a stage's first weights from the run's founder; raise `LifeOver` if they cannot be
    had, or are not those of the stage."""
    shapes = shapes_of(plan.model, span)
    most = HEAD_BYTES + sum(4 * math.prod(shape) for shape in shapes.values())
    try:
        snapshot = await peer.snapshots.fetch(f"{FIRST}/{index}", None, max_bytes=most)
        found = decode_state(snapshot)
    except (SnapshotUnavailable, CorruptSnapshot) as error:
        raise LifeOver(f"the first weights of stage {index} cannot be had: {error}") from None
    usual = {name: tuple(x.shape) for name, x in found.items() if x.dtype == torch.float32}
    if usual != shapes or len(found) != len(shapes):
        raise LifeOver(f"the first weights of stage {index} are other tensors than its own")
    return found
