"""Named rules for whether the parts of a pipeline fit together, checked before anything starts.

A codec, a path policy and a method are chosen separately, and some combinations cannot work:
without these rules such a run would start, and then stand still or train something else. A
violation is refused with the rule's name, the reason and the remedy.

Some rules hold for any pipeline of this kind: codecs with memory need pinned routes; a path begins
where tokens are embedded and ends where the loss is; swapped stages are alike. Others are needed by
Farflock's own bookkeeping. There is no rule for what holds by construction: every stage divides by
its own count; servers refuse what arrives rounds too late; models have no dropout; a recovery
changes only its own stage and takes only equal shapes (node/pipeline/recovery/rebuild.py); shared
parameters of a codec are computed from the run's seed, or agreed upon in a version that each
payload names (node/pipeline/contrib/embedding_versions.py); and weights are projected by whatever
writes them (node/pipeline/passes/constraint.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from farflock.compression.activation import Scope
from farflock.compression.activation_catalog import (
    activation_codec,
    known_of,
    subspace_terms,
)
from farflock.node.errors import Usage
from farflock.node.model.llama import ModelConfig
from farflock.node.run.basis import largest_rank
from farflock.node.run.call_sizes import oversize
from farflock.node.run.counts import (
    count_steps,
    has_whole_rounds,
    is_counted_apart,
    placeholder_streams,
)
from farflock.node.run.split import BadSplit, even, split
from farflock.node.run.terms import MAX_VISIT, PipelinePlan, RunPlan
from farflock.optimizers.catalog import SUMMING
from farflock.optimizers.method import Exchange, Method
from farflock.optimizers.parts.stateful import StepSchedule
from farflock.swarm.paths.policy import Microbatch, PathPolicy
from farflock.swarm.protocol.gradient_leases import MAX_KEYS

# methods that keep the average separate from the trained weights
APART = frozenset({"diloco", "sparseloco"})
LOOKED_AT = 64  # microbatches tried in each of two lanes, rounded up to whole planned rounds

Breach = tuple[str, str]  # the reason, and the remedy


class Uncomposable(Usage):
    """Parts of a pipeline that do not fit together; `rule` names the rule that they break."""

    def __init__(self, rule: str, why: str, remedy: str) -> None:
        super().__init__(f"the pipeline breaks the rule {rule!r}", why, remedy)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class Composition:
    """The parts to check: the run's plan, the cut of its model, its method, and its path policy."""

    plan: RunPlan
    pipeline: PipelinePlan
    method: Method
    policy: PathPolicy

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.pipeline.stages)

    @property
    def batch(self) -> int:
        """Microbatches that a stage takes in per step."""
        return self.pipeline.batch_tokens // (self.plan.batch * self.plan.seq)

    @property
    def looked_at(self) -> int:
        """The number of microbatches tried per lane."""
        turns = len(self.pipeline.paths.lanes[0]) if self.pipeline.paths is not None else 1
        return -(-LOOKED_AT // turns) * turns

    @property
    def orders(self) -> list[tuple[int, ...]]:
        """The distinct orders in which the tried microbatches visit the stages."""
        numbers = ((step, lane) for step in range(self.looked_at) for lane in range(2))
        return sorted(
            {self.policy.stage_order(Microbatch(step, 0, lane)) for step, lane in numbers}
        )

    def visits(self, stage: int) -> int:
        """Return how many of the tried microbatches of a lane visit this stage."""
        return sum(
            stage in self.policy.stage_order(Microbatch(step, 0, 0))
            for step in range(self.looked_at)
        )

    @property
    def streams(self) -> list[Exchange]:
        """The method's exchanges for a stage. The tensors here are placeholders: no rule depends
        on their sizes."""
        return placeholder_streams(self.method, self.plan.model.layers)

    @property
    def is_counted_apart(self) -> bool:
        """True if rounds of their own name the microbatches that count."""
        return is_counted_apart(self.method, self.streams)


def value_bytes(batch: int, seq: int, dim: int) -> int:
    """Return the bytes of `batch` sequences in a sample memory (AQ-SGD): 16 bits a value."""
    return batch * seq * dim * torch.float16.itemsize


def require_split(config: ModelConfig, sizes: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of each stage; raise `Uncomposable` unless they add up to the model's."""
    require_untied(config, len(sizes))
    try:
        return split(config, sizes)
    except BadSplit as error:
        nearest = [len(span) for span in even(config, min(max(len(sizes), 1), config.layers))]
        raise Uncomposable("all layers", str(error), f"choose {nearest}") from None


def require_untied(config: ModelConfig, stages: int) -> None:
    """Raise `Uncomposable` if a tied model has several stages: two stages would share a tensor."""
    if config.tied and stages > 1:
        why = (
            "the head and the embedding share one tensor, and they would be on the first and the"
            f" last of {stages} stages"
        )
        raise Uncomposable("tied model", why, "set model.tied to false")


def require_composable(setup: Composition) -> None:
    """Raise `Uncomposable` with the first rule that these parts break."""
    for name, rule in RULES.items():
        breach = rule(setup)
        if breach is not None:
            raise Uncomposable(name, *breach)


# what a stage computes


def _one_batch(setup: Composition) -> Breach | None:
    """A stage steps after as many microbatches as its group takes in; no other accumulation
    exists."""
    more = setup.plan.accumulate
    if more == 1:
        return None
    why = f"train.accumulate is {more}, and a stage's step takes pipeline.batch microbatches"
    return why, f"set accumulate to 1; for larger steps, make pipeline.batch {more} times as large"


def _one_precision(setup: Composition) -> Breach | None:
    """A recomputed pass must equal the first one, so stages compute in the precision of their
    weights."""
    return (
        (
            "train.autocast is on, and stages compute in the precision of their weights",
            "set it to false",
        )
        if setup.plan.autocast
        else None
    )


# codecs


def _pinned_routes(setup: Composition) -> Breach | None:
    """A codec that remembers an edge's samples needs a lane that keeps its servers."""
    codec = setup.pipeline.codec
    if scope_of(codec) != "edge_sample" or setup.policy.pinned:
        return None
    why = (
        f"codec {codec} remembers what passed an edge, and policy {setup.pipeline.policy} takes"
        " another edge each time"
    )
    return why, f"choose a codec without memory, such as {_without_memory(codec)}"


def _recurring_samples(setup: Composition) -> Breach | None:
    """A codec that sends changes since a sample's last visit needs samples that recur: it sends
    a first visit whole, at 16 bits a value."""
    plan, codec, tokens = setup.plan, setup.pipeline.codec, setup.plan.schedule.total_tokens
    choice = f"choose {_without_memory(codec)}"
    if scope_of(codec) != "edge_sample":
        return None
    largest = tokens // (2 * plan.seq)
    if plan.samples == 0:
        why = f"codec {codec} needs sequences that recur, and without train.samples each is new"
        return why, f"set train.samples to the number that each trainer repeats, or {choice}"
    if plan.samples > largest:
        why = (
            f"the run's {tokens:,} tokens visit {plan.samples} samples of {plan.seq} tokens"
            " less than twice"
        )
        return why, f"set train.samples to {largest} or less, or {choice}" if largest else choice
    if plan.batch > MAX_VISIT:
        why = (
            f"a request names each sample of its microbatch, at most {MAX_VISIT}, and train.batch"
            f" is {plan.batch}"
        )
        return why, f"set train.batch to {MAX_VISIT} or less, or {choice}"
    return None


def _room_for_samples(setup: Composition) -> Breach | None:
    """A sample memory must hold a microbatch until it recurs; other codecs have no memory."""
    plan, pipeline = setup.plan, setup.pipeline
    if scope_of(pipeline.codec) != "edge_sample":
        if pipeline.cache_bytes is None:
            return None
        return f"codec {pipeline.codec} has no memory", "leave pipeline.cache_bytes out"
    needed = value_bytes(plan.batch, plan.seq, plan.model.dim)
    if pipeline.cache_bytes is None or pipeline.cache_bytes >= needed:
        return None
    why = (
        f"a microbatch's activation takes {needed:,} bytes, and each end of an edge has room for"
        f" {pipeline.cache_bytes:,}"
    )
    each = value_bytes(1, plan.seq, plan.model.dim)
    return why, f"set pipeline.cache_bytes to {plan.samples * each:,} per trainer of a server"


def _shared_basis(setup: Composition) -> Breach | None:
    """Both ends of an edge with a subspace codec hold the basis that every peer computes from
    the run's seed."""
    terms, width = subspace_terms(setup.pipeline.codec), setup.plan.model.dim
    if terms is None or terms.rank <= (largest := largest_rank(width)):
        return None
    why = (
        f"codec {setup.pipeline.codec} has rank {terms.rank}, and a basis for a width of {width}"
        f" has at most {largest}"
    )
    return why, f"choose subspace:{largest} or less, or int8" if largest else "choose int8"


def scope_of(codec: str) -> Scope:
    """Return what a codec needs of its routes; raise `ValueError` if it is unknown.

    Subspace codecs, which cannot be built without their basis, are recognised by name;
    alternatives have no memory.
    """
    return (
        "shared_params"
        if subspace_terms(codec) is not None
        else activation_codec(known_of(codec)[0]).scope
    )


def _without_memory(codec: str) -> str:
    return "int4" if codec.startswith("aqsgd4") else "int8"


def _payloads(setup: Composition) -> Breach | None:
    """Each payload of a pass must fit a call, and all payloads of a call must fit the room that a
    peer has for calls."""
    batch = setup.plan.batch
    if (why := oversize(setup.plan, setup.pipeline, batch)) is None:
        return None
    fits, over = 0, batch
    while over - fits > 1:
        between = (fits + over) // 2
        too_large = oversize(setup.plan, setup.pipeline, between)
        fits, over = (fits, between) if too_large else (between, over)
    return why, f"set train.batch to {fits} or less" if fits else "shorten train.seq"


def _free_replicas(setup: Composition) -> Breach | None:
    """Full replicas may leave the subspace only if all members share an average that is no
    member's own weights, and if pipelines derive their weights from that average alone."""
    pipeline, method = setup.pipeline, setup.plan.method
    if pipeline.constrain == "all":
        why = (
            f"table_every is {pipeline.table_every}, and the frozen embedding never changes if all"
            " keep to the subspace"
        )
        return (
            (why, "set constrain to pipelines, or leave table_every out")
            if pipeline.table_every
            else None
        )
    if subspace_terms(pipeline.codec) is None:
        why = f"constrain is pipelines, and codec {pipeline.codec} does not constrain weights"
        return why, "choose a codec subspace:K, or leave constrain out"
    if method not in APART:
        why = (
            f"with method {method} members share the weights that they train, and those of"
            " pipelines would be projected"
        )
        return why, f"choose {' or '.join(sorted(APART))}, or set constrain to all"
    if pipeline.asynchronous is not None:
        why = (
            "passes at old weights would need the frozen embedding of that time, and its versions"
            " are kept for a few rounds"
        )
        return why, "leave pipeline.asynchronous out, or set constrain to all"
    if not pipeline.table_every:
        return (
            "table_every is 0, and averages move the embedding out of the subspace",
            "set it to 1 or more",
        )
    return None


# paths


def _first_stage(setup: Composition) -> Breach | None:
    """Paths begin at stage 0: every other stage needs the activations of the stage before it."""
    for order in setup.orders:
        if order[:1] != (0,):
            return (
                f"policy {setup.pipeline.policy} takes stages {list(order)}",
                "begin with stage 0, which embeds",
            )
    return None


def _last_stage(setup: Composition) -> Breach | None:
    """Paths end at the last stage, where the loss is computed."""
    for order in setup.orders:
        if order[-1] != setup.count - 1:
            remedy = f"end with stage {setup.count - 1}, which has the head"
            return f"policy {setup.pipeline.policy} takes stages {list(order)}", remedy
    return None


def _every_stage(setup: Composition) -> Breach | None:
    """Each stage counts on its own, but rounds must keep step: a stage visited by too few
    microbatches fills its batches more slowly, until its rounds are too far back for any forward
    pass."""
    for order in setup.orders:
        if len(order) != len(set(order)):
            return (
                f"policy {setup.pipeline.policy} takes stages {list(order)}",
                "visit each stage once",
            )
    for stage in range(setup.count):
        visits, share = setup.visits(stage), setup.policy.share(stage)
        if not share or abs(visits - share * setup.looked_at) > 1:
            why = (
                f"policy {setup.pipeline.policy} visits stage {stage} {visits} times in"
                f" {setup.looked_at} microbatches, and its share is {share}: the stage's rounds"
                " would fall behind"
            )
            return why, "visit each stage as often as the policy's share says"
    return None


def _whole_batches(setup: Composition) -> Breach | None:
    """A stage's batch is its share of the run's batch, and must be a whole number of
    microbatches."""
    for stage in range(setup.count):
        share = setup.policy.share(stage)
        if (setup.batch * share).denominator != 1:
            why = f"stage {stage} sees {share} of the microbatches, and a batch has {setup.batch}"
            more = -(-setup.batch // share.denominator) * share.denominator
            return why, f"set pipeline.batch to {more}, or another multiple of {share.denominator}"
    return None


def _equal_swaps(setup: Composition) -> Breach | None:
    """Stages that swap places must have the same inputs, outputs and sizes."""
    spans = setup.pipeline.stages
    kinds = [(stage == 0, stage == setup.count - 1, len(span)) for stage, span in enumerate(spans)]
    for order in setup.orders:
        for here, there in zip(sorted(order), order, strict=True):
            if kinds[here] != kinds[there]:
                why = (
                    f"policy {setup.pipeline.policy} puts stage {there} ({len(spans[there])}"
                    f" layers) in the place of stage {here} ({len(spans[here])} layers)"
                )
                return why, "swap inner stages with the same number of layers, or none"
    return None


# recovery


def _end_copies(setup: Composition) -> Breach | None:
    """A lost first or last stage takes its layers from the stage next to it; copies restore only
    the other tensors."""
    sizes = setup.pipeline.layers
    if not setup.pipeline.end_copies or (
        len(sizes) > 1 and sizes[0] == sizes[1] and sizes[-1] == sizes[-2]
    ):
        return None
    why = (
        f"stages have {list(sizes)} layers, so a lost end could not take the layers of the stage"
        " next to it"
    )
    return (
        why,
        "give each end as many layers as the stage next to it, or set pipeline.end_copies to 0",
    )


# methods


def _parts_of_stages(setup: Composition) -> Breach | None:
    """A method that cuts a model into parts cuts each stage into as many."""
    for stage, span in enumerate(setup.pipeline.stages):
        try:
            placeholder_streams(setup.method, len(span))
        except ValueError as error:
            why, _, remedy = str(error).rpartition("; ")
            return f"of stage {stage}, with its layers {list(span)}: {why}", remedy
    return None


def _rounds_by_steps(setup: Composition) -> Breach | None:
    """A trainer keeps every microbatch that no round has named, so rounds must end after a
    number of microbatches, not after a time."""
    round_s = getattr(setup.method, "round_s", None)
    if round_s is None:
        return None
    return (
        f"method {setup.plan.method} ends its rounds every {round_s:g} s",
        "set a period instead of round_s",
    )


def _rounds_in_step(setup: Composition) -> Breach | None:
    """Every stage accepts forward passes within a few rounds of the one in which their microbatch
    set out, so each round that names microbatches must stand for the same number of them. It is one
    of the method's, or a count before the method merges (decision 038)."""
    streams = setup.streams
    if any(exchange.enough for exchange in streams):
        why = "ends a round as soon as some members' work is there"
    elif setup.is_counted_apart or has_whole_rounds(streams):
        return None
    else:
        why = "merges parts of its work, or late, and has no `due_steps` that say after which steps"
    return (
        f"method {setup.plan.method} {why}, so the stages' rounds would drift apart",
        "choose ddp, diloco or noloco",
    )


def _merges_at_counts(setup: Composition) -> Breach | None:
    """A merge waits for the count after the same step."""
    every, made = setup.pipeline.count_every, setup.method
    if every == 1:
        return None
    if not (setup.is_counted_apart and isinstance(made, StepSchedule)):
        why = f"the rounds of method {setup.plan.method} name the microbatches themselves"
        return why, "leave pipeline.count_every out"
    steps = [step for due in made.due_steps.values() for step in due]
    if not any(step % every for step in steps):
        return None
    why = f"count_every is {every}, and method {setup.plan.method} merges after steps {steps}"
    return why, f"set pipeline.count_every to {math.gcd(every, *steps)}"


# microbatches in flight


def _kept(setup: Composition) -> Breach | None:
    """A lone trainer must be able to fill a round while the previous one is being agreed upon."""
    trainer, every = setup.pipeline.trainer, setup.pipeline.count_every
    steps = count_steps(setup.method, setup.plan.model.layers, every)
    needed = min_kept(setup.batch, steps, trainer.window)
    if needed > MAX_KEYS:
        why = f"a round of {steps} steps of {setup.batch} microbatches needs a trainer to keep"
        remedy = "lower pipeline.batch, or the method's period, or pipeline.count_every"
        return f"{why} {needed}, and it can keep {MAX_KEYS}", remedy
    if trainer.kept >= needed:
        return None
    why = f"a round takes {steps} steps of {setup.batch} microbatches, and a trainer keeps only"
    return (
        f"{why} {trainer.kept}, {trainer.window} of them in flight",
        f"set pipeline.kept to {needed} or more",
    )


def min_kept(batch: int, steps: int, window: int) -> int:
    """Return the microbatches a trainer must keep: two rounds of `steps` steps, and the window."""
    return 2 * batch * steps + window


# asynchronous passes


def _versions_in_use(setup: Composition) -> Breach | None:
    """A server keeps no more versions than passes may use."""
    terms, staleness = setup.pipeline.asynchronous, setup.pipeline.server.staleness
    if terms is None or terms.versions <= staleness + 1:
        return None
    why = f"{terms.versions} versions are kept, and gradients may be {staleness} rounds late"
    return why, f"set pipeline.staleness to {terms.versions - 1}, or versions to {staleness + 1}"


def _shared_versions(setup: Composition) -> Breach | None:
    """Servers of a stage hold the same versions, so that any of them can replace another. Between
    the counts of a method that merges later, each has its own."""
    shares = setup.method.equality == "exact" and not setup.is_counted_apart
    if setup.pipeline.asynchronous is None or shares:
        return None
    why = f"with method {setup.plan.method} each member of a stage has its own weights"
    return (
        why,
        "choose a method that keeps all members equal, such as ddp or diloco, or leave"
        " pipeline.asynchronous out",
    )


def _predicted_steps(setup: Composition) -> Breach | None:
    """Predictions extrapolate the last step, which all members must have in common."""
    terms = setup.pipeline.asynchronous
    if terms is None or not terms.predicts or setup.plan.method in SUMMING:
        return None
    why = f"correction {terms.correction} extrapolates the last step that all members took"
    return (
        f"{why}, and with method {setup.plan.method} each takes its own",
        "choose method ddp, or another correction",
    )


def _corrected_momentum(setup: Composition) -> Breach | None:
    """Corrections are computed from the inner optimizer's momentum."""
    inner, terms = setup.plan.inner, setup.pipeline.asynchronous
    correction = "none" if terms is None else terms.correction
    plain = inner.name == "sgd" and not inner.momentum
    called = inner.name + (
        " with nesterov" if inner.nesterov else " without momentum" if plain else ""
    )
    velocity = inner.name in ("adamw", "nadam") or (inner.name == "sgd" and bool(inner.momentum))
    if "spike" in correction and not (
        inner.name == "sgd" and inner.momentum and not inner.nesterov
    ):
        needs = "set train.optimizer to sgd, train.momentum to 0.9, and train.nesterov to false"
    elif ("prediction" in correction or correction == "braking") and not velocity:
        needs = (
            "set train.momentum to 0.9"
            if inner.name == "sgd"
            else "set train.optimizer to adamw, nadam or sgd"
        )
    elif correction == "nesterov" and not (inner.nesterov or inner.name == "nadam"):
        needs = (
            "set train.optimizer to nadam, or to sgd with train.momentum at 0.99 and train.nesterov"
        )
    else:
        return None
    return (
        f"correction {correction} cannot be computed with {called}",
        f"{needs}, or choose another correction",
    )


RULES: Mapping[str, Callable[[Composition], Breach | None]] = {
    "one batch": _one_batch,
    "one precision": _one_precision,
    "pinned routes": _pinned_routes,
    "recurring samples": _recurring_samples,
    "room for samples": _room_for_samples,
    "shared basis": _shared_basis,
    "payload": _payloads,
    "free replicas": _free_replicas,
    "first stage": _first_stage,
    "last stage": _last_stage,
    "every stage": _every_stage,
    "whole batches": _whole_batches,
    "swap of unequal stages": _equal_swaps,
    "end copies": _end_copies,
    "rounds in step": _rounds_in_step,
    "parts of stages": _parts_of_stages,
    "rounds by steps": _rounds_by_steps,
    "merges at counts": _merges_at_counts,
    "kept microbatches": _kept,
    "versions in use": _versions_in_use,
    "shared versions": _shared_versions,
    "predicted steps": _predicted_steps,
    "corrected momentum": _corrected_momentum,
}
