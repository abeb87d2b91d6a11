"""[pipeline] resolves to one text and one plan, and says where it is wrong."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.activation import Incompatible
from farflock.compression.subspace_versions import SubspaceVersions
from farflock.node.errors import RefusedByRun, Usage
from farflock.node.pipeline.passes.edges import basis_of, edges_of
from farflock.node.run.basis import run_basis
from farflock.node.run.composition import Uncomposable
from farflock.node.run.manifest import load, parse, resolve
from farflock.node.run.pipeline_section import CACHE_BYTES, TABLE_EVERY
from farflock.node.run.policies import POLICIES
from farflock.node.run.terms import (
    Asynchronous,
    EmbeddingSchedule,
    PipelinePlan,
    RebalanceTerms,
    ServerTerms,
    TrainerTerms,
)

SHA = "0" * 64


def resolved(pipeline, *assignments, **tables):
    given = {
        "model": {"preset": "demo", "tied": False},
        "data": {"sha256": SHA},
        "pipeline": pipeline,
    }
    return resolve(given | tables, assignments)


# resolving


def test_a_number_of_stages_becomes_the_layers_of_each_and_all_else_is_spelt_out():
    manifest = resolved({"stages": 3})
    assert manifest.pipeline.stages == (1, 2, 1)
    text = manifest.canonical().decode()
    assert '[pipeline]\nstages = [1, 2, 1]\nbatch = 16\ncodec = "int8"\npolicy = "swarm"\n' in text
    # int8 does not have these
    spelt_out = set(manifest.pipeline.__struct_fields__) - {
        "asynchronous",
        "basis",
        "cache_bytes",
        "plan",
        "count_every",
    }
    assert all(
        f"\
{name} = "
        in text
        for name in spelt_out
    )
    for name in ("asynchronous", "plan", "count_every"):
        assert name not in text, (
            "what a run does not do is not in its terms, or its id would have changed"
        )
    assert manifest == resolved({"stages": [1, 2, 1]})
    assert manifest.hash() == resolved({"stages": [1, 2, 1]}).hash()


def test_of_a_codec_that_remembers_samples_the_bytes_of_its_memory_are_spelt_out_and_used():
    given = {"stages": 2, "codec": "aqsgd8", "policy": "fixed"}
    manifest = resolved(given, "train.samples=50")
    assert manifest.pipeline.cache_bytes == CACHE_BYTES
    assert parse(manifest.canonical()) == manifest
    small = resolved(given, "train.samples=50", "pipeline.cache_bytes=1000000")
    plan, pipeline = small.plan(), small.pipeline_plan()
    assert (plan.samples, edges_of(plan, pipeline).codec.max_cache_bytes) == (50, 1_000_000)
    assert resolved({"stages": 2}).pipeline.cache_bytes is None


def test_the_basis_of_a_subspace_codec_is_named_and_follows_from_the_seed_and_the_sizes():
    manifest = resolved({"stages": 2, "codec": "subspace:8"}, "run.seed=5")
    basis = run_basis(5, 96, 8, 256)
    assert manifest.pipeline.basis == basis.digest.hex()
    assert parse(manifest.canonical()) == manifest
    plan, pipeline = manifest.plan(), manifest.pipeline_plan()
    assert basis_of(plan, pipeline) is basis
    for other in (["run.seed=6"], ["pipeline.codec=subspace:9"], ["model.dim=88"]):
        assert (
            resolved({"stages": 2, "codec": "subspace:8"}, *other).pipeline.basis
            != basis.digest.hex()
        )
    with pytest.raises(Incompatible, match=r"computes a basis with digest .*; update farflock"):
        edges_of(plan, dataclasses.replace(pipeline, basis="0" * 64))


def test_a_resolved_manifest_without_its_basis_is_refused():
    text = resolved({"stages": 2, "codec": "subspace:8"}).canonical().decode()
    lines = [line for line in text.splitlines() if not line.startswith("basis")]
    with pytest.raises(
        RefusedByRun, match=r"'shared basis'.*does not name its digest; start the run"
    ):
        parse("\n".join(lines))


def test_the_plan_is_what_the_terms_say():
    server, trainer = ServerTerms(5, 2, 3, 7.5, 2), TrainerTerms(6, 99, 4.0, 9.0)
    terms = {
        "stages": [3, 1],
        "batch": 4,
        "codec": "int4,int8",
        "policy": "noloco",
        "queue": 5,
        "together": 2,
    }
    terms |= {"places": 3, "lease_s": 7.5, "staleness": 2, "window": 6, "kept": 99}
    terms |= {"forward_timeout_s": 4, "backward_timeout_s": 9, "rebalance_s": 60}
    manifest = resolved(terms, "train.batch=2", "train.seq=32")
    expected = PipelinePlan(
        (range(3), range(3, 4)),
        4 * 2 * 32,
        "int4,int8",
        "noloco",
        server,
        trainer,
        RebalanceTerms(60.0),
    )
    assert manifest.pipeline_plan() == expected


def test_free_replicas_are_spelt_out_with_a_new_table_every_n_rounds():
    given = {"stages": 2, "codec": "subspace:8", "constrain": "pipelines"}
    overrides = ("method.name=diloco", "method.options.period=4")
    manifest = resolved(given, *overrides)
    assert (manifest.pipeline.constrain, manifest.pipeline.table_every) == (
        "pipelines",
        TABLE_EVERY,
    )
    plan = manifest.pipeline_plan()
    assert plan.turns == EmbeddingSchedule(TABLE_EVERY, 2)
    assert isinstance(edges_of(manifest.plan(), plan).codec, SubspaceVersions)
    late = resolved(given | {"table_every": 9, "staleness": 5}, *overrides).pipeline_plan()
    assert late.turns == EmbeddingSchedule(9, 6), "as long as a forward pass may come late"
    plain = resolved({"stages": 2, "codec": "subspace:8"}).pipeline_plan()
    assert plain.turns is None
    assert not isinstance(edges_of(manifest.plan(), plain).codec, SubspaceVersions)


def test_without_the_table_a_run_is_of_whole_models():
    manifest = resolve({"data": {"sha256": SHA}})
    assert (manifest.pipeline, manifest.pipeline_plan()) == (None, None)
    assert "pipeline" not in manifest.canonical().decode()


def test_a_pipeline_is_synced_by_everybodys_gradients_unless_its_founder_says_otherwise():
    assert resolved({"stages": 2}).method.name == "ddp"
    assert resolved({"stages": 2}, method={"name": "sparseloco"}).method.name == "sparseloco"


def test_a_trainer_keeps_as_many_microbatches_as_two_rounds_take():
    assert resolved({"stages": 2}).pipeline.kept == TrainerTerms().kept
    method = {"name": "diloco", "options": {"period": 20}}
    assert resolved({"stages": 2, "window": 5}, method=method).pipeline.kept == 2 * 16 * 20 + 5


@settings(max_examples=40, deadline=None)
@given(
    stages=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    batch=st.integers(1, 4000),
    codec=st.sampled_from(
        ["raw", "int8", "int4 | int8", "int4,int8", "hadamard8:32", "topk:410/4096"]
    ),
    policy=st.sampled_from(sorted(set(POLICIES) - {"swap"})),
    lease_s=st.floats(1, 3600),
    rebalance_s=st.just(0.0) | st.floats(10, 86_400),
    staleness=st.integers(0, 9),
    asynchronous=st.none()
    | st.fixed_dictionaries(
        {"gone": st.sampled_from(["drop", "newest"])}, optional={"versions": st.just(1)}
    ),
)
def test_any_pipeline_survives_the_round_trip(stages, **terms):
    tables = {"model": {"preset": "demo", "tied": False, "layers": sum(stages)}}
    manifest = resolved({"stages": stages, **terms}, **tables)
    again = parse(manifest.canonical())
    assert again == manifest
    assert again.canonical() == manifest.canonical()
    assert again.pipeline_plan() == manifest.pipeline_plan()


def test_a_pipelines_id_depends_on_every_one_of_its_terms():
    changes = [
        {},
        {"batch": 17},
        {"codec": "int4"},
        {"policy": "fixed"},
        {"staleness": 2},
        {"kept": 300},
        {"places": 5},
        {"rebalance_s": 60},
        {"asynchronous": {}},
        {"asynchronous": {"versions": 1}},
        {"asynchronous": {"gone": "newest"}},
        {"asynchronous": {"correction": "braking"}},
    ]
    assert len({resolved({"stages": 2, **change}).run_id("founder") for change in changes}) == len(
        changes
    )


def test_as_many_versions_are_kept_as_may_be_used_unless_fewer_are_named():
    for staleness in (0, 1, 4):
        assert (
            resolved(
                {"stages": 2, "staleness": staleness, "asynchronous": {}}
            ).pipeline.asynchronous.versions
            == staleness + 1
        )
    assert resolved({"stages": 2, "asynchronous": {}}).pipeline.staleness == 4
    assert resolved({"stages": 2, "asynchronous": {}}).pipeline.asynchronous.versions == 5
    assert resolved({"stages": 2}).pipeline.staleness == 1
    assert (
        resolved(
            {"stages": 2, "staleness": 4, "asynchronous": {"versions": 2}}
        ).pipeline.asynchronous.versions
        == 2
    )
    made = resolved(
        {"stages": 2, "staleness": 4, "asynchronous": {"correction": "braking", "gone": "newest"}}
    )
    assert made.pipeline_plan().asynchronous == Asynchronous(5, "braking", "newest")
    assert resolved({"stages": 2}).pipeline_plan().asynchronous is None


def test_the_run_that_is_shipped_can_be_started(pytestconfig):
    manifest = load(pytestconfig.rootpath / "experiments/runs/pipeline.toml")
    assert manifest.pipeline.stages == (2, 2, 2)
    assert parse(manifest.canonical()) == manifest


# what is wrong

WRONG = [
    ({"stages": 3, "btach": 2}, "pipeline.btach: there is no such key", "'batch'"),
    ({"batch": 2}, "pipeline.stages: it is missing", "give it a value"),
    ({"stages": "three"}, "pipeline.stages must be a list", "got 'three'"),
    ({"stages": True}, "pipeline.stages must be a list", "got True"),
    ({"stages": []}, "pipeline.stages", "length >= 1"),
    ({"stages": [1] * 65}, "pipeline.stages", "length <= 64"),
    ({"stages": [2, 0, 2]}, "pipeline.stages", ">= 1"),
    ({"stages": 5}, "'all layers': 4 layers can be cut into 1 to 4 stages, not 5", "choose 4"),
    ({"stages": 0}, "'all layers'", "choose 1"),
    (
        {"stages": [1, 2]},
        "'all layers': stages of [1, 2] layers have 3 in total, the model has 4",
        "choose [2, 2]",
    ),
    ({"stages": 2, "batch": 0}, "pipeline.batch must be a whole number >= 1", "got 0"),
    ({"stages": 2, "batch": "x", "window": None}, "pipeline.", "must be"),
    ({"stages": 2, "batch": 10_000}, "'kept microbatches'", "lower pipeline.batch"),
    ({"stages": 2, "kept": 20}, "pipeline.window: 64 microbatches", "set it to 20 or less"),
    ({"stages": 2, "kept": 40, "window": 20}, "'kept microbatches'", "set pipeline.kept to 52"),
    (
        {"stages": 2, "codec": "itn8"},
        "pipeline.codec: activation codec 'itn8' is not known",
        "'int8'",
    ),
    ({"stages": 2, "codec": "int8,raw"}, "pipeline.codec", "raw goes both ways"),
    ({"stages": 2, "codec": "aqsgd4"}, "'pinned routes'", "int4"),
    ({"stages": 2, "codec": "aqsgd4", "policy": "fixed"}, "'recurring samples'", "train.samples"),
    (
        {"stages": 2, "cache_bytes": 2**20},
        "'room for samples': codec int8 has no memory",
        "leave",
    ),
    ({"stages": 2, "cache_bytes": -1}, "pipeline.cache_bytes", ">= 0"),
    ({"stages": 2, "codec": "subspace:49+bf16"}, "'shared basis'", "subspace:48"),
    (
        {"stages": 2, "codec": "subspace:x"},
        "pipeline.codec: 'subspace:x' is not known",
        "subspace:40",
    ),
    (
        {"stages": 2, "codec": "subspace:8", "constrain": "pipelines"},
        "'free replicas': with method ddp",
        "set constrain to all",
    ),
    ({"stages": 2, "codec": "subspace:8", "constrain": "weak"}, "pipeline.constrain", "pipelines"),
    (
        {"stages": 2, "codec": "subspace:8", "table_every": -1},
        "pipeline.table_every must be",
        ">= 0, got -1",
    ),
    (
        {"stages": 2, "codec": "int8", "basis": "0" * 64},
        "'shared basis': codec int8 has no basis",
        "leave",
    ),
    (
        {"stages": 2, "codec": "subspace:8", "basis": "0" * 63},
        "pipeline.basis must be text",
        "matches the pattern",
    ),
    ({"stages": 2, "policy": "swrm"}, "pipeline.policy: 'swrm' is not known", "'swarm'"),
    ({"stages": 3, "policy": "skip"}, "'skip ratio'", "write skip:3"),
    ({"stages": 3, "policy": "skip:1e1"}, "'skip ratio': 'skip:1e1' does not say", "write skip:3"),
    (
        {"stages": 4, "policy": "skip:5"},
        "'skip ratio': paths that visit 5 of 4 stages",
        "choose 3 to 4 stages",
    ),
    (
        {"stages": 4, "policy": "skip:2"},
        "'skip ratio': paths that visit 2 of 4 stages",
        "choose 3 to 4 stages",
    ),
    ({"stages": 4, "policy": "skip:3", "batch": 7}, "'whole batches'", "set pipeline.batch to 8"),
    ({"stages": 2, "codec": "int8 | int5"}, "'int5' is not known", "did you mean 'int8'"),
    (
        {"stages": 2, "codec": "int8 | subspace:4"},
        "'subspace:4' cannot be one of several",
        "keep something",
    ),
    ({"stages": 3, "policy": "swap"}, "'swap of unequal stages'", "choose 4 or at least 6 stages"),
    ({"stages": 2, "staleness": -1}, "pipeline.staleness must be", ">= 0, got -1"),
    (
        {"stages": 2, "asynchronous": {"versions": 0}},
        "pipeline.asynchronous.versions must be",
        ">= 1, got 0",
    ),
    (
        {"stages": 2, "staleness": 1, "asynchronous": {"versions": 3}},
        "'versions in use'",
        "set pipeline.staleness to 2, or versions to 2",
    ),
    (
        {"stages": 2, "asynchronous": {"corection": "none"}},
        "corection: there is no such key",
        "'correction'",
    ),
    ({"stages": 2, "asynchronous": {"correction": "spyke"}}, "'spyke' is not known", "spike"),
    ({"stages": 2, "asynchronous": {"gone": "ask"}}, "'ask' is not known", "drop"),
    (
        {"stages": 2, "asynchronous": {"correction": "spike"}},
        "'corrected momentum'",
        "set train.optimizer to sgd",
    ),
    (
        {"stages": 2, "staleness": 100, "asynchronous": {"versions": 101}},
        "asynchronous.versions must be",
        "<= 64, got 101",
    ),
    ({"stages": 2, "lease_s": float("nan")}, "pipeline.lease_s must be", ">= 1.0, got nan"),
    ({"stages": 2, "rebalance_s": 5}, "pipeline.rebalance_s: 5", "set it to 10 or more, or to 0"),
    ({"stages": 2, "rebalance_s": -1}, "pipeline.rebalance_s must be", ">= 0.0, got -1"),
    ({"stages": 2, "forward_timeout_s": 0}, "pipeline.forward_timeout_s must be", ">= 1.0, got 0"),
]


def test_several_codecs_are_in_the_order_of_the_manifest_as_far_as_they_are_known():
    manifest = resolved({"stages": 2, "codec": "int4 | int8"})
    plan, pipeline = manifest.plan(), manifest.pipeline_plan()
    edges = edges_of(plan, pipeline)
    assert [codec.name for codec in (edges.codec, *edges.others)] == ["int4,int8", "int8,int8"]
    newer = parse(manifest.canonical().decode().replace("int4 | int8", "vq:9 | int8"))
    edges = edges_of(newer.plan(), newer.pipeline_plan())
    assert (edges.codec.name, edges.others) == ("int8,int8", ()), (
        "a joiner does without what it does not know"
    )


@pytest.mark.parametrize(("pipeline", "says", "offers"), WRONG, ids=lambda given: str(given)[:50])
def test_what_is_wrong_is_named_with_what_is_possible(pipeline, says, offers):
    with pytest.raises(Usage) as refused:
        resolved(pipeline)
    assert says in str(refused.value)
    assert offers in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("stages", [3, [2, 2]])
def test_a_model_whose_head_is_its_embedding_has_one_stage(stages):
    with pytest.raises(Uncomposable, match=r"'tied model'.*set model.tied to false"):
        resolved({"stages": stages}, "model.tied=true")
    assert resolved({"stages": 1}, "model.tied=true").pipeline.stages == (4,)


def test_stages_that_change_places_have_equally_many_layers():
    terms = {"stages": [1, 1, 2, 1], "policy": "swap"}
    with pytest.raises(
        Uncomposable,
        match="'swap of unequal stages': stages 1 and 2 have 1 and 2 layers; give them equally",
    ):
        resolved(terms, "model.layers=5")
    assert resolved(terms | {"stages": [1, 2, 2, 1]}, "model.layers=6").pipeline.policy == "swap"


def test_a_model_that_cannot_be_is_refused_as_such():
    with pytest.raises(Usage, match=r"model.layers must be a whole number, got 'x'"):
        resolved({"stages": 3}, "model.layers=x")
    with pytest.raises(Usage, match=r"dim 97 cannot be divided into 4 heads of an even width"):
        resolved({"stages": 3}, "model.dim=97")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stages = [1, 2, 1]", "stages = 3"),
        ("stages = [1, 2, 1]", "stages = [1, 2, 9223372036854775807]"),
        ("stages = [1, 2, 1]", "stages = [4, -1, 1]"),
        ('codec = "int8"\npolicy', 'codec = "subspace:9999999"\npolicy'),
        ('codec = "int8"\npolicy', 'codec = "topk:1/1,mask,mask"\npolicy'),
        ('policy = "swarm"', 'policy = "__class__"'),
        ("batch = 16", "batch = 1000000000000"),
        ("layers = 4", "layers = 1024"),
        ("dim = 96", "dim = 65536"),
    ],
)
def test_a_strangers_pipeline_that_cannot_run_is_refused_by_the_joiner(old, new):
    text = resolved({"stages": 3}, "train.batch=300").canonical().decode()
    assert text.count(old) == 1
    with pytest.raises(RefusedByRun):
        parse(text.replace(old, new))
