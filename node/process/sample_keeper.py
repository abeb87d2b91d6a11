"""A node's position in its samples, kept after each round that counted some of them.

A checkpoint has a position too, that of its own step: whoever takes up the state of a checkpoint
goes on there, for no later round is left. Whoever takes the swarm's state goes on at the first
sample that no round has counted.
"""

import logging
from pathlib import Path

from farflock.node.assembly.checkpoints import SAMPLES
from farflock.node.assembly.node import ReplicaNode
from farflock.node.data.coming_shards import ReadingStopped
from farflock.node.model.batches_ahead import BatchesAhead
from farflock.node.model.data import Batches, Start
from farflock.node.run.manifest import Manifest
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt
from farflock.node.state.sample_position import SamplePosition
from farflock.optimizers.method import Result
from farflock.swarm.compute import Compute

log = logging.getLogger(__name__)


class SampleKeeper:
    """Keeps the place of the first batch that no round has counted."""

    def __init__(
        self, position: SamplePosition, batches: Batches | BatchesAhead, compute: Compute
    ) -> None:
        self._position, self._batches = position, batches
        self._compute, self._fails = compute, False

    def place(self, batch: int) -> bytes:
        """Return the place of a batch, for a checkpoint. If the node stops while the shards that
        lead there are missing, return that of the first sample that no round has counted: a few
        samples come twice, and the checkpoint is written."""
        try:
            return self._batches.cursor(batch)
        except ReadingStopped:
            log.info("some samples since the last round come again when this node goes on")
            return self._position.read()

    async def counted(self, batch: int) -> None:
        """Note that all batches before this one count, and wait until that is on the disk. A full
        disk must not end the node, nor must a stop while shards are missing."""
        try:
            await self._compute(lambda: self._position.write(self._batches.cursor(batch)))
            self._fails = False
        except ReadingStopped:
            return  # the round before it stays
        except OSError as error:
            if not self._fails:
                log.warning("cannot keep the position in the data: %s", error.strerror)
            self._fails = True


def keep_samples(node: ReplicaNode, keeper: SampleKeeper, accumulate: int) -> None:
    """Let a node's loop keep its place after each round that has its work; a step takes
    `accumulate` batches."""
    me = node.peer.me

    async def counted(result: Result, step: int) -> None:
        if me in result.participants:
            await keeper.counted(step * accumulate)

    node.loop.counted = counted


def founders_start(folder: Path, manifest: Manifest, run: str, saved: Checkpoint | None) -> Start:
    """Return where a founder begins: at the first sample, or where a checkpoint's state leaves off.
    A trainer in a pipeline has no state, and goes on as a joiner does."""
    if saved is not None and manifest.pipeline is not None:
        return joiners_start(folder, manifest, run, None)
    return _start_of(saved, manifest.train.accumulate)


def joiners_start(folder: Path, manifest: Manifest, run: str, saved: Checkpoint | None) -> Start:
    """Return where a node begins that takes the swarm's state, but its step from a checkpoint."""
    start = _start_of(saved, manifest.train.accumulate)
    cursor = SamplePosition(folder, run).read()
    return start._replace(cursor=cursor) if cursor else start


def _start_of(saved: Checkpoint | None, accumulate: int) -> Start:
    """Return a checkpoint's place; raise `CheckpointCorrupt` if it names none."""
    if saved is None:
        return Start()
    found = saved.meta.get(SAMPLES, "")
    try:
        cursor = bytes.fromhex(found)
    except (TypeError, ValueError):
        raise CheckpointCorrupt(
            f"{saved.folder} does not say where its node stood in the data; use another checkpoint"
        ) from None
    return Start(cursor, saved.step * accumulate)
