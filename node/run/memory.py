"""Estimates of whether a run's model, or one stage of it, fits this machine. They need only the
manifest, so they come before any memory is taken.

A pipeline is for models that fit no single machine; each of its stages has to fit some machine.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from farflock.compression.activation import ActivationContext
from farflock.compression.activation_catalog import max_bytes, subspace_terms
from farflock.compression.subspace import id_bytes
from farflock.node.errors import FarflockError
from farflock.node.machine import host_memory
from farflock.node.model.device import Device
from farflock.node.model.evaluation import AT_ONCE
from farflock.node.model.llama import ModelConfig
from farflock.node.model.loss import MAX_LOGITS
from farflock.node.model.step_options import activation_bytes
from farflock.node.run.basis import basis_bytes
from farflock.node.run.composition import Uncomposable
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.node.state.cut import SAVED_SHARE
from farflock.optimizers.catalog import METHODS, unfolded
from farflock.optimizers.parts.packed_moment import BYTES
from farflock.optimizers.parts.small_adamw import MomentType
from farflock.swarm.peer.left import MAX_LEFT_BYTES, MIN_LEFT_BYTES

OuterPlace = Literal["auto", "device", "host", "disk"]  # where the method's state is kept

VALUE_BYTES = 4  # everything is kept in fp32
TOKEN_BYTES = 8
VALUES = 31  # of a stage
MOMENT_BYTES: Mapping[MomentType, float] = {"fp32": 4, "bf16": 2, "int8": BYTES}  # a value
MOMENTS = {"adamw": 2, "nadam": 2, "muon": 2, "sgd": 1}  # values a weight, at most
PAYLOAD_SHARE = 1.25  # what encoding, decoding and a step take beside the payloads
DEVICE_SHARE = 1.25  # of a method's state that must fit a device: blocks, and what else is there
# Values a weight of a stage on a device, beside moments and pending gradients: itself, its
# gradient, the sum of those merged, the one that a step took, and two for the step's own work.
DEVICE_VALUES = 6
RULE = "stage too large for any machine"
DEVICE_RULE = "stage too large for the device"
REPLICA_RULE = "replica too large for any machine"


class Exchanged(NamedTuple):
    """Memory of a method beside the model and its optimizer: its own state, what it holds while a
    result is pending, the payloads of a round, and those of earlier rounds that are kept."""

    state_bytes: int = 0
    pending_bytes: int = 0
    payload_bytes: int = 0
    kept_bytes: int = 0


class StepChoices(NamedTuple):
    """The machine's choices on which memory depends: sequences computed at once (None: a batch),
    whether a device computes them, the type of AdamW's moments, whether layers are computed again
    for their gradients, whether a device's products are in two bytes, how many logits exist at
    once, and whether the node evaluates the run when it is drawn."""

    micro_batch: int | None = None
    on_device: bool = False
    moments: MomentType = "fp32"
    checkpoints: bool = False
    is_lower: bool = True
    logits: int = MAX_LOGITS
    evaluates: bool = False


WHOLE_BATCH = StepChoices()


def needed_bytes(plan: RunPlan, exchanged: Exchanged, computing: StepChoices = WHOLE_BATCH) -> int:
    """Return an estimate of the host's bytes that training this run's model takes at most.

    The program's own memory comes on top. Weights, gradients, moments, the method's state, the
    payloads, and what a checkpoint copies of all that it writes; it expands smaller moments. Per
    token of the sequences that are computed at once: what the backward pass reads again (ten widths
    and four hidden widths a layer, attention, and the logits). A node that is drawn to evaluate the
    run takes a copy of the weights and forward passes instead, since it takes no steps meanwhile.

    If the model is on a device, the host holds copies of its tensors while it builds the model and
    while a checkpoint is written."""
    payloads = int(PAYLOAD_SHARE * exchanged.payload_bytes) + exchanged.kept_bytes
    state = exchanged.state_bytes + exchanged.pending_bytes
    weights, moments = VALUE_BYTES * plan.model.parameters(), moment_bytes(plan)
    if computing.on_device:
        copied = 2 * weights + moments + exchanged.state_bytes // SAVED_SHARE
        return state + payloads + copied
    written = 2 * weights + moments + exchanged.state_bytes
    if computing.moments != "fp32":
        moments += moment_bytes(plan, computing.moments)
    held = 2 * weights + moments + state + payloads + written // SAVED_SHARE
    layer = layer_values(plan.model, plan.seq)
    kept = plan.model.layers * (plan.model.dim if computing.checkpoints else layer)
    a_token = VALUE_BYTES * (kept + (layer if computing.checkpoints else 0))
    passes = _passes_bytes(plan, computing, a_token)
    return held + max(passes, evaluation_bytes(plan, computing))


def needed_device_bytes(plan: RunPlan, computing: StepChoices = WHOLE_BATCH) -> int:
    """Return an estimate of a device's bytes that training this run's model takes at most.

    Weights, gradients, and moments; a method that lets gradients of several steps add up has them
    twice during a step. Beside these either the passes (activations of the sequences that are
    computed at once, half a layer's more while gradients are computed, and weights in lower
    precision), or the inner step, which computes with copies, or an evaluation. Where a device has
    no fused attention, its probabilities come on top."""
    weights = VALUE_BYTES * plan.model.parameters()
    work = _device_passes_bytes(plan, computing) + weights // 2, weights
    return _kept_bytes(plan, computing) + max(*work, evaluation_bytes(plan, computing))


def evaluation_bytes(plan: RunPlan, computing: StepChoices) -> int:
    """Return what a node that measures the run takes where its model is: a copy of the weights, a
    layer's activations of the sequences that are measured together, and their logits."""
    if not computing.evaluates:
        return 0
    model, tokens = plan.model, max(AT_ONCE // plan.seq, 1) * plan.seq
    logits = min(model.vocab_size * tokens, computing.logits)
    values = model.parameters() + tokens * layer_values(model, plan.seq) + 3 * logits
    return VALUE_BYTES * values


def needed_shard_bytes(plan: RunPlan, computing: StepChoices, count: int) -> int:
    """Return an estimate of what each of `count` processes that share a model takes of its device.

    Its shard of weights, gradients and moments; the weights that are gathered at once, with their
    gradients (the ends of the model and a layer); and its passes."""
    model = plan.model
    ends = model.vocab_size * model.dim * (1 if model.tied else 2)
    gathered = ends + (model.parameters() - ends) // model.layers
    shard = _kept_bytes(plan, computing) // count
    return shard + 2 * VALUE_BYTES * gathered + _device_passes_bytes(plan, computing)


def _kept_bytes(plan: RunPlan, computing: StepChoices) -> int:
    """Return what a device keeps of a model: its weights, gradients and moments."""
    kinds = 3 if METHODS[unfolded(plan.method)[0]].keeps_gradients else 2
    weights = VALUE_BYTES * plan.model.parameters()
    return kinds * weights + moment_bytes(plan, computing.moments)


def _device_passes_bytes(plan: RunPlan, computing: StepChoices) -> int:
    """Return what passes take of a device, with the batch's tokens and the tables of angles."""
    model = plan.model
    kept, one = (
        activation_bytes(shape, computing.is_lower, computing.checkpoints)
        for shape in (model, msgspec.structs.replace(model, layers=1))
    )
    angles = 2 * VALUE_BYTES * model.context * model.head_dim
    tokens = 2 * TOKEN_BYTES * plan.batch * plan.seq
    return angles + tokens + _passes_bytes(plan, computing, kept + one // 2)


def min_device_bytes(plan: RunPlan, moments: MomentType = "fp32") -> int:
    """Return a device's bytes without which no step can be taken, whatever is computed at once."""
    some = moment_bytes(plan, moments)
    if plan.inner.name == "muon":  # two moments are kept for some of the weights only
        some //= 2
    return 2 * VALUE_BYTES * plan.model.parameters() + some


def moment_bytes(plan: RunPlan, moments: MomentType = "fp32") -> int:
    """Return the bytes of the inner optimizer's moments, at most."""
    if plan.inner.name == "sgd" and not plan.inner.momentum:
        return 0
    return int(MOMENT_BYTES[moments] * plan.model.parameters() * MOMENTS[plan.inner.name])


def _passes_bytes(plan: RunPlan, computing: StepChoices, a_token: int) -> int:
    """Return what passes take that keep so many bytes a token, with their logits."""
    tokens = min(computing.micro_batch or plan.batch, plan.batch) * plan.seq
    logits = min(plan.model.vocab_size * tokens, computing.logits)
    return tokens * a_token + 3 * VALUE_BYTES * logits


def layer_values(model: ModelConfig, seq: int) -> int:
    """Return how many numbers per token a layer's backward pass reads again."""
    queries = model.heads * model.head_dim * (2 if model.has_qk_norm else 1)
    return 6 * model.dim + 4 * queries + 4 * model.ffn_dim + model.heads * seq


def kept_outer(
    outer: OuterPlace,
    plan: RunPlan,
    exchanged: Exchanged,
    computing: StepChoices = WHOLE_BATCH,
    device: Device | None = None,
) -> Literal["device", "host", "disk"]:
    """Return where to keep the outer state: where that is chosen, or else on the device if that has
    room (None: it may not be there), in memory if the run fits what is free of it, or on the
    disk."""
    if outer != "auto":
        return outer
    if device is not None and device.place.type != "cpu" and device.has_float64:
        needed = needed_device_bytes(plan, computing) + state_on_device(exchanged)
        if needed <= device.memory()[0]:
            return "device"
    needed = needed_bytes(plan, exchanged, computing)
    return "host" if needed <= _free_bytes() else "disk"


def require_memory(
    plan: RunPlan,
    error: type[FarflockError],
    outer: OuterPlace = "host",
    exchanged: Exchanged | None = None,
    computing: StepChoices = WHOLE_BATCH,
) -> None:
    """Raise `error`, with the numbers, if the run takes more memory than this machine has free; the
    method's state can be on the disk or the device."""
    exchanged = exchanged or Exchanged()
    place = kept_outer(outer, plan, exchanged, computing)
    needed, free = _host_bytes(plan, exchanged, computing, place), _free_bytes()
    if needed > free:
        disk = "keep the outer state on the disk (--outer disk), "
        remedy = disk if outer == "host" and exchanged.state_bytes else ""
        least = _host_bytes(plan, exchanged, computing._replace(micro_batch=1), place)
        if not computing.on_device and least <= free:
            remedy += "compute fewer sequences at once (--micro-batch 1), "
        why = (
            f"training its {plan.model.parameters():,} parameters takes about"
            f" {needed / 1e6:,.0f} MB of memory, and {free / 1e6:,.0f} MB are free here"
        )
        raise error(
            "the run's model is too large for this machine",
            why,
            f"{remedy}close programs, or use a larger machine",
        )


def _host_bytes(
    plan: RunPlan, exchanged: Exchanged, computing: StepChoices, outer: OuterPlace
) -> int:
    """Return the host's bytes that training takes with the method's state at this place."""
    state, pending = exchanged.state_bytes, exchanged.pending_bytes
    elsewhere = {"host": 0, "disk": state, "device": state + pending}[outer]
    return needed_bytes(plan, exchanged, computing) - elsewhere


def evaluation_room(
    plan: RunPlan,
    exchanged: Exchanged,
    computing: StepChoices,
    outer: OuterPlace,
    device: Device,
    beside_bytes: int = 0,
) -> tuple[int, int]:
    """Return the bytes that a node which evaluates the run takes where its model is, and those that
    are free there, before anything is kept. `beside_bytes` are those of the method's state on the
    device."""
    measuring = computing._replace(evaluates=True)
    if not computing.on_device:
        place = kept_outer(outer, plan, exchanged, measuring)
        return _host_bytes(plan, exchanged, measuring, place), _free_bytes()
    needed = _kept_bytes(plan, measuring) + evaluation_bytes(plan, measuring) + beside_bytes
    return needed, device.memory()[0]


def require_device_memory(
    plan: RunPlan,
    device: Device,
    error: type[FarflockError],
    exchanged: Exchanged,
    computing: StepChoices,
    beside_bytes: int = 0,
) -> None:
    """Raise `error` if this run's weights, gradients and moments alone, and what is there beside
    them, do not fit the device, so that no step has to be tried."""
    if min_device_bytes(plan, computing.moments) + beside_bytes > device.memory()[0]:
        raise error(*refusal(plan, device, exchanged, computing, beside_bytes))


def state_on_device(exchanged: Exchanged) -> int:
    """Return the bytes of a device that a method's state takes, with blocks and copies of it."""
    return int(DEVICE_SHARE * (exchanged.state_bytes + exchanged.pending_bytes))


def refusal(
    plan: RunPlan,
    device: Device,
    exchanged: Exchanged,
    computing: StepChoices,
    beside_bytes: int = 0,
) -> tuple[str, str, str]:
    """Return the words for a model that the device has no room for beside the method's state, with
    the numbers of the device and of the host."""
    least = computing._replace(micro_batch=1)
    numbers = (
        needed_device_bytes(plan, least) + beside_bytes,
        device.memory()[0],
        needed_bytes(plan, exchanged, least),
        _free_bytes(),
    )
    needed, free, host, host_free = (f"{size / 1e6:,.0f} MB" for size in numbers)
    why = (
        f"training its {plan.model.parameters():,} parameters, one sequence at a time, takes about"
        f" {needed} of the device's memory, and {free} are free there; of this machine's own it"
        f" takes about {host}, and {host_free} are free"
    )
    fits_host = needed_bytes(plan, exchanged, least._replace(on_device=False)) <= _free_bytes()
    here = "train on the CPU (--device cpu), " if fits_host else ""
    again = "" if computing.checkpoints else "keep fewer activations (--checkpointing on), "
    if beside_bytes:
        again += "keep the method's state in the host's memory (--outer host), "
    remedy = f"{again}close programs that use the device, or use a larger one"
    return f"the run's model is too large for {device.name}", why, f"{here}{remedy}"


def _free_bytes() -> int:
    return host_memory().free


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


def needed_stage_device_bytes(plan: RunPlan, pipeline: PipelinePlan, stage: int) -> int:
    """Return an upper estimate of what serving this stage takes of a device's memory, without the
    graphs that are kept where there is room. The method's state and payloads are on the host."""
    span, server = pipeline.stages[stage], pipeline.server
    a_token = len(span) * layer_values(plan.model, plan.seq) + (
        3 * plan.model.vocab_size if _is_last(plan, span) else 0
    )
    computed = max(server.together * plan.model.dim * 2, a_token) * plan.batch * plan.seq
    copies = DEVICE_VALUES + MOMENTS[plan.inner.name] + server.places + _kept_copies(pipeline)
    return plan.dtype.itemsize * (stage_parameters(plan.model, span) * copies + computed)


def require_stage_device_memory(
    plan: RunPlan, pipeline: PipelinePlan, stages: Sequence[int], free_bytes: int
) -> None:
    """Raise `Uncomposable` if a device with this much free memory does not hold all these
    stages."""
    needed = sum(needed_stage_device_bytes(plan, pipeline, stage) for stage in stages)
    if needed <= free_bytes:
        return
    what = f"stage {stages[0]}" if len(stages) == 1 else "all stages"
    why = (
        f"serving {what} of {len(pipeline.stages)} takes about {needed / 1e6:,.0f} MB of the"
        f" device's memory, and {free_bytes / 1e6:,.0f} MB are free"
    )
    raise Uncomposable(DEVICE_RULE, why, "use --device cpu, or cut the model into more stages")


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
