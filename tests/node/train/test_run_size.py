"""The sizes of a run's exchanges: those of what nodes encode, and of models that none holds."""

import math

import msgspec
import pytest
import torch

from farflock.node.errors import Usage
from farflock.node.model.llama import PRESETS, ModelConfig, build
from farflock.node.run.manifest import resolve
from farflock.node.run.terms import RunPlan
from farflock.node.train import run_size
from farflock.node.train.exchange_client import layout_of
from farflock.node.train.run_size import (
    StreamSize,
    exchanged,
    is_paired,
    require_carried,
    stream_sizes,
)
from farflock.optimizers.catalog import METHODS, method
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.schedule import Schedule

LLAMA_70B = ModelConfig(
    dim=8192, layers=80, heads=64, kv_heads=8, ffn_dim=28_672, context=8192, tied=False
)


def plan(name, model=PRESETS["tiny"], **options):
    return RunPlan(1, model, InnerConfig(lr=1e-3), Schedule(1e-3, 10**6), name, options)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_contribution_takes_at_most_the_bytes_that_are_said(name):
    model = build(PRESETS["tiny"], 1)
    shapes = {key: tuple(x.shape) for key, x in model.named_parameters()}
    templates = method(name).streams(run_size.ShapeReplica(shapes))
    sizes = stream_sizes(plan(name))
    assert [size.stream for size in sizes] == [each.key.stream for each in templates]
    for size, template in zip(sizes, templates, strict=True):
        layout = layout_of(template, 1)
        tensors = {key: torch.randn(x.shape) for key, x in template.tensors.items()}
        payloads = [layout.encode(index, 0, tensors) for index in range(len(layout.shards))]
        assert len(payloads) == size.shards
        written = sum(map(len, payloads))
        assert written <= size.out_bytes
        # Entropy codes and positions take fewer bytes than they may.
        assert size.out_bytes <= 3 * written + 64
        assert size.values == sum(x.numel() for x in tensors.values())


def test_the_streams_of_seventy_billion_parameters_are_carried():
    require_carried(plan("desloc", LLAMA_70B))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_tenth_of_seventy_billion_parameters_takes_a_tenth_of_the_shards_and_no_values(
    monkeypatch, name
):
    most = run_size.max_shards
    monkeypatch.setattr(run_size, "max_shards", lambda kind: most(kind) // 10)
    require_carried(plan(name, msgspec.structs.replace(LLAMA_70B, layers=LLAMA_70B.layers // 10)))
    # Nothing that a method keeps for later was made without values.
    assert torch.get_default_device() == torch.device("cpu")
    assert all(math.isfinite(size.steps) for size in stream_sizes(plan(name)))


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("ddp", {}, {"grad": 1}),
        ("diloco", {"period": 7}, {"delta": 7}),
        ("streaming", {"period": 8, "fragments": 2}, {"fragment.0": 8, "fragment.1": 8}),
        ("noloco", {"period": 5}, {"pairs": 5}),
        ("delayed", {"period": 6}, {"delta": 6}),
        ("demo", {"period": 1, "check_rounds": 9}, {"dct": 1, "check": 9}),
    ],
)
def test_the_steps_between_rounds_are_those_of_the_method_s_options(name, options, steps):
    assert {size.stream: size.steps for size in stream_sizes(plan(name, **options))} == steps


def test_a_pipeline_has_the_streams_of_each_of_its_stages():
    manifest = resolve(
        {
            "model": {
                "dim": 32, "layers": 4, "heads": 2, "kv_heads": 2, "ffn_dim": 64, "context": 64,
                "tied": False,
            },
            "train": {"batch": 2, "seq": 32, "clip": 0.0},
            "pipeline": {"stages": 2},
            "method": {"name": "ddp"},
        }
    )  # fmt: skip
    sizes = stream_sizes(manifest.plan(), manifest.pipeline_plan())
    assert [size.stream for size in sizes] == ["grad/0", "grad/1"]
    assert sum(size.values for size in sizes) == manifest.plan().model.parameters()


def test_members_of_pairs_alone_have_weights_of_their_own():
    found = {
        name: is_paired(resolve({"model": {"preset": "tiny"}, "method": {"name": name}}).plan())
        for name in ("diloco", "local", "noloco")
    }
    assert found == {"diloco": False, "local": False, "noloco": True}


def test_reducers_share_the_residuals_of_a_method_that_compensates():
    lean, plain = plan("lean"), plan("diloco")
    values = 4 * lean.model.parameters()
    assert [size.residual_bytes for size in stream_sizes(lean)] == [values]
    assert [size.residual_bytes for size in stream_sizes(plain)] == [0]
    two, four = (exchanged(lean, members).pending_bytes for members in (2, 4))
    assert two - four == values // 2 - values // 4
    assert exchanged(plain).pending_bytes == 0


def size(kind, out_bytes, back_bytes=0, deadline_s=30.0):
    return StreamSize("s", kind, 1, 1, out_bytes, back_bytes, 1.0, deadline_s)


@pytest.mark.parametrize(
    ("one", "members", "sent"),
    [
        (size("mean", 100, 50), 1, 0),
        (size("mean", 100, 50), 2, 75),
        (size("mean", 100, 50), 4, 112.5),
        (size("gather", 100), 4, 300),
        (size("pair", 100), 64, 100),
        (size("pair", 100), 1, 0),
    ],
)
def test_a_member_sends_its_part_of_a_round(one, members, sent):
    assert one.sent_bytes(members) == sent
    assert one.seconds(members, 25.0) == sent / 25


def test_a_deadline_is_met_if_contributions_arrive_in_its_first_half_and_all_within_it():
    assert size("mean", 100, 100).min_deadline_s(2, 10.0) == 10.0
    assert size("mean", 300, 100).min_deadline_s(2, 10.0) == 30.0
    assert size("gather", 100).min_deadline_s(2, 10.0) == 20.0
    assert size("pair", 100).min_deadline_s(2, 10.0) == 10.0


def test_what_no_stream_carries_is_refused_in_words_with_the_most_that_one_does(monkeypatch):
    monkeypatch.setattr(run_size, "max_shards", lambda kind: 100_000)
    with pytest.raises(Usage, match=r"stream delta.*130,649 shards.*a mean carries 100,000"):
        require_carried(plan("diloco", LLAMA_70B))


def test_a_shard_that_is_larger_than_a_chunk_is_refused(monkeypatch):
    monkeypatch.setattr(run_size, "MAX_CHUNK_BYTES", 1000)
    with pytest.raises(Usage, match=r"stream delta: a shard of it takes up to .* holds 1,000"):
        require_carried(plan("diloco"))
