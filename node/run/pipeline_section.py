"""[pipeline] in a manifest: the cut of a run's model into stages, and the terms between them.

A run without this table trains whole models. What a founder leaves out has a default, which is
spelt out when the manifest is resolved.
"""

from typing import Annotated, Any

import msgspec

from farflock.compression.activation_catalog import activation_codec, alternatives, subspace_terms
from farflock.node.errors import Usage, nearest
from farflock.node.run.basis import run_basis
from farflock.node.run.composition import (
    Composition,
    Uncomposable,
    min_kept,
    require_composable,
    require_split,
    require_untied,
    scope_of,
)
from farflock.node.run.counts import steps_of
from farflock.node.run.model_section import ModelSection
from farflock.node.run.planned_paths import PathTerms, fill_plan, plan_of_texts, require_plan
from farflock.node.run.policies import NAMES, UnknownPolicy, policy_of
from farflock.node.run.split import BadSplit, even
from farflock.node.run.terms import (
    EMERGENCY_S,
    MAX_STAGES,
    MAX_VERSIONS,
    Asynchronous,
    Constrained,
    Correction,
    PipelinePlan,
    RebalanceTerms,
    RunPlan,
    ServerTerms,
    TrainerTerms,
    WhenGone,
)
from farflock.optimizers.method import Method
from farflock.swarm.paths.checkfree import RULE as SWAP_RULE
from farflock.swarm.paths.checkfree import BadSwap
from farflock.swarm.paths.partial_paths import BadSkip
from farflock.swarm.paths.policy import PathPolicy
from farflock.swarm.paths.skippipe import BadPlan
from farflock.swarm.protocol.gradient_leases import MAX_KEYS

METHOD = "ddp"  # default with a pipeline: the usual default syncs in pairs
BATCH = 16
CACHE_BYTES = 1 << 28  # default sample memory at each end of an edge
TABLE_EVERY = 4  # rounds
# Rounds that a gradient may be late in a pipeline that does not wait. As many batches are in
# flight: with one, as by default, it would wait for each round like any other.
ASYNCHRONOUS_STALENESS = 4
_SERVER, _TRAINER, _BALANCE = ServerTerms(), TrainerTerms(), RebalanceTerms()

ShortText = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[^\x00-\x1f\x7f]*$")]
Few = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Microbatches = Annotated[int, msgspec.Meta(ge=1, le=MAX_KEYS)]
TimeoutSeconds = Annotated[float, msgspec.Meta(ge=1, le=3600)]


class AsynchronousTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[pipeline.asynchronous]: passes that need not wait for rounds (docs/decisions/016). A server
    keeps the last `versions` weights of its stage, newest included; a gradient more than
    pipeline.staleness rounds late (by default 4) counts nowhere. `correction` applies to late
    gradients. `gone` applies to a microbatch whose weights no server has any more: the rest of it
    is dropped, or differentiated at the newest weights."""

    versions: Annotated[int, msgspec.Meta(ge=1, le=MAX_VERSIONS)]
    correction: Correction = "none"
    gone: WhenGone = "drop"


class PipelineSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[pipeline]. `stages` lists the number of layers in each stage; a founder may give the number
    of stages instead, for nearly equal ones. (For measured machines, the planner in
    experiments/placement/asymmetric.py finds unequal ones to write here.) A stage steps once its
    group has taken in `batch` microbatches of train.batch sequences of train.seq tokens.
    Activations travel as `codec`, or as the first of several (`int4 | int8`) that all servers of an
    edge read (docs/decisions/020), on paths of a `policy`. `basis` is the SHA-256 of the basis that
    all peers share for a subspace codec; each peer computes it from the run's seed
    (node/run/basis.py) and refuses to start if its own differs. With a codec that remembers samples
    (docs/decisions/018), each end of an edge holds at most `cache_bytes` of the samples' values.

    A stage's server queues up to `queue` passes of each kind, computes up to `together` forward
    passes at once, holds `places` pending gradients, each for `lease_s`, and accepts forward passes
    up to `staleness` rounds late. A trainer has up to `window` microbatches in flight and keeps
    `kept` in all, and it asks another server after `forward_timeout_s` or `backward_timeout_s`. If
    `direct`, activations and gradients of 150 kB and more go from server to server
    (docs/decisions/028), else through the trainer, as those of some codecs always do.
    Every `rebalance_s` seconds one server may move to a stage that has too few; if 0, only to a
    stage that has none. After every `end_copies` rounds, unless 0, servers of the stages next to
    the first and the last copy the embedding, or the norm and the head, which nothing else could
    restore. Microbatches are counted after every `count_every` steps, where the method's own rounds
    cannot name them (docs/decisions/038).

    `constrain` says which members keep their weights in the subspace of a codec that has one:
    `all`, or only `pipelines`, while full replicas train freely alongside. In the latter case
    the frozen part of the embedding is taken from the average again after every `table_every`
    rounds of the first stage (docs/decisions/019), and all servers download the new version."""

    stages: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1)], ...],
        msgspec.Meta(min_length=1, max_length=MAX_STAGES),
    ]
    batch: Microbatches = BATCH
    codec: ShortText = "int8"
    basis: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")] | None = None
    cache_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] | None = None
    policy: ShortText = "swarm"
    queue: Few = _SERVER.queue
    together: Few = _SERVER.together
    places: Few = _SERVER.places
    lease_s: TimeoutSeconds = _SERVER.lease_s
    staleness: Annotated[int, msgspec.Meta(ge=0, le=1024)] = _SERVER.staleness
    window: Few = _TRAINER.window
    kept: Microbatches = _TRAINER.kept
    end_copies: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    forward_timeout_s: TimeoutSeconds = _TRAINER.forward_timeout_s
    backward_timeout_s: TimeoutSeconds = _TRAINER.backward_timeout_s
    direct: bool = _TRAINER.direct
    rebalance_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = _BALANCE.every_s
    asynchronous: AsynchronousTerms | None = None  # None: backward passes use current weights
    constrain: Constrained = "all"
    table_every: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] = 0
    plan: PathTerms | None = None  # paths for policy `planned`
    count_every: Few | None = None  # None: after each step


def fill_pipeline(table: dict[str, Any]) -> None:
    """Spell out what follows from the other tables, such as the layers of each stage and how many
    microbatches a trainer must keep. Errors are left in place, to be reported once all is read."""
    pipeline = dict(table["pipeline"])
    _require_known(pipeline.get("codec"))
    stages, batch = pipeline.get("stages"), pipeline.get("batch", BATCH)
    if isinstance(stages, int) and not isinstance(stages, bool):
        pipeline["stages"] = _sizes(stages, table["model"])
    window = pipeline.get("window", _TRAINER.window)
    if "kept" not in pipeline and isinstance(batch, int) and isinstance(window, int):
        every = pipeline.get("count_every", 1)
        steps = max(steps_of(table["method"]["options"]), every if isinstance(every, int) else 1)
        needed = min_kept(batch, steps, window)
        pipeline["kept"] = _TRAINER.kept if needed > MAX_KEYS else max(needed, _TRAINER.kept)
    if "basis" not in pipeline and (digest := _basis_of(pipeline.get("codec"), table)) is not None:
        pipeline["basis"] = digest
    if "cache_bytes" not in pipeline and _remembers(pipeline.get("codec")):
        pipeline["cache_bytes"] = CACHE_BYTES
    if pipeline.get("constrain") == "pipelines":
        pipeline = {"table_every": TABLE_EVERY} | pipeline
    if isinstance(asynchronous := pipeline.get("asynchronous"), dict):
        pipeline.setdefault("staleness", ASYNCHRONOUS_STALENESS)
        staleness = pipeline["staleness"]
        if "versions" not in asynchronous and isinstance(staleness, int):
            versions = min(max(staleness + 1, 1), MAX_VERSIONS)
            pipeline["asynchronous"] = {"versions": versions} | asynchronous
    if "plan" in pipeline:
        _fill_paths(pipeline, table)
    table["pipeline"] = pipeline


def _fill_paths(pipeline: dict[str, Any], table: dict[str, Any]) -> None:
    """Replace measurements of hosts in the plan by planned lanes, unless another table is
    invalid."""
    seed = table.get("run", {}).get("seed", 0)
    layers = pipeline.get("stages")
    fits = (
        isinstance(layers, list)
        and all(isinstance(many, int) for many in layers)
        and isinstance(seed, int)
    )
    if not (fits and layers and isinstance(pipeline["plan"], dict)):
        return
    try:
        pipeline["plan"] = fill_plan(pipeline["plan"], layers, seed)
    except BadPlan as error:
        raise Uncomposable(error.rule, error.why, error.remedy) from None
    except ValueError as error:
        raise Usage("pipeline.plan", str(error), "") from None


def _sizes(stages: int, model: dict[str, Any]) -> list[int]:
    try:
        config = msgspec.convert(model, ModelSection).shape
    except msgspec.ValidationError:
        return [1]  # the model's own error is reported later
    require_untied(config, stages)
    try:
        return [len(span) for span in even(config, stages)]
    except BadSplit as error:
        raise Uncomposable(
            "all layers", str(error), f"choose {min(max(stages, 1), config.layers)}"
        ) from None


def _require_known(codec: object) -> None:
    """Raise `Usage` if one of several codecs is unknown.

    A joiner with another release may not know one of the codecs and does without it; a founder has
    probably mistyped the name.
    """
    try:
        names = alternatives(codec) if isinstance(codec, str) else ()
        for name in names if len(names) > 1 else ():
            activation_codec(name)
    except ValueError as error:
        raise Usage("pipeline.codec", str(error), "") from None


def _remembers(codec: object) -> bool:
    try:
        return isinstance(codec, str) and scope_of(codec) == "edge_sample"
    except ValueError:
        return False  # reported later


def _basis_of(codec: object, table: dict[str, Any]) -> str | None:
    """Return the digest of a subspace codec's basis; None for other codecs, or after an error
    that is reported later."""
    try:
        terms = subspace_terms(codec) if isinstance(codec, str) else None
        config = msgspec.convert(table["model"], ModelSection)
        seed = table.get("run", {}).get("seed", 0)
        if terms is None or not isinstance(seed, int) or not 0 <= seed < 1 << 31:
            return None
        return run_basis(seed, config.dim, terms.rank, config.vocab_size).digest.hex()
    except ValueError:
        return None


def plan_of(terms: PipelineSection, plan: RunPlan) -> PipelinePlan:
    """Return the pipeline's terms, which all nodes of the run share; raise `Uncomposable` if the
    stages do not fit the model."""
    return PipelinePlan(
        require_split(plan.model, terms.stages),
        terms.batch * plan.batch * plan.seq,
        terms.codec,
        terms.policy,
        ServerTerms(terms.queue, terms.together, terms.places, terms.lease_s, terms.staleness),
        TrainerTerms(
            terms.window,
            terms.kept,
            terms.forward_timeout_s,
            terms.backward_timeout_s,
            terms.direct,
        ),
        balance=RebalanceTerms(terms.rebalance_s),
        end_copies=terms.end_copies,
        basis=terms.basis,
        cache_bytes=terms.cache_bytes,
        asynchronous=Asynchronous(late.versions, late.correction, late.gone)
        if (late := terms.asynchronous)
        else None,
        paths=None if terms.plan is None else plan_of_texts(terms.plan.lanes),
        constrain=terms.constrain,
        table_every=terms.table_every,
        count_every=terms.count_every or 1,
    )


def require_pipeline(terms: PipelineSection, plan: RunPlan, made: Method) -> None:
    """Raise `Usage` for unknown names, for numbers that leave nothing possible, and for parts
    that do not fit together (`Uncomposable`, with the rule's name)."""
    if terms.window > terms.kept:
        why = (
            f"{terms.window} microbatches in flight are more than the {terms.kept} of pipeline.kept"
        )
        raise Usage(
            "pipeline.window", why, f"set it to {terms.kept} or less, or enlarge pipeline.kept"
        )
    try:
        scope_of(terms.codec)
    except ValueError as error:
        raise Usage("pipeline.codec", str(error), "") from None
    if 0 < terms.rebalance_s < EMERGENCY_S:
        why = f"servers compare their work every {EMERGENCY_S:.0f} s"
        raise Usage(
            f"pipeline.rebalance_s: {terms.rebalance_s}",
            why,
            f"set it to {EMERGENCY_S:.0f} or more, or to 0",
        )
    _require_paths(terms)
    pipeline = plan_of(terms, plan)
    require_composable(Composition(plan, pipeline, made, _policy(pipeline, plan)))
    _require_named(terms)


def _require_paths(terms: PipelineSection) -> None:
    """Raise `Uncomposable` if no run of these stages can follow the planned paths."""
    if terms.plan is None:
        return
    try:
        require_plan(plan_of_texts(terms.plan.lanes), terms.plan.servers, terms.stages, terms.batch)
    except BadPlan as error:
        raise Uncomposable(error.rule, error.why, error.remedy) from None


def _policy(pipeline: PipelinePlan, plan: RunPlan) -> PathPolicy:
    try:
        return policy_of(pipeline.policy, pipeline.layers, plan.run_seed, "", pipeline.paths)
    except UnknownPolicy as error:
        raise Usage("pipeline.policy", str(error), nearest(pipeline.policy, NAMES)) from None
    except BadPlan as error:
        raise Usage("pipeline.plan", error.why, error.remedy) from None
    except BadSwap as error:
        raise Uncomposable(SWAP_RULE, str(error).removeprefix(f"{SWAP_RULE}: "), "") from None
    except BadSkip as error:
        raise Uncomposable("skip ratio", str(error), "") from None


def _require_named(terms: PipelineSection) -> None:
    """Require the manifest to name a basis's digest if the codec has a basis, and only then."""
    shares = subspace_terms(terms.codec) is not None
    if shares and terms.basis is None:
        why = (
            f"all peers must hold the same basis for codec {terms.codec}, and pipeline.basis does"
            " not name its digest"
        )
        raise Uncomposable(
            "shared basis",
            why,
            "start the run with this version, which fills it in, or choose int8",
        )
    if not shares and terms.basis is not None:
        raise Uncomposable(
            "shared basis", f"codec {terms.codec} has no basis", "leave pipeline.basis out"
        )
