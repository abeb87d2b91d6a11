"""The processes of one peer under torchrun: the leader's node, and what its followers do.

The leader is a node like any other, with a replica and a task that the followers take part in. A
follower knows no swarm: it builds its shard when the leader says of which run, and then does what
it hears until it is sent home.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from farflock.node.assembly.text import text_of
from farflock.node.data.samples import Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.errors import Usage
from farflock.node.model.data import Batches, Start
from farflock.node.model.device import Device
from farflock.node.model.llama import Llama
from farflock.node.model.ranks import Order, Ranks
from farflock.node.model.replica_fsdp import FsdpReplica
from farflock.node.model.sharded_llama import build_sharded
from farflock.node.model.step_options import logits_on
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.run.manifest import parse
from farflock.node.run.terms import RunPlan
from farflock.node.train.shared_task import SharedTask

WHOLE_MATRICES = ("muon",)  # inner optimizers that cannot step rows by themselves


class Assignment(msgspec.Struct, frozen=True):
    """The run that the followers train in, the peer whose batches they share, the leader's choices
    of how (node/model/step_options.py), the folder of weights that a founder's run begins with,
    and where this life of the peer begins in its samples."""

    manifest: bytes
    peer: str
    checkpoints: bool = False
    compiles: bool = False
    micro_batch: int = 0  # 0: all rows of a rank
    weights: str = ""
    start: Start = Start()


class ShardedReplica(NamedTuple):
    """One rank's shard of the model, its replica and its training task."""

    model: Llama
    replica: FsdpReplica
    training_task: SharedTask


def lead(ranks: Ranks, assignment: Assignment, tokens: Text, device: Device) -> ShardedReplica:
    """Let the followers build their shards, and return the leader's; raise `Usage` if the run's
    inner optimizer cannot step them."""
    plan = parse(assignment.manifest).plan()
    if plan.inner.name in WHOLE_MATRICES:
        raise Usage(
            "several processes cannot train this run as one peer",
            f"its inner optimizer, {plan.inner.name}, needs whole matrices",
            "start this peer as one process",
        )
    with ranks.call(Order("begin", text=msgspec.msgpack.encode(assignment))):
        return sharded_replica(plan, tokens, assignment, ranks, device)


def sharded_replica(
    plan: RunPlan, tokens: Text, assignment: Assignment, ranks: Ranks, device: Device
) -> ShardedReplica:
    """Return this rank's shard of a fresh model, with its replica and its training task."""
    computing = Device(device.place, device.name, "bf16" if plan.autocast else device.precision)
    folder = Path(assignment.weights) if assignment.weights else None
    weights = None if folder is None else WeightsFolder(folder, plan.model)
    model = build_sharded(plan.model, plan.run_seed, computing, weights)
    model.checkpointing, model.logits_at_once = assignment.checkpoints, logits_on(device)
    for layer in model.blocks() if assignment.compiles else ():
        layer.compile(dynamic=False)
    replica = FsdpReplica(model, plan.inner_of(model), plan.clip_norm, ranks)
    stream = SampleStream(plan.run_seed, assignment.peer)
    batches = Batches(tokens, stream, plan.batch, plan.seq, plan.samples, assignment.start)
    task = SharedTask(
        model,
        replica,
        batches,
        plan.schedule,
        plan.accumulate,
        device,
        assignment.micro_batch or None,
    )
    return ShardedReplica(model, replica, task)


def follow(ranks: Ranks, device: Device, threads: int, folders: Sequence[Path] = ()) -> None:
    """Do what the leader says until it sends this process home; `folders` have the run's prepared
    data, if it trains on such."""
    torch.set_num_threads(threads)
    mine: ShardedReplica | None = None
    while (order := ranks.hear()).act != "end":
        if order.act == "begin":
            mine = None  # a second one: its leader found no swarm to join, and began a run
            assignment = msgspec.msgpack.decode(order.text, type=Assignment)
            mine = _assigned(assignment, ranks, device, folders)
            continue
        assert mine is not None, f"the leader says {order.act} before it has begun"
        if order.act == "train":
            mine.training_task.take_part(order.start)
        else:
            assert mine.replica.obey(order), f"the leader says {order.act}"


def _assigned(
    assignment: Assignment, ranks: Ranks, device: Device, folders: Sequence[Path]
) -> ShardedReplica:
    manifest = parse(assignment.manifest)
    tokens = text_of(manifest.data, folders).train()
    return sharded_replica(manifest.plan(), tokens, assignment, ranks, device)
