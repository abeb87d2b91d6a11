"""The processes of one peer under torchrun: the leader's node, and what its followers do.

The leader is a node like any other, with a replica and a task that the followers take part in. A
follower knows no swarm: it builds its shard when the leader says of which run, and then does what
it hears until it is sent home.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from farflock.node.assembly.text import text_here
from farflock.node.data.local_data import LocalData
from farflock.node.data.sequences import Text, stream_of
from farflock.node.errors import Usage
from farflock.node.model.device import Device
from farflock.node.model.hf_shape import HfShape
from farflock.node.model.llama import Llama
from farflock.node.model.ranks import Order, Ranks
from farflock.node.model.replica_fsdp import FsdpReplica
from farflock.node.model.sharded_llama import build_sharded
from farflock.node.model.step_options import logits_on
from farflock.node.run.manifest import Manifest, parse
from farflock.node.run.model_section import first_weights
from farflock.node.run.terms import RunPlan
from farflock.node.train.shared_meter import SharedMeter, shared_meter
from farflock.node.train.shared_task import SharedTask

WHOLE_MATRICES = ("muon",)  # inner optimizers that cannot step rows by themselves


class Assignment(msgspec.Struct, frozen=True):
    """The run that the followers train in, the peer whose batches they share, and the leader's
    choices of how (node/model/step_options.py)."""

    manifest: bytes
    peer: str
    checkpoints: bool = False
    compiles: bool = False
    micro_batch: int = 0  # 0: all rows of a rank
    folders: tuple[str, ...] = ()  # of prepared data, the cache last
    weights: str = ""  # the folder that the run starts from, at a founder's leader only


class SharedPart(NamedTuple):
    """One rank's shard of the model, and its part in training it."""

    model: Llama
    replica: FsdpReplica
    training_task: SharedTask


def lead(ranks: Ranks, assignment: Assignment, text: Text, device: Device) -> SharedPart:
    """Let the followers build their shards, and return the leader's; raise `Usage` if the run's
    inner optimizer cannot step them."""
    plan = parse(assignment.manifest).plan()
    if plan.inner.name in WHOLE_MATRICES:
        raise Usage(
            "several processes cannot train this run as one peer",
            f"its inner optimizer, {plan.inner.name}, needs whole matrices",
            "start this peer as one process",
        )
    if isinstance(plan.model, HfShape):
        raise Usage(
            "several processes cannot train this run as one peer",
            "its model is of a class of transformers, which is not cut into shards",
            "start this peer as one process",
        )
    with ranks.call(Order("begin", text=msgspec.msgpack.encode(assignment))):
        return shared_part(plan, text, assignment, ranks, device)


def shared_part(
    plan: RunPlan, text: Text, assignment: Assignment, ranks: Ranks, device: Device
) -> SharedPart:
    """Return this rank's shard of a fresh model, and its part in training that."""
    computing = Device(device.place, device.name, "bf16" if plan.autocast else device.precision)
    folder = Path(assignment.weights) if assignment.weights else None
    weights = None if folder is None else first_weights(plan, folder)
    fill = None if weights is None else weights.fill
    model = build_sharded(plan.model, plan.run_seed, computing, fill)
    model.checkpointing, model.logits_at_once = assignment.checkpoints, logits_on(device)
    compiles = assignment.compiles and plan.model.experts is None
    for layer in model.blocks() if compiles else ():
        layer.compile(dynamic=False)
    replica = FsdpReplica(model, plan.inner_of(model), plan.clip_norm, ranks)
    terms = plan.run_seed, assignment.peer, plan.batch, plan.seq
    batches = stream_of(text, *terms, recurring=plan.samples)
    computed = device, assignment.micro_batch or None
    task = SharedTask(model, replica, batches, plan.schedule, plan.accumulate, *computed)
    return SharedPart(model, replica, task)


def follow(ranks: Ranks, device: Device, threads: int) -> None:
    """Do what the leader says until it sends this process home."""
    torch.set_num_threads(threads)
    following: tuple[SharedPart, SharedMeter] | None = None
    while (order := ranks.hear()).act != "end":
        if order.act == "begin":
            following = None  # a second one: its leader found no swarm to join, and began a run
            assignment = msgspec.msgpack.decode(order.text, type=Assignment)
            following = _assigned(assignment, ranks, device)
            continue
        assert following is not None, f"the leader says {order.act} before it has begun"
        _obey(*following, order)


def _obey(part: SharedPart, meter: SharedMeter, order: Order) -> None:
    if order.act == "train":
        part.training_task.take_part(order.start)
    elif order.act == "measure":
        meter.take_part(order)
    else:
        assert part.replica.obey(order), f"the leader says {order.act}"


def _assigned(
    assignment: Assignment, ranks: Ranks, device: Device
) -> tuple[SharedPart, SharedMeter]:
    manifest = parse(assignment.manifest)
    text = text_here(manifest.data, _local_data_of(manifest, assignment))
    part = shared_part(manifest.plan(), text, assignment, ranks, device)
    return part, shared_meter(part.model, part.training_task)


def _local_data_of(manifest: Manifest, assignment: Assignment) -> LocalData | None:
    """Return the files of prepared data, which the leader fetches for all; None for a corpus."""
    root = manifest.data.root
    if root is None:
        return None
    *folders, cache = map(Path, assignment.folders)
    return LocalData(root, folders, cache)
