"""The room on disk that a node takes: reckoned from the manifest, before anything is written.

A run needs room for the method's state if that is on disk, for snapshots that are downloaded or
served, for past rounds that a member may ask for, for one checkpoint while another is written, and
for the shards that are read next. What `--disk` allows beyond that goes to older checkpoints, as
far as they are wanted, and then to the cache of shards.
"""

from collections.abc import Sequence
from typing import NamedTuple

from farflock.node.data.index import MAX_SHARD_BYTES
from farflock.node.data.shard_order import OPEN_SHARDS
from farflock.node.errors import FarflockError
from farflock.node.run.fit import SHARED_MOMENTS
from farflock.node.run.manifest import Manifest
from farflock.node.run.memory import VALUE_BYTES, Exchanged, moment_bytes, stage_parameters
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.train.run_size import StreamSize, exchanged, stream_sizes
from farflock.optimizers.catalog import method, unfolded
from farflock.swarm.peer.round_log import (
    LOG_ROUNDS,
    MAX_LOG_BYTES,
    MIN_SHELVED_BYTES,
    OLD_LOG_BYTES,
)

# at once: the one that is served, and the next one, or one that is downloaded; before a node is a
# member, the download and its chunks, kept for another start
SNAPSHOTS = 2
CHECKPOINTS = 2  # at least: one is intact while another is written
READ_BYTES = 2 * OPEN_SHARDS * MAX_SHARD_BYTES  # of a source: the group that is read, and the next


_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))


class DiskNeed(NamedTuple):
    """Bytes of files, at most: the method's state, snapshots, past rounds, one checkpoint, and the
    shards that are read next."""

    outer: int = 0
    snapshots: int = 0
    rounds: int = 0
    checkpoint: int = 0
    data: int = 0

    @property
    def min_bytes(self) -> int:
        """The bytes without which the run cannot go on."""
        return self.outer + self.snapshots + self.rounds + CHECKPOINTS * self.checkpoint + self.data


class DiskPlan(NamedTuple):
    """Shares of a disk, in bytes; `data` are the shards that the cache keeps."""

    checkpoints: int
    snapshots: int
    rounds: int
    outer: int
    data: int

    def __str__(self) -> str:
        names = ("checkpoints", "snapshots", "past rounds", "the method's state", "data")
        shares = zip(names, self, strict=True)
        listed = ", ".join(f"{shown(size)} of {name}" for name, size in shares if size)
        whole = f"this node takes up to {shown(sum(self))} of the disk"
        return f"{whole}: {listed}" if listed else "this node takes next to nothing of the disk"


def disk_need(
    manifest: Manifest, stages: Sequence[int] | None, *, outer: bool, fetched: int
) -> DiskNeed:
    """Return what a node of a run takes that holds these stages (None: the whole model), with the
    method's state on the disk if `outer`, and whose shards come from members for so many
    sources."""
    plan, pipeline = manifest.plan(), manifest.pipeline_plan()
    members = max(manifest.exchange.start_peers, 2)
    sizes = stream_sizes(plan, pipeline)
    beside = exchanged(plan, members, sizes)
    share = _share(plan, pipeline, stages)
    snapshot = int(share * snapshot_bytes(plan, beside))
    rounds = sum(_log_bytes(size, members, pipeline is not None) for size in _held(sizes, stages))
    if method(plan.method, **plan.options).equality == "exact":
        rounds = max(rounds, snapshot)  # for whoever reads a snapshot
    return DiskNeed(
        int(share * beside.state_bytes) if outer else 0,
        SNAPSHOTS * snapshot,
        rounds,
        int(share * checkpoint_bytes(plan, beside)),
        fetched * READ_BYTES,
    )


def planned(
    need: DiskNeed,
    disk: int | None,
    keep: int,
    keep_bytes: int | None,
    cache: int,
    error: type[FarflockError],
) -> DiskPlan:
    """Return what a disk is given to of which the node may take `disk` bytes; None: what it needs,
    and `cache` for shards. Raise `error`, with both numbers, if that is not enough."""
    wanted = max(keep + 1, CHECKPOINTS) * need.checkpoint
    if keep_bytes is not None:
        wanted = min(wanted, need.checkpoint + max(keep_bytes, need.checkpoint))
    if disk is None:
        return DiskPlan(wanted, need.snapshots, need.rounds, need.outer, need.data and cache)
    left = disk - need.min_bytes
    if left < 0:
        raise error(
            f"the run needs more of the disk than --disk {shown(disk)}",
            f"it takes about {shown(need.min_bytes)} at least: {CHECKPOINTS} checkpoints of"
            f" {shown(need.checkpoint)}, {shown(need.snapshots)} of snapshots, {shown(need.rounds)}"
            f" of past rounds, {shown(need.outer)} of the method's state and {shown(need.data)} of"
            " data",
            "allow that much, or use a machine with more room",
        )
    older = min(left, wanted - CHECKPOINTS * need.checkpoint)
    checkpoints = CHECKPOINTS * need.checkpoint + older
    data = need.data + left - older if need.data else 0
    return DiskPlan(checkpoints, need.snapshots, need.rounds, need.outer, data)


def shown(count: int) -> str:
    """Return a number of bytes for people."""
    unit, size = next((each for each in _UNITS if count >= each[1]), _UNITS[-1])
    return f"{count / size:,.1f} {unit}"


def _held(sizes: Sequence[StreamSize], stages: Sequence[int] | None) -> list[StreamSize]:
    """Return the streams of these stages."""
    if stages is None:
        return list(sizes)
    ends = {f"/{stage}" for stage in stages}
    return [size for size in sizes if size.stream[size.stream.rfind("/") :] in ends]


def _share(plan: RunPlan, pipeline: PipelinePlan | None, stages: Sequence[int] | None) -> float:
    """Return the part of the model's weights that is held; more than 1 if some are in two
    stages."""
    if pipeline is None or stages is None:
        return 1.0
    held = sum(stage_parameters(plan.model, pipeline.stages[stage]) for stage in stages)
    return held / plan.model.parameters()


def checkpoint_bytes(plan: RunPlan, beside: Exchanged) -> int:
    """Return the bytes of one checkpoint, at most: weights, as the shared state and as the model
    have them too, moments, the method's state, and what was sent and came of a pending exchange."""
    copies = 3 + (2 if beside.payload_bytes else 0)
    weights = copies * VALUE_BYTES * plan.model.parameters()
    return weights + moment_bytes(plan) + beside.state_bytes + beside.pending_bytes


def snapshot_bytes(plan: RunPlan, beside: Exchanged) -> int:
    """Return the bytes of a state that newcomers download: the weights, the method's state, and
    moments that all share."""
    moments = moment_bytes(plan) if unfolded(plan.method)[0] in SHARED_MOMENTS else 0
    return VALUE_BYTES * plan.model.parameters() + beside.state_bytes + moments


def _log_bytes(size: StreamSize, members: int, witnessed: bool) -> int:
    """Return the bytes of a stream's past rounds, of which smaller ones stay in memory."""
    content = size.back_bytes if size.kind == "mean" else members * size.out_bytes
    if content < MIN_SHELVED_BYTES:
        return 0
    kept = min(LOG_ROUNDS * content, max(MAX_LOG_BYTES, content)) + content  # until the oldest goes
    return kept + (OLD_LOG_BYTES if witnessed else 0)
