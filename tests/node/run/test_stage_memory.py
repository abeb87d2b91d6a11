"""A stage that cannot fit is refused by arithmetic alone, with numbers and a stage that fits."""

import dataclasses
import math

import pytest

from farflock.node.model.stage_tensors import shapes_of
from farflock.node.run.basis import basis_bytes
from farflock.node.run.composition import Uncomposable
from farflock.node.run.manifest import resolve
from farflock.node.run.memory import (
    needed_replica_bytes,
    needed_stage_bytes,
    require_replica_memory,
    require_stage_memory,
    stage_parameters,
)
from farflock.swarm.peer.calls.left import MAX_LEFT_BYTES


def planned(stages, **terms):
    model = {"preset": "demo", "layers": 6, "tied": False}
    manifest = resolve(
        {"model": model, "data": {"sha256": "0" * 64}, "pipeline": {"stages": stages, **terms}}
    )
    return manifest.plan(), manifest.pipeline_plan()


def test_the_weights_of_a_stage_are_counted_as_it_has_them():
    plan, pipeline = planned([1, 3, 2])
    for span in pipeline.stages:
        shapes = shapes_of(plan.model, span).values()
        assert stage_parameters(plan.model, span) == sum(math.prod(shape) for shape in shapes)
    whole = planned([6])[1].stages[0]
    assert stage_parameters(plan.model, whole) == plan.model.parameters()


def test_more_layers_gradients_and_waiting_passes_take_more_memory():
    needed = needed_stage_bytes(*planned([1, 3, 2]), 1)
    assert needed_stage_bytes(*planned([1, 4, 1]), 1) > needed
    assert needed_stage_bytes(*planned([1, 3, 2], places=5), 1) > needed
    assert needed_stage_bytes(*planned([1, 3, 2], queue=33), 1) > needed
    assert needed_stage_bytes(*planned([1, 3, 2], codec="raw"), 1) > needed


def test_payloads_that_stay_for_other_servers_are_counted_up_to_what_a_server_leaves():
    for batch, kept, more in ((8, 256, False), (64, 96, True), (512, 1024, True)):
        needed = []
        for direct in (False, True):
            plan, pipeline = planned([1, 3, 2], direct=direct, kept=kept)
            needed.append(needed_stage_bytes(dataclasses.replace(plan, batch=batch), pipeline, 1))
        assert (needed[1] > needed[0]) is more
        assert needed[1] - needed[0] <= MAX_LEFT_BYTES


def test_versions_of_the_frozen_embedding_are_counted_as_they_are_held_and_handed_on():
    plan, all_alike = planned([1, 3, 2], codec="subspace:8")
    for every, versions in ((1, 4), (2, 3), (3, 2), (9, 2)):
        free = dataclasses.replace(all_alike, constrain="pipelines", table_every=every)
        more = needed_stage_bytes(plan, free, 1) - needed_stage_bytes(plan, all_alike, 1)
        assert more == 2 * versions * 4 * 96 * 256


def test_of_a_subspace_codec_the_basis_is_counted_and_its_payloads_are_small():
    plan, pipeline = planned([1, 3, 2], codec="subspace:8")
    more = needed_stage_bytes(*planned([1, 3, 2], codec="subspace:9"), 1) - needed_stage_bytes(
        plan, pipeline, 1
    )
    a_payload = 2 * plan.batch * plan.seq  # of one coordinate more
    assert more == 3 * pipeline.server.queue * a_payload + basis_bytes(96, 9, 256) - basis_bytes(
        96, 8, 256
    )


def test_what_a_codec_remembers_of_samples_is_counted_at_each_end_that_a_stage_has():
    terms = {"codec": "aqsgd4", "policy": "fixed"}
    model = {"preset": "demo", "layers": 6, "tied": False}
    for stage, ends in enumerate((1, 2, 1)):
        needed = []
        for size in (2**20, 2**20 + 1000):
            cut = {"stages": [1, 3, 2], "cache_bytes": size, **terms}
            manifest = resolve(
                {
                    "model": model,
                    "train": {"samples": 9},
                    "data": {"sha256": "0" * 64},
                    "pipeline": cut,
                }
            )
            needed.append(needed_stage_bytes(manifest.plan(), manifest.pipeline_plan(), stage))
        assert needed[1] - needed[0] == 1000 * ends


def test_a_stage_that_fits_no_machine_is_refused_by_the_rules_name_with_one_that_fits():
    plan, pipeline = planned([1, 4, 1])
    small, large = (needed_stage_bytes(plan, pipeline, stage) for stage in (0, 1))
    require_stage_memory(plan, pipeline, 1, large)
    require_stage_memory(plan, pipeline, 1, small, large)
    with pytest.raises(Uncomposable) as refused:
        require_stage_memory(plan, pipeline, 1, small, large - 1)
    assert refused.value.rule == "stage too large for any machine"
    assert f"takes about {large / 1e6:,.0f} MB of memory" in refused.value.why
    assert refused.value.remedy.startswith("serve stage 0, or cut the model into more stages")
    with pytest.raises(Uncomposable, match="; cut the model into more stages"):
        require_stage_memory(plan, pipeline, 1)


def test_a_replica_that_fits_no_machine_is_refused_with_what_it_may_do_instead():
    plan, pipeline = planned([1, 4, 1])
    stages = [needed_stage_bytes(plan, pipeline, stage) for stage in range(3)]
    needed = needed_replica_bytes(plan, pipeline)
    assert needed == sum(stages)
    require_replica_memory(plan, pipeline, needed)
    with pytest.raises(Uncomposable) as refused:
        require_replica_memory(plan, pipeline, stages[0], needed - 1)
    assert refused.value.rule == "replica too large for any machine"
    assert (
        f"{plan.model.parameters():,} parameters and takes about {needed / 1e6:,.0f} MB"
        in refused.value.why
    )
    assert refused.value.remedy.startswith("serve one stage (--role stage, or stage:0)")
    with pytest.raises(Uncomposable) as refused:
        require_replica_memory(plan, pipeline)
    assert refused.value.remedy.startswith("train without weights (--role trainer)")


def test_versions_and_predictions_take_memory():
    none, two = (
        needed_stage_bytes(*planned([1, 3, 2], staleness=1, **terms), 1)
        for terms in ({}, {"asynchronous": {}})
    )
    terms = {"staleness": 3, "asynchronous": {}}
    plan, pipeline = planned([1, 3, 2], **terms)
    weights = stage_parameters(plan.model, pipeline.stages[1]) * plan.dtype.itemsize
    assert two - none == 3 * weights
    assert needed_stage_bytes(plan, pipeline, 1) - two == 4 * weights
    predicted = planned([1, 3, 2], staleness=3, asynchronous={"correction": "prediction"})
    assert needed_stage_bytes(*predicted, 1) - needed_stage_bytes(plan, pipeline, 1) == 2 * weights
