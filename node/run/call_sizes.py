"""The sizes of a pipeline's calls, against what a payload and a peer's calls may hold."""

from farflock.compression.activation import ActivationContext, Direction
from farflock.compression.activation_catalog import (
    activation_codec,
    known_of,
    max_bytes,
    subspace_terms,
)
from farflock.compression.subspace import id_bytes
from farflock.node.run.terms import PipelinePlan, RunPlan
from farflock.swarm.peer.calls.call_server import ROOM_BYTES
from farflock.swarm.peer.calls.payloads import MAX_PAYLOAD_BYTES


def oversize(plan: RunPlan, pipeline: PipelinePlan, batch: int) -> str | None:
    """Return why microbatches of so many sequences are too large for calls, or None."""
    sizes = {}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        shape = (batch, plan.seq, plan.model.dim)
        try:
            size = max_bytes(
                pipeline.codec, ActivationContext(shape, plan.dtype, direction=direction)
            )
        except ValueError as error:
            return str(error)
        if size > MAX_PAYLOAD_BYTES:
            why = (
                f"a microbatch's {direction} payload has {size:,} bytes, and a call carries at most"
            )
            return f"{why} {MAX_PAYLOAD_BYTES:,}"
        sizes[direction] = size
    whole = _backward_call_bytes(plan, pipeline, batch, sizes["forward"], sizes["backward"])
    if whole > ROOM_BYTES:
        why = f"all payloads of a backward pass have {whole:,} bytes together, and a peer has room"
        return f"{why} for {ROOM_BYTES:,} in its calls"
    return None


def _backward_call_bytes(
    plan: RunPlan, pipeline: PipelinePlan, batch: int, forward: int, backward: int
) -> int:
    """Return the largest sum of payloads of a backward pass, at any stage: the tokens, the stage's
    input, and the gradient of its output with what that needs, or the targets."""
    stages = len(pipeline.stages)
    tokens = batch * plan.seq * id_bytes(plan.model.vocab_size)
    names = known_of(pipeline.codec) if subspace_terms(pipeline.codec) is None else ()
    masked = any(activation_codec(name).name.endswith(",mask") for name in names)
    gradient = backward + masked * forward if stages > 1 else tokens
    last = tokens + (stages > 1) * forward + tokens
    inner = tokens + (stages > 2) * forward + gradient
    return max(last, inner)
