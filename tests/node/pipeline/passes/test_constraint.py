"""Weights stay in a run's subspace: the right tensors, after every change, alike on all peers.

The gradients do not depend on where a model is cut.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.compression.subspace import outside, settled
from farflock.node.model.llama import ModelConfig, build
from farflock.node.pipeline.contrib.embedding_versions import drifted
from farflock.node.pipeline.passes.constraint import (
    EMBEDDING,
    ConstrainedReplica,
    ConstrainedStage,
    Constraint,
    writers,
)
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.run.basis import run_basis
from farflock.node.run.split import even
from farflock.optimizers.catalog import method
from farflock.optimizers.parts.inner import InnerConfig

MODEL = ModelConfig(
    vocab_size=30, dim=16, layers=6, heads=2, kv_heads=1, ffn_dim=24, context=8, tied=False
)
STAGES = even(MODEL, 3)
BASIS = run_basis(4, 16, 5, 30)
TOKENS = torch.arange(16).mul(7).remainder(30).view(2, 8)


def constraint_of(model):
    return Constraint.on([name for name, _ in model.named_parameters()], STAGES, BASIS)


def constrained(span=STAGES[0], dtype=torch.float32, seed=1):
    model = build(MODEL, seed, span).to(dtype)
    constraint = constraint_of(model)
    constraint.begin(model)
    return model, constraint


def weights(model):
    return {name: x.detach() for name, x in model.named_parameters()}


def far(model, constraint):
    return outside(weights(model), constraint.dims, BASIS, {EMBEDDING: BASIS.fixed_VD})


def shaken(model, seed=0):
    """All weights changed, as by a step."""
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)


# which tensors


def test_a_whole_model_constrains_its_embedding_and_two_matrices_of_each_layer_before_the_tail():
    names = [name for name, _ in build(MODEL, 0).named_parameters()]
    expected = {"model.embed_tokens.weight": 1}
    for layer in range(4):
        expected |= {
            f"model.layers.{layer}.{name}.weight": 0
            for name in ("self_attn.o_proj", "mlp.down_proj")
        }
    assert writers(names, tail=4) == expected
    assert writers(names, tail=0) == {}, "one stage alone sends nothing"
    assert Constraint.on(names, STAGES, BASIS).dims == expected


def test_each_stage_has_its_own_of_them_and_the_last_one_none():
    dims = [constraint_of(build(MODEL, 0, span)).dims for span in STAGES]
    assert [len(found) for found in dims] == [5, 4, 0]
    assert EMBEDDING in dims[0]


@pytest.mark.parametrize("span", STAGES[:2])
def test_whatever_the_other_weights_are_a_stage_keeps_the_stream_inside(span):
    """Norms' gains too: they act on what branches read. Each tensor alone leads out of it."""
    model, constraint = constrained(span)
    with torch.no_grad():
        for name, x in model.named_parameters():
            if name not in constraint.dims:
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(len(name))))
    if span.start == 0:
        given, fixed = TOKENS, BASIS.fixed_VD[TOKENS]
    else:
        fixed = torch.zeros(())
        given = (
            torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(3)) @ BASIS.columns_DK.T
        )

    def left_over():
        y = Stage(model).forward(given) - fixed
        return float(
            (y - y @ BASIS.columns_DK @ BASIS.columns_DK.T).norm() / y.norm().clamp_min(1e-9)
        )

    assert left_over() < 1e-5
    for name in constraint.dims:
        x = model.get_parameter(name)
        kept = x.detach().clone()
        with torch.no_grad():
            x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(5)))
        assert left_over() > 1e-2, name
        with torch.no_grad():
            x.copy_(kept)


# keeping to it


def test_a_stage_begins_with_the_frozen_table_and_projected_weights():
    model, constraint = constrained()
    assert torch.equal(weights(model)[EMBEDDING], BASIS.fixed_VD)
    assert far(model, constraint) < 1e-6
    free = weights(build(MODEL, 1, STAGES[0]))
    p = BASIS.exact_DK @ BASIS.exact_DK.T
    for name, x in weights(model).items():
        if name in constraint.dims and name != EMBEDDING:
            torch.testing.assert_close(x.double(), p @ free[name].double(), rtol=0, atol=1e-7)
        elif name not in constraint.dims:
            assert torch.equal(x, free[name])


@given(st.integers(0, 2**20), st.sampled_from([1e-20, 1e-3, 1.0, 1e6]))
@settings(max_examples=40, deadline=None)
def test_what_was_projected_once_is_projected_again_without_changing_a_bit(seed, size):
    chance = torch.Generator().manual_seed(seed)
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = {
        name: torch.randn(16, 24, generator=chance) * size,
        "model.norm.weight": torch.ones(3),
    }
    constraint = Constraint(BASIS, {name: 0, "model.layers.1.mlp.down_proj.weight": 0})
    constraint.keep(tensor)
    once = tensor[name].clone()
    constraint.keep(tensor)
    assert torch.equal(tensor[name], once)
    assert outside(tensor, {name: 0}, BASIS) < 2e-6


def test_an_embedding_is_projected_around_its_frozen_part():
    table = torch.randn(30, 16, generator=torch.Generator().manual_seed(2))
    expected = (
        BASIS.fixed_VD.double()
        + (table.double() - BASIS.fixed_VD) @ BASIS.exact_DK @ BASIS.exact_DK.T
    )
    Constraint(BASIS, {EMBEDDING: 1}).keep({EMBEDDING: table})
    torch.testing.assert_close(table.double(), expected, rtol=0, atol=1e-6)


def replica_of(inner="adamw", span=STAGES[0]):
    model, constraint = constrained(span)
    optimizer = InnerConfig(inner, 0.1, (0.9, 0.95), 0.1).build(model)
    return model, constraint, ConstrainedReplica(model, optimizer, 1.0, constraint)


@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon"])
def test_after_an_inner_step_of_any_optimizer_weights_are_inside(inner):
    model, constraint, replica = replica_of(inner)
    for step in range(3):
        for name, x in model.named_parameters():
            x.grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(step + len(name)))
        before = weights(model)[EMBEDDING].clone()
        replica.inner_step(0.1)
        assert far(model, constraint) < 2e-6
        assert not torch.equal(weights(model)[EMBEDDING], before)


def test_after_a_method_wrote_weights_they_are_inside_and_gradients_and_moments_are_as_written():
    model, constraint, replica = replica_of()
    new = {
        name: torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for name, shape in replica.shapes.items()
    }
    for what in ("grad", "exp_avg"):
        replica.write(new, what)
        assert all(
            torch.equal(x, new[name]) for name, x in replica.read(replica.names, what).items()
        )
    replica.write(new, "param", mix=0.5)
    assert far(model, constraint) < 2e-6
    name = "model.layers.0.mlp.down_proj.weight"
    replica.write({name: new[name]}, "param")
    assert far(model, constraint) < 2e-6
    assert not torch.equal(weights(model)[name], new[name]), "it was outside"


@pytest.mark.parametrize("name", ["ddp", "diloco", "sparta-diloco"])
def test_a_replica_that_adopts_a_state_has_the_same_weights_to_the_bit(name):
    options = {"period": 2} if name != "ddp" else {}
    model, constraint, replica = replica_of()
    shaken(model)
    constraint.keep(weights(model))
    one = method(name, **options)
    one.streams(replica)
    state = one.snapshot(replica)
    other_model, _, other = replica_of(span=STAGES[0])
    two = method(name, **options)
    two.streams(other)
    two.restore(other, {key: x.clone() for key, x in state.items()}, "adopt")
    for key, x in weights(other_model).items():
        assert torch.equal(x, weights(model)[key]), key


# gradients


@pytest.mark.parametrize("span", STAGES)
def test_gradients_are_those_of_the_loss_by_weights_that_are_projected_first(span):
    model, constraint = constrained(span, torch.float64)
    given = (
        TOKENS
        if span.start == 0
        else torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1)).double()
    )
    last = span.stop == MODEL.layers
    outside_ = (
        TOKENS.flip(0)
        if last
        else torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(2)).double()
    )
    found = ConstrainedStage(model, constraint).backward(given, outside_)
    plain = Stage(model).backward(given, outside_)
    p = BASIS.exact_DK @ BASIS.exact_DK.T
    for name, x in plain.staged.gradients.items():
        if name in constraint.dims:
            x = p @ x if constraint.dims[name] == 0 else x @ p
        torch.testing.assert_close(found.staged.gradients[name], x, rtol=0, atol=1e-12)
    assert found.staged.tokens == plain.staged.tokens
    assert found.loss_sum == plain.loss_sum
    assert (found.input_gradient is None) == (plain.input_gradient is None)


# next to free replicas


def test_an_embedding_that_drifted_stays_and_the_same_tables_are_near_it_by_the_papers_rule():
    model, constraint = constrained()
    shaken(model, 7)
    table = weights(model)[EMBEDDING].clone()
    later = drifted(constraint.basis, 2, table)
    assert (later.version, BASIS.version) == (2, 1)
    assert torch.equal(later.columns_DK, BASIS.columns_DK)
    kept = table.clone()
    constraint.after(later).keep({EMBEDDING: kept})
    assert torch.equal(kept, table), "T_⊥ + T_S is the table still"
    inside, paper = settled(
        table.double() - BASIS.fixed_VD.double(), BASIS.fixed_VD.double(), BASIS.exact_DK
    )
    torch.testing.assert_close(inside + paper, table.double(), rtol=0, atol=1e-6)
    other = torch.randn(table.shape, generator=torch.Generator().manual_seed(9))
    theirs, ours = other.clone(), other.clone()
    constraint.after(BASIS.with_tables(paper.float())).keep({EMBEDDING: theirs})
    constraint.after(later).keep({EMBEDDING: ours})
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)
    assert not torch.allclose(ours, other, atol=1e-2)


def test_a_table_that_is_not_finite_makes_no_version():
    table = BASIS.fixed_VD.clone()
    table[1, 2] = torch.nan
    with pytest.raises(ValueError, match="without NaN"):
        drifted(BASIS, 2, table)


def test_a_replica_that_follows_another_version_projects_what_is_written_and_settles_the_rest():
    model, constraint = constrained()
    replica = ConstrainedReplica(model, torch.optim.SGD(model.parameters(), 0.1), None, constraint)
    table = BASIS.fixed_VD + torch.randn(
        BASIS.fixed_VD.shape, generator=torch.Generator().manual_seed(3)
    )
    later = constraint.after(drifted(BASIS, 2, table))
    replica.follow(later)
    assert torch.equal(replica.read([EMBEDDING], "param")[EMBEDDING], BASIS.fixed_VD), (
        "nothing was written yet"
    )
    replica.write({EMBEDDING: table}, "param")
    assert torch.equal(replica.read([EMBEDDING], "param")[EMBEDDING], table)
    replica.follow(constraint)
    replica.settle()
    expected = (
        BASIS.fixed_VD + (table - BASIS.fixed_VD) @ (BASIS.exact_DK @ BASIS.exact_DK.T).float()
    )
    torch.testing.assert_close(
        replica.read([EMBEDDING], "param")[EMBEDDING], expected, rtol=0, atol=1e-5
    )
