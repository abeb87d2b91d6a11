"""Estimates of whether a run's model, or one stage of it, fits this machine. They need only the
manifest, so they come before any memory is taken.

A pipeline is for models that fit no single machine; each of its stages has to fit some machine.
"""

from typing import Literal, NamedTuple

import psutil

from farflock.compression.activation import ActivationContext
from farflock.compression.activation_catalog import max_bytes, subspace_terms
from farflock.compression.subspace import id_bytes
from farflock.node.errors import FarflockError
from farflock.node.model.device import Device
from farflock.node.model.llama import ModelConfig
from farflock.node.run.basis import basis_bytes
from farflock.node.run.composition import Uncomposable
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.cut import SAVED_SHARE
from farflock.swarm.peer.left import MAX_LEFT_BYTES, MIN_LEFT_BYTES

OuterPlace = Literal["auto", "device", "host", "disk"]  # where the method's state is kept

VALUE_BYTES = 4  # everything is kept in fp32
VALUES = 31  # of a stage
MOMENTS = {"adamw": 2, "nadam": 2, "muon": 2, "sgd": 1}  # values a weight, at most
PAYLOAD_SHARE = 1.25  # what encoding, decoding and a step take beside the payloads
DEVICE_SHARE = 1.25  # of a method's state that must fit a device: blocks, and what else is there
RULE = "stage too large for any machine"
REPLICA_RULE = "replica too large for any machine"


class Exchanged(NamedTuple):
    """Memory of a method beside the model and its optimizer: its own state, what it holds while a
    result is pending, the payloads of a round, and those of earlier rounds that are kept."""

    state_bytes: int = 0
    pending_bytes: int = 0
    payload_bytes: int = 0
    kept_bytes: int = 0


def needed_bytes(plan: RunPlan, exchanged: Exchanged) -> int:
    """Return an estimate of the bytes that training this run's model takes at most.

    The program's own memory comes on top. Weights, gradients, moments, the method's state, the
    payloads, and what a checkpoint copies of all that it writes. Per token of a batch: what the
    backward pass reads again (ten widths and four hidden widths a layer, attention, and the
    logits)."""
    model = plan.model
    weights = VALUE_BYTES * model.parameters()
    moments = weights * MOMENTS[plan.inner.name]
    if plan.inner.name == "sgd" and not plan.inner.momentum:
        moments = 0
    payloads = int(PAYLOAD_SHARE * exchanged.payload_bytes) + exchanged.kept_bytes
    written = 2 * weights + moments + exchanged.state_bytes
    a_token = model.layers * layer_values(model, plan.seq) + 3 * model.vocab_size
    activations = VALUE_BYTES * plan.batch * plan.seq * a_token
    state = exchanged.state_bytes + exchanged.pending_bytes
    return 2 * weights + moments + state + payloads + written // SAVED_SHARE + activations


def layer_values(model: ModelConfig, seq: int) -> int:
    """Return how many numbers per token a layer's backward pass reads again."""
    return 10 * model.dim + 4 * model.ffn_dim + model.heads * seq


def kept_outer(
    outer: OuterPlace, plan: RunPlan, exchanged: Exchanged, device: Device | None = None
) -> Literal["device", "host", "disk"]:
    """Return where to keep the outer state: where that is chosen, or else on the device if that has
    room, in memory if the run fits what is free of it, or on the disk."""
    if outer != "auto":
        return outer
    if device is not None and device.place.type != "cpu" and device.has_float64:
        state = exchanged.state_bytes + exchanged.pending_bytes
        needed = needed_bytes(plan, Exchanged()) + int(DEVICE_SHARE * state)
        if needed <= device.memory()[0]:
            return "device"
    free_bytes = int(psutil.virtual_memory().available)
    return "host" if needed_bytes(plan, exchanged) <= free_bytes else "disk"


def require_memory(
    plan: RunPlan,
    error: type[FarflockError],
    outer: OuterPlace = "host",
    exchanged: Exchanged | None = None,
    device: Device | None = None,
) -> None:
    """Raise `error`, with the numbers, if the run takes more memory than this machine has free; the
    method's state can be on the disk or the device."""
    exchanged = exchanged or Exchanged()
    state, pending = exchanged.state_bytes, exchanged.pending_bytes
    elsewhere = {"host": 0, "disk": state, "device": state + pending}[
        kept_outer(outer, plan, exchanged, device)
    ]
    needed, free = needed_bytes(plan, exchanged) - elsewhere, int(psutil.virtual_memory().available)
    if needed > free:
        disk = "keep the outer state on the disk (--outer disk), "
        remedy = disk if outer == "host" and exchanged.state_bytes else ""
        why = (
            f"training its {plan.model.parameters():,} parameters takes about"
            f" {needed / 1e6:,.0f} MB of memory, and {free / 1e6:,.0f} MB are free here"
        )
        raise error(
            "the run's model is too large for this machine",
            why,
            f"{remedy}close programs, or use a larger machine",
        )


def stage_parameters(model: ModelConfig, span: range) -> int:
    """Return a stage's number of weights: layers, and at the ends embedding or norm and head."""
    table = model.vocab_size * model.dim
    ends = (
        (model.parameters() - model.dim - (1 if model.tied else 2) * table)
        // model.layers
        * len(span)
    )
    return (
        ends
        + (table if span.start == 0 else 0)
        + (model.dim + table if span.stop == model.layers else 0)
    )


def needed_stage_bytes(plan: RunPlan, pipeline: PipelinePlan, stage: int) -> int:
    """Return an upper estimate of the bytes that serving this stage takes.

    The program's own memory comes on top.

    Counted as for whole models (`needed_bytes`), plus pending gradients, what passes keep of the
    microbatches computed at once, payloads that wait or stay for other servers, a codec's basis,
    and its sample memory."""
    span, server, tokens = pipeline.stages[stage], pipeline.server, plan.batch * plan.seq
    weights = stage_parameters(plan.model, span)
    a_token = len(span) * layer_values(plan.model, plan.seq) + (
        3 * plan.model.vocab_size if _is_last(plan, span) else 0
    )
    computed = max(server.together * plan.model.dim * 2, a_token) * tokens
    shape = (plan.batch, plan.seq, plan.model.dim)
    forward, backward = (
        max_bytes(pipeline.codec, ActivationContext(shape, plan.dtype, direction=direction))
        for direction in ("forward", "backward")
    )
    waiting = server.queue * (2 * forward + backward + 3 * tokens * id_bytes(plan.model.vocab_size))
    if pipeline.trainer.direct and forward >= MIN_LEFT_BYTES:
        waiting += min(pipeline.trainer.kept * 2 * (forward + backward), MAX_LEFT_BYTES)
    terms = subspace_terms(pipeline.codec)
    shared = (
        basis_bytes(plan.model.dim, terms.rank, plan.model.vocab_size) if terms is not None else 0
    )
    remembered = (2 - (span.start == 0) - _is_last(plan, span)) * (pipeline.cache_bytes or 0)
    if pipeline.turns is not None:  # each version, and a copy for download
        shared += 2 * pipeline.turns.max_held * 4 * plan.model.vocab_size * plan.model.dim
    copies = VALUES + server.places + _kept_copies(pipeline)
    return plan.dtype.itemsize * (weights * copies + computed) + waiting + shared + remembered


def require_stage_memory(
    plan: RunPlan, pipeline: PipelinePlan, stage: int, *free_bytes: int
) -> None:
    """Raise `Uncomposable` if this stage fits none of the machines with this much free memory."""
    needed, largest = needed_stage_bytes(plan, pipeline, stage), max(free_bytes, default=0)
    if needed <= largest:
        return
    span, count = pipeline.stages[stage], len(pipeline.stages)
    why = (
        f"serving stage {stage} of {count}, {len(span)} layers with"
        f" {stage_parameters(plan.model, span):,} parameters, takes about"
        f" {needed / 1e6:,.0f} MB of memory, and {largest / 1e6:,.0f} MB are free"
    )
    others = [
        index for index in range(count) if needed_stage_bytes(plan, pipeline, index) <= largest
    ]
    serve = f"serve stage {others[0]}, or " if others else ""
    raise Uncomposable(RULE, why, f"{serve}cut the model into more stages, or use a larger machine")


def needed_replica_bytes(plan: RunPlan, pipeline: PipelinePlan) -> int:
    """Return the bytes of a full replica, which serves each stage as a server of that stage alone
    would; this includes what a microbatch's pass through all of them keeps."""
    return sum(needed_stage_bytes(plan, pipeline, stage) for stage in range(len(pipeline.stages)))


def require_replica_memory(plan: RunPlan, pipeline: PipelinePlan, *free_bytes: int) -> None:
    """Raise `Uncomposable` if no machine with this much free memory fits all stages together."""
    needed, largest = needed_replica_bytes(plan, pipeline), max(free_bytes, default=0)
    if needed <= largest:
        return
    why = (
        f"a full replica holds all {len(pipeline.stages)} stages with"
        f" {plan.model.parameters():,} parameters and takes about {needed / 1e6:,.0f} MB of memory,"
        f" and {largest / 1e6:,.0f} MB are free"
    )
    fitting = [
        index
        for index in range(len(pipeline.stages))
        if needed_stage_bytes(plan, pipeline, index) <= largest
    ]
    serve = (
        f"serve one stage (--role stage, or stage:{fitting[0]})"
        if fitting
        else "train without weights (--role trainer)"
    )
    raise Uncomposable(REPLICA_RULE, why, f"{serve}, or use a larger machine")


def _kept_copies(pipeline: PipelinePlan) -> int:
    """Return the number of extra copies for stages that keep versions: each old version and the
    sum merged for it, the passes' substitute for the newest version, and for predictions a trend
    and the weights before a step."""
    terms = pipeline.asynchronous
    return 0 if terms is None else 2 * (terms.versions - 1) + 1 + 2 * terms.predicts


def _is_last(plan: RunPlan, span: range) -> bool:
    return span.stop == plan.model.layers
