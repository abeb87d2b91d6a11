"""Whether a stage of a run's model fits a machine, known from the run's terms alone, before any memory is taken for it.

A pipeline is for models that fit no single machine; each of its stages has to fit some.
"""

from farflock.node.composition import Uncomposable
from farflock.node.model import ModelConfig
from farflock.node.participant import Plan
from farflock.node.pipeline import PipelinePlan, edges_of
from farflock.node.room import VALUES, layer_values

RULE = "stage that fits nobody"


def stage_parameters(model: ModelConfig, span: range) -> int:
    """Weights of a stage: its layers', and the embedding's, or the norm's and the head's, at the ends."""
    table = model.vocab_size * model.dim
    ends = (model.parameters() - model.dim - (1 if model.tied else 2) * table) // model.layers * len(span)
    return ends + (table if span.start == 0 else 0) + (model.dim + table if span.stop == model.layers else 0)


def needed_stage_bytes(plan: Plan, pipeline: PipelinePlan, stage: int) -> int:
    """Bytes that serving this stage takes beside the program itself, an estimate from above, counted as for whole models
    (node/room.py) and more: the gradients that are put aside, what passes keep of the microbatches that are computed at once,
    and the payloads of those that wait."""
    span, server, edges = pipeline.stages[stage], pipeline.server, edges_of(plan, pipeline)
    weights = stage_parameters(plan.model, span)
    a_token = len(span) * layer_values(plan.model, plan.seq) + (
        3 * plan.model.vocab_size if _is_last(plan, span) else 0
    )
    computed = max(server.together * plan.model.dim * 2, a_token) * edges.tokens
    waiting = server.queue * (2 * edges.max_bytes("forward") + edges.max_bytes("backward") + 3 * edges.token_bytes)
    copies = VALUES + server.places + _kept_copies(pipeline)
    return plan.dtype.itemsize * (weights * copies + computed) + waiting


def require_stage_room(plan: Plan, pipeline: PipelinePlan, stage: int, *free_bytes: int) -> None:
    """`Uncomposable` if this stage fits none of the machines that have so much memory free."""
    needed, largest = needed_stage_bytes(plan, pipeline, stage), max(free_bytes, default=0)
    if needed <= largest:
        return
    span, count = pipeline.stages[stage], len(pipeline.stages)
    why = (
        f"serving stage {stage} of {count}, {len(span)} layers with {stage_parameters(plan.model, span):,} parameters,"
        f" takes about {needed / 1e6:,.0f} MB of memory, and {largest / 1e6:,.0f} MB are free"
    )
    others = [index for index in range(count) if needed_stage_bytes(plan, pipeline, index) <= largest]
    serve = f"serve stage {others[0]}, or " if others else ""
    raise Uncomposable(RULE, why, f"{serve}cut the model into more stages, or use a larger machine")


def _kept_copies(pipeline: PipelinePlan) -> int:
    """Of a stage that keeps versions: the old ones, and the sum of what was merged for each; what passes use in place of the
    newest; and a trend with the weights of before a step."""
    terms = pipeline.asynchronous
    return 0 if terms is None else 2 * (terms.versions - 1) + 1 + 2 * terms.predicts


def _is_last(plan: Plan, span: range) -> bool:
    return span.stop == plan.model.layers
