"""Each rule of composition refuses what breaks it, by its name, with what is possible instead."""

import dataclasses
from fractions import Fraction

import pytest

from farflock.node.errors import Usage
from farflock.node.model.llama import ModelConfig
from farflock.node.pipeline.passes.edges import edges_of
from farflock.node.run.composition import (
    RULES,
    Composition,
    Uncomposable,
    min_kept,
    require_composable,
    require_split,
    scope_of,
)
from farflock.node.run.counts import steps_of
from farflock.node.run.policies import POLICIES, policy_of
from farflock.node.run.split import split
from farflock.node.run.terms import Asynchronous, PipelinePlan, RunPlan, ServerTerms, TrainerTerms
from farflock.optimizers.catalog import METHODS, method, options_of
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule
from farflock.swarm.paths.skippipe import PathPlan, PlannedPaths, Stop
from farflock.swarm.peer.call_server import ROOM_BYTES
from farflock.swarm.peer.payloads import MAX_PAYLOAD_BYTES

MODEL = ModelConfig(dim=16, layers=6, heads=2, kv_heads=1, ffn_dim=32, context=64, tied=False)
SIZES = (1, 2, 2, 1)
PLAIN, HEAVY = InnerConfig("sgd"), InnerConfig("sgd", momentum=0.9)
NESTEROV = InnerConfig("sgd", momentum=0.9, nesterov=True)


class Ordered:
    """A policy whose microbatches take these orders in turn, and that says to visit every stage."""

    def __init__(self, *orders, pinned=False, share=Fraction(1)):
        self._orders, self.pinned, self._share = orders, pinned, share

    def share(self, stage):
        return self._share

    def stage_order(self, microbatch):
        return self._orders[(microbatch.step + microbatch.lane) % len(self._orders)]


def parts(
    policy="swarm",
    sizes=SIZES,
    name="ddp",
    options=None,
    codec="int8",
    batch=16,
    kept=256,
    window=8,
    end_copies=0,
    late=None,
    staleness=1,
    inner=InnerConfig(),  # noqa: B008 - a constant
    cache_bytes=None,
    batch_size=2,
    constrain="all",
    table_every=0,
    count_every=1,
    **plan,
):
    run = RunPlan(
        1,
        MODEL,
        inner,
        Schedule(1e-3, 1000),
        name,
        options or {},
        **({"batch": batch_size, "seq": 8} | plan),
    )
    trainer, server = TrainerTerms(window=window, kept=kept), ServerTerms(staleness=staleness)
    called = policy if isinstance(policy, str) else "planned"
    terms = {"end_copies": end_copies, "asynchronous": late, "cache_bytes": cache_bytes}
    terms |= {"constrain": constrain, "table_every": table_every, "count_every": count_every}
    cut, tokens = split(MODEL, sizes), batch * run.batch * run.seq
    pipeline = PipelinePlan(cut, tokens, codec, called, server, trainer, **terms)
    made = policy_of(policy, sizes, 1, "me") if isinstance(policy, str) else policy
    return Composition(run, pipeline, method(name, **run.options), made)


def refusal(given):
    with pytest.raises(Uncomposable) as refused:
        require_composable(given)
    assert f"'{refused.value.rule}'" in str(refused.value)
    assert refused.value.remedy
    assert refused.value.exit_code == Usage.exit_code
    return refused.value


@pytest.mark.parametrize("policy", [*sorted(POLICIES), "skip:3", "skip:4"])
@pytest.mark.parametrize(
    "codec",
    ["raw", "int8", "int4,int8", "topk:410/4096", "hadamard4", "subspace:8", "subspace:1+int8"],
)
def test_what_fits_is_not_refused(policy, codec):
    require_composable(parts(policy, codec=codec))


@pytest.mark.parametrize(
    ("correction", "inner"),
    [
        *(("none", inner) for inner in (InnerConfig(), PLAIN, HEAVY, NESTEROV)),
        *(
            (correction, HEAVY)
            for correction in ("spike", "prediction", "spike+prediction", "braking")
        ),
        *(
            (correction, InnerConfig(name))
            for correction in ("prediction", "braking")
            for name in ("adamw", "nadam")
        ),
        *(("nesterov", inner) for inner in (NESTEROV, InnerConfig("nadam"))),
    ],
)
def test_corrections_with_the_momentum_that_they_need_are_not_refused(correction, inner):
    require_composable(parts(late=Asynchronous(2, correction), inner=inner))
    if "prediction" not in correction:
        require_composable(
            parts(
                name="diloco", options={"period": 2}, late=Asynchronous(2, correction), inner=inner
            )
        )


def test_a_codec_with_a_memory_needs_pinned_routes_samples_that_return_and_room_for_a_microbatch():
    require_composable(parts(**SEEN))
    require_composable(
        parts(**{**SEEN, "codec": "aqsgd8,hadamard8", "samples": 62, "cache_bytes": 512})
    )


FREE = {
    "name": "diloco",
    "options": {"period": 4},
    "codec": "subspace:4",
    "constrain": "pipelines",
    "table_every": 2,
}


@pytest.mark.parametrize(
    "given", [{}, {"name": "sparseloco"}, {"policy": "skip:3"}, {"table_every": 1}]
)
def test_free_replicas_next_to_constrained_pipelines_are_not_refused(given):
    require_composable(parts(**(FREE | given)))


def test_a_pipeline_of_one_stage_is_one():
    require_composable(parts(sizes=(6,)))


def skipping(*orders):
    paths = tuple(tuple(Stop(stage, "somebody") for stage in order) for order in orders)
    return PlannedPaths(PathPlan((paths,), 1), len(SIZES))


SEEN = {"codec": "aqsgd4", "policy": "fixed", "samples": 20}

BROKEN = [  # rule, what breaks it, what the refusal says, what it offers
    ("one batch", {"accumulate": 3}, "train.accumulate is 3", "3 times as large"),
    ("one precision", {"autocast": True}, "train.autocast", "false"),
    ("pinned routes", {"codec": "aqsgd4"}, "policy swarm takes another edge each time", "int4"),
    ("pinned routes", {"codec": "aqsgd8,int8", "policy": "noloco"}, "policy noloco", "int8"),
    (
        "recurring samples",
        {"codec": "aqsgd8", "policy": "fixed"},
        "without train.samples each is new",
        "or choose int8",
    ),
    (
        "recurring samples",
        {**SEEN, "samples": 63},
        "1,000 tokens visit 63 samples of 8 tokens less than twice",
        "to 62 or less",
    ),
    ("recurring samples", {**SEEN, "seq": 501, "samples": 1}, "less than twice", "choose int4"),
    (
        "recurring samples",
        {**SEEN, "batch_size": 257},
        "names each sample of its microbatch, at most 256",
        "to 256 or less",
    ),
    (
        "room for samples",
        {**SEEN, "cache_bytes": 511},
        "takes 512 bytes, and each end of an edge has room for 511",
        "to 5,120 per trainer",
    ),
    (
        "room for samples",
        {"cache_bytes": 512},
        "codec int8 has no memory",
        "leave pipeline.cache_bytes out",
    ),
    (
        "shared basis",
        {"codec": "subspace:9"},
        "rank 9, and a basis for a width of 16 has at most 8",
        "subspace:8 or less",
    ),
    (
        "shared basis",
        {"codec": "subspace:9999+int8,raw"},
        "rank 9999, and a basis for a width of 16 has at most 8",
        "subspace:8 or less",
    ),
    (
        "free replicas",
        FREE | {"codec": "int8"},
        "codec int8 does not constrain weights",
        "codec subspace:K",
    ),
    (
        "free replicas",
        FREE | {"name": "ddp", "options": {}},
        "with method ddp members share",
        "diloco or sparseloco",
    ),
    (
        "free replicas",
        FREE | {"name": "demo", "options": {}},
        "with method demo members share",
        "set constrain to all",
    ),
    (
        "free replicas",
        FREE | {"late": Asynchronous(2)},
        "passes at old weights",
        "leave pipeline.asynchronous out",
    ),
    ("free replicas", FREE | {"table_every": 0}, "table_every is 0", "set it to 1 or more"),
    ("free replicas", {"table_every": 3}, "table_every is 3", "set constrain to pipelines"),
    ("first stage", {"policy": skipping((1, 2, 3))}, "stages [1, 2, 3]", "begin with stage 0"),
    (
        "first stage",
        {"policy": Ordered((0, 1, 2, 3), (1, 0, 2, 3))},
        "stages [1, 0, 2, 3]",
        "begin with stage 0",
    ),
    ("first stage", {"policy": Ordered(())}, "stages []", "begin with stage 0"),
    ("last stage", {"policy": Ordered((0, 1, 3, 2))}, "stages [0, 1, 3, 2]", "end with stage 3"),
    (
        "last stage",
        {"policy": skipping((0, 1, 2, 3), (0, 1, 2))},
        "stages [0, 1, 2]",
        "end with stage 3",
    ),
    (
        "every stage",
        {"policy": Ordered((0, 1, 3), (0, 2, 3))},
        "stage 1 32 times in 64 microbatches, and its share is 1",
        "as often as the policy's share says",
    ),
    (
        "every stage",
        {"policy": skipping((0, 1, 3))},
        "stage 2 0 times in 64 microbatches, and its share is 0",
        "as often as the policy's share says",
    ),
    (
        "whole batches",
        {"policy": "skip:3", "batch": 15},
        "sees 1/2 of the microbatches, and a batch has 15",
        "to 16",
    ),
    (
        "whole batches",
        {"policy": skipping((0, 1, 3), (0, 2, 3)), "batch": 1},
        "sees 1/2",
        "to 2, or another multiple",
    ),
    (
        "every stage",
        {"policy": Ordered((0, 1, 1, 2, 3))},
        "stages [0, 1, 1, 2, 3]",
        "each stage once",
    ),
    (
        "swap of unequal stages",
        {"sizes": (1, 1, 3, 1), "policy": Ordered((0, 2, 1, 3))},
        "(3 layers)",
        "same number of layers",
    ),
    (
        "end copies",
        {"end_copies": 1},
        "stages have [1, 2, 2, 1] layers",
        "pipeline.end_copies to 0",
    ),
    (
        "end copies",
        {"end_copies": 1, "sizes": (6,)},
        "stages have [6] layers",
        "as many layers as the stage next to it",
    ),
    ("rounds in step", {"name": "async"}, "as soon as some members' work is there", "choose ddp"),
    (
        "parts of stages",
        {"name": "streaming", "options": {"fragments": 2}},
        "of stage 0, with its layers [0]: 2 fragments need as many layers",
        "choose 1 or fewer",
    ),
    (
        "rounds by steps",
        {"name": "diloco", "options": {"round_s": 60.0}},
        "every 60 s",
        "set a period",
    ),
    (
        "merges at counts",
        {"count_every": 2},
        "the rounds of method ddp name the microbatches themselves",
        "leave pipeline.count_every out",
    ),
    (
        "merges at counts",
        {"count_every": 4, "name": "noloco", "options": {"period": 50}, "kept": 1000},
        "count_every is 4, and method noloco merges after steps [50, 50]",
        "set pipeline.count_every to 2",
    ),
    (
        "kept microbatches",
        {"kept": 39},
        "1 steps of 16 microbatches, and a trainer keeps only 39, 8 of them",
        "to 40 or more",
    ),
    (
        "kept microbatches",
        {"name": "diloco", "options": {"period": 10}},
        "10 steps of 16",
        "pipeline.kept to 328",
    ),
    (
        "versions in use",
        {"late": Asynchronous(4), "staleness": 2},
        "4 versions are kept",
        "staleness to 3, or versions to 3",
    ),
    (
        "shared versions",
        {"name": "demo", "late": Asynchronous(2)},
        "with method demo each member of a stage has its own weights",
        "ddp or diloco",
    ),
    (
        "predicted steps",
        {"name": "diloco", "options": {"period": 4}, "late": Asynchronous(2, "prediction")},
        "with method diloco each takes its own",
        "method ddp",
    ),
    (
        "corrected momentum",
        {"late": Asynchronous(2, "spike")},
        "spike cannot be computed with adamw",
        "train.momentum to 0.9",
    ),
    (
        "corrected momentum",
        {"late": Asynchronous(2, "spike"), "inner": NESTEROV},
        "sgd with nesterov",
        "nesterov to false",
    ),
    (
        "corrected momentum",
        {"late": Asynchronous(2, "braking"), "inner": PLAIN},
        "sgd without momentum",
        "momentum to 0.9",
    ),
    (
        "corrected momentum",
        {"late": Asynchronous(2, "prediction"), "inner": PLAIN},
        "sgd without",
        "another correction",
    ),
    (
        "corrected momentum",
        {"late": Asynchronous(2, "nesterov")},
        "cannot be computed with adamw",
        "optimizer to nadam",
    ),
    (
        "corrected momentum",
        {"late": Asynchronous(2, "nesterov"), "inner": HEAVY},
        "computed with sgd",
        "train.nesterov",
    ),
    (
        "kept microbatches",
        {"batch": 9000, "kept": 16_384},
        "and it can keep 16384",
        "lower pipeline.batch",
    ),
]


@pytest.mark.parametrize(
    ("rule", "given", "says", "offers"), BROKEN, ids=lambda given: str(given)[:40]
)
def test_what_breaks_a_rule_is_refused_by_its_name(rule, given, says, offers):
    refused = refusal(parts(**given))
    assert refused.rule == rule
    assert says in refused.why
    assert offers in refused.remedy


def test_every_rule_is_tried_here():
    assert {rule for rule, *_ in BROKEN} | {"payload"} == set(RULES)


@pytest.mark.parametrize(
    ("batch", "says"),
    [(20_000, "forward payload has 81,920,000 bytes"), (300_000, "is not allowed")],
)
def test_an_activation_has_to_fit_a_call_and_the_batch_that_is_offered_does(batch, says):
    refused = refusal(of_microbatches(batch))
    assert refused.rule == "payload"
    assert says in refused.why
    most = int(refused.remedy.removeprefix("set train.batch to ").removesuffix(" or less"))
    require_composable(of_microbatches(most))
    assert refusal(of_microbatches(most + 1)).rule == "payload"


@pytest.mark.parametrize("codec", ["raw", "int8", "topk:410/4096"])
@pytest.mark.parametrize("sizes", [(3, 3), (2, 2, 2)])
def test_all_payloads_of_a_backward_pass_have_to_fit_the_room_for_calls(codec, sizes):
    seq, most = 8192, 0
    for sequences in range(1, 2000):
        made = of_microbatches(sequences, codec, seq, sizes)
        edges = edges_of(made.plan, made.pipeline)
        forward, backward = map(edges.max_bytes, ("forward", "backward"))
        inner = [edges.token_bytes, backward] + [forward] * (len(sizes) - 2 + edges.is_masked())
        if max(forward, backward) > MAX_PAYLOAD_BYTES or sum(inner) > ROOM_BYTES:
            break
        most = sequences
    require_composable(of_microbatches(most, codec, seq, sizes))
    refused = refusal(of_microbatches(most + 1, codec, seq, sizes))
    assert refused.rule == "payload"
    assert refused.remedy == f"set train.batch to {most} or less"


def test_the_room_for_calls_is_named_where_each_payload_alone_fits():
    largest = MAX_PAYLOAD_BYTES // (64 * 4 * 16)
    assert "all payloads of a backward pass" in refusal(of_microbatches(largest)).why


def of_microbatches(sequences, codec="raw", seq=64, sizes=SIZES):
    """Parts whose microbatches have this many sequences of `seq` tokens."""
    made = parts(sizes=sizes, seq=seq, codec=codec)
    plan = dataclasses.replace(made.plan, batch=sequences)
    pipeline = dataclasses.replace(made.pipeline, batch_tokens=16 * sequences * plan.seq)
    return dataclasses.replace(made, plan=plan, pipeline=pipeline)


class Unscheduled:
    """A method of somebody's own that merges in pairs, and does not say after which steps."""

    equality = "per-peer"

    def streams(self, replica):
        return method("noloco").streams(replica)


def test_a_method_that_merges_in_parts_says_after_which_steps():
    refused = refusal(dataclasses.replace(parts(), method=Unscheduled()))
    assert refused.rule == "rounds in step"
    assert "has no `due_steps`" in refused.why


APART = {"local", "noloco", "streaming", "delayed", "co2", "sparta"}


@pytest.mark.parametrize("policy", ["swarm", "skip:3", "noloco", "fixed"])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_of_the_shelf_only_async_is_refused(name, policy):
    options = {"period": 4} if "period" in options_of(name) else {}
    if name == "streaming":
        options["fragments"] = 1
    made = parts(policy, name=name, kept=1000, options=options)
    assert made.is_counted_apart == (name in APART)
    if name == "async":
        assert refusal(made).rule == "rounds in step"
    else:
        require_composable(made)


def test_a_method_that_counts_apart_keeps_the_microbatches_of_two_counts():
    options = {"name": "noloco", "options": {"period": 50}, "count_every": 5}
    needed = min_kept(16, 5, 8)
    require_composable(parts(kept=needed, **options))
    assert refusal(parts(kept=needed - 1, **options)).rule == "kept microbatches"


def test_a_method_that_counts_apart_needs_no_more_room_for_a_longer_period():
    needed = min_kept(16, 1, 8)
    for name in sorted(APART - {"local"}):
        options = {"name": name, "options": {"period": 50}}
        if name == "streaming":
            options["options"]["fragments"] = 1
        require_composable(parts(kept=needed, **options))
        assert refusal(parts(kept=needed - 1, **options)).rule == "kept microbatches"


def test_as_many_microbatches_as_it_asks_for_are_enough():
    for batch, period in ((1, 1), (16, 3), (5, 40)):
        needed = min_kept(batch, period, 8)
        options = {"name": "diloco", "options": {"period": period}, "batch": batch}
        require_composable(parts(kept=needed, **options))
        assert refusal(parts(kept=needed - 1, **options)).rule == "kept microbatches"


def test_the_layers_of_stages_are_the_models_and_equal_ones_are_offered():
    assert require_split(MODEL, [4, 2]) == (range(4), range(4, 6))
    for sizes, offered in (
        ([4, 1], "[3, 3]"),
        ([2] * 7, "[1, 1, 1, 1, 1, 1]"),
        ([0, 6], "[3, 3]"),
        ([], "[6]"),
    ):
        with pytest.raises(Uncomposable, match="'all layers'") as refused:
            require_split(MODEL, sizes)
        assert refused.value.remedy == f"choose {offered}"


def test_a_head_that_is_the_embedding_is_on_one_stage():
    tied = ModelConfig(dim=16, layers=2, heads=2, kv_heads=1, ffn_dim=32, context=64)
    assert require_split(tied, [2]) == (range(2),)
    with pytest.raises(Uncomposable, match=r"'tied model'.* set model.tied to false"):
        require_split(tied, [1, 1])


def test_the_scope_of_a_codec_is_known_from_its_name():
    scopes = {
        name: scope_of(name)
        for name in ("int8", "raw", "aqsgd4", "subspace:40", "subspace:40+bf16")
    }
    assert list(scopes.values()) == [
        "memoryless",
        "memoryless",
        "edge_sample",
        "shared_params",
        "shared_params",
    ]
    for unknown in ("subspaces:4", "ecsq:98", ""):
        with pytest.raises(ValueError, match="is not known"):
            scope_of(unknown)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_how_often_a_method_names_microbatches_is_what_its_options_say(name):
    options = {"period": 12} if "period" in options_of(name) else {}
    made = method(name, **options)
    expected = getattr(made, "mask_period", getattr(made, "period", 1))
    assert steps_of(made) == expected
    assert steps_of({option: getattr(made, option) for option in options_of(name)}) == expected
