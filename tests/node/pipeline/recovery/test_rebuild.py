"""Rebuild a lost stage: the mean's formula, its guards and exact copies; no other stage loses."""

import itertools
import math

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.node.model.llama import PRESETS, build
from farflock.node.model.replica import PlainReplica
from farflock.node.model.stage_tensors import joined, names_of
from farflock.node.pipeline.passes.stage import Stage
from farflock.node.pipeline.recovery.rebuild import (
    LR_BUMP,
    EndCopy,
    GradientScale,
    Neighbour,
    Unrecoverable,
    bumped_rate,
    end_tensors,
    moved,
    neighbour_mean,
    partner_copy,
)
from farflock.node.run.split import split
from farflock.node.state import checkpoint
from farflock.optimizers.parts.inner import InnerConfig
from farflock.optimizers.parts.state import state_hash
from farflock.swarm.paths.checkfree import SwappedPaths
from farflock.swarm.paths.policy import Microbatch, fixed

CONFIG = msgspec.structs.replace(PRESETS["tiny"], layers=6, tied=False, vocab_size=50)
SPANS = split(CONFIG, [2, 2, 2])
LOST = SPANS[1]
omegas = st.floats(0, 1e300)


def tensors_of(span, seed=0):
    """A trained stage's stand-in: every tensor with numbers of its own, norms too."""
    model, chance = build(CONFIG, seed, span), torch.Generator().manual_seed(seed + 97)
    return {
        name: x.detach() + torch.randn(x.shape, generator=chance)
        for name, x in model.named_parameters()
    }


def neighbours(before=1.0, after=1.0):
    return Neighbour(SPANS[0], tensors_of(SPANS[0], 1), before), Neighbour(
        SPANS[2], tensors_of(SPANS[2], 2), after
    )


def pairs(mean, before, after):
    """Each made tensor, with those of the neighbours that have its place."""
    for name, made in mean.items():
        number, rest = name.removeprefix("model.layers.").split(".", 1)
        yield (
            made,
            before.tensors[f"model.layers.{int(number) - 2}.{rest}"],
            after.tensors[f"model.layers.{int(number) + 2}.{rest}"],
        )


def same(one, other):
    return one.keys() == other.keys() and state_hash(one) == state_hash(other)


def test_the_mean_is_the_papers_formula_layer_by_layer():
    before, after = neighbours(3.0, 1.0)
    mean = neighbour_mean(CONFIG, LOST, before, after)
    assert mean.keys() == names_of(CONFIG, LOST)
    for made, one, other in pairs(mean, before, after):
        exactly = (3.0 * one.double() + 1.0 * other.double()) / 4.0
        assert torch.equal(made, exactly.float())
    build(CONFIG, 0, LOST).load_state_dict(mean)


@pytest.mark.parametrize("omega", [0.0, 5e-324, 1e-12, 1.0, 1e300])
def test_equal_weights_give_the_arithmetic_mean_and_so_do_two_stages_that_never_trained(omega):
    """Invariants 1 and 2 of specs 3.5."""
    before, after = neighbours(omega, omega)
    for made, one, other in pairs(neighbour_mean(CONFIG, LOST, before, after), before, after):
        assert torch.equal(made, ((one.double() + other.double()) / 2).float())


@pytest.mark.parametrize(("omega", "whose"), [((0.0, 2.0), 2), ((2.0, 0.0), 1)])
def test_a_weight_of_nothing_gives_a_copy_of_the_other_neighbour(omega, whose):
    before, after = neighbours(*omega)
    made = neighbour_mean(CONFIG, LOST, before, after)
    for entry in pairs(made, before, after):
        assert torch.equal(entry[0], entry[whose])
    next(iter(made.values())).zero_()  # a copy, not the neighbour's own
    assert all(bool(x.any()) for beside in (before, after) for x in beside.tensors.values())


@given(before=omegas, after=omegas, double=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_value_is_outside_the_interval_of_the_two(before, after, double):
    here, there = neighbours(before, after)
    if double:
        here, there = (
            Neighbour(n.span, {name: x.double() for name, x in n.tensors.items()}, n.omega)
            for n in (here, there)
        )
    for made, one, other in pairs(neighbour_mean(CONFIG, LOST, here, there), here, there):
        assert made.dtype == one.dtype
        assert bool((torch.minimum(one, other) <= made).all())
        assert bool((made <= torch.maximum(one, other)).all())


@given(
    before=st.floats(1e-6, 1e6),
    after=st.floats(1e-6, 1e6),
    factor=st.floats(1e-9, 1e9),
    power=st.integers(-60, 60),
)
@settings(max_examples=25, deadline=None)
def test_weights_of_another_scale_change_nothing(before, after, factor, power):
    """Bit for bit where scaling itself is exact; else as exactly as the products are."""
    usual = neighbour_mean(CONFIG, LOST, *neighbours(before, after))
    assert same(
        usual, neighbour_mean(CONFIG, LOST, *neighbours(before * 2.0**power, after * 2.0**power))
    )
    scaled = neighbour_mean(CONFIG, LOST, *neighbours(before * factor, after * factor))
    for name, x in usual.items():
        torch.testing.assert_close(scaled[name], x, rtol=1e-6, atol=1e-6)


def test_stages_that_write_into_one_subspace_have_a_mean_that_does():
    """Rule 5 of specs 10.3: what all columns lie in is kept."""
    basis = torch.linalg.qr(
        torch.randn(CONFIG.dim, 5, generator=torch.Generator().manual_seed(3)).double()
    )[0]
    before, after = neighbours(1.0, 2.5)
    inside = []
    for beside in (before, after):
        tensors = {name: x.double() for name, x in beside.tensors.items()}
        tensors |= {
            name: basis @ (basis.T @ x)
            for name, x in tensors.items()
            if name.endswith("o_proj.weight")
        }
        inside.append(Neighbour(beside.span, tensors, beside.omega))
    for name, made in neighbour_mean(CONFIG, LOST, *inside).items():
        if name.endswith("o_proj.weight"):
            torch.testing.assert_close(basis @ (basis.T @ made), made, rtol=0, atol=1e-12)


def test_making_a_stage_changes_nothing_of_another_stage():
    """Invariant 6, bit for bit, for the mean and the copy."""
    before, after = neighbours(3.0, 1.0)
    hashes = [state_hash(dict(beside.tensors)) for beside in (before, after)]
    made = neighbour_mean(CONFIG, LOST, before, after)
    made |= partner_copy(CONFIG, LOST, after)
    for x in made.values():
        x.fill_(7.0)
    assert hashes == [state_hash(dict(beside.tensors)) for beside in (before, after)]


@pytest.mark.parametrize("lost", [SPANS[0], SPANS[2], range(6)])
def test_an_end_stage_has_no_mean(lost):
    with pytest.raises(
        Unrecoverable, match=r"^neighbour mean of an end stage: layers .* copy its layers if"
    ):
        neighbour_mean(CONFIG, lost, *neighbours())


@pytest.mark.parametrize("gone", [0, 1])
def test_a_lost_neighbour_is_refused(gone):
    beside = list(neighbours())
    beside[gone] = None
    with pytest.raises(
        Unrecoverable, match=r"^neighbour mean next to a lost stage: layers 2 to 3 .*roll back"
    ):
        neighbour_mean(CONFIG, LOST, *beside)


def test_stages_of_unequally_many_layers_are_refused():
    first, lost, last = split(CONFIG, [2, 3, 1])
    beside = Neighbour(first, tensors_of(first)), Neighbour(last, tensors_of(last))
    with pytest.raises(
        Unrecoverable,
        match=r"^neighbour mean of unequal stages: 2 layers \(0 to 1\) for 3 \(2 to 4\)",
    ):
        neighbour_mean(CONFIG, lost, *beside)


UP = "model.layers.5.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (None, f"{UP} is missing"),
        (torch.zeros(3, 3), r"unequal stages: .* has shape \(3, 3\), the lost one \(48, 24\)"),
        (torch.zeros(48, 24, dtype=torch.int64), "values that are not finite numbers"),
        (torch.full((48, 24), math.nan), "values that are not finite numbers"),
        (
            torch.zeros(48, 24, dtype=torch.float64),
            r"unequal stages: .*torch\.float32 at one and torch\.float64",
        ),
    ],
)
def test_what_a_neighbour_gives_is_looked_at(broken, reason):
    before, after = neighbours()
    tensors = {name: x for name, x in after.tensors.items() if name != UP} | (
        {} if broken is None else {UP: broken}
    )
    with pytest.raises(Unrecoverable, match=reason):
        neighbour_mean(CONFIG, LOST, before, Neighbour(after.span, tensors, 1.0))


@pytest.mark.parametrize("omega", [-1.0, math.nan, math.inf])
def test_a_weight_that_is_no_squared_norm_is_refused(omega):
    with pytest.raises(Unrecoverable, match="is not a squared norm"):
        neighbour_mean(CONFIG, LOST, *neighbours(1.0, omega))


def test_gradient_scales_are_of_layers_alone_and_the_first_counts_whole():
    ones = {UP: torch.ones(48, 24), "model.embed_tokens.weight": torch.full((50, 24), 1e9)}
    first = GradientScale().after(ones)
    assert first.squared == 48 * 24
    second = first.after({UP: torch.full((48, 24), 2.0)})
    assert second.squared == pytest.approx(48 * 24 * (0.9 + 0.1 * 4), rel=1e-15)
    assert second.omega(1) == pytest.approx(math.sqrt(second.squared))
    assert second.omega() == second.squared
    assert second.after({UP: torch.full((48, 24), math.nan)}) == second
    assert GradientScale().omega() == GradientScale().after({}).omega(1) == 0


def test_a_partner_is_copied_under_the_lost_stages_names():
    partner = Neighbour(SPANS[2], tensors_of(SPANS[2], 2))
    made = partner_copy(CONFIG, LOST, partner)
    assert made.keys() == names_of(CONFIG, LOST)
    assert same(
        moved(CONFIG, LOST, SPANS[2], made), moved(CONFIG, SPANS[2], SPANS[2], partner.tensors)
    )


@pytest.mark.parametrize(("lost", "beside"), [(SPANS[0], SPANS[1]), (SPANS[2], SPANS[1])])
def test_an_end_stage_is_its_neighbours_layers_and_its_own_ends_bit_for_bit(tmp_path, lost, beside):
    """Invariant 4, through a file: the embedding, or the norm and head, as after the last step."""
    own = tensors_of(lost, 5)
    kept = EndCopy.of(7, own)
    folder = checkpoint.save(tmp_path, 7, {"ends": kept.tensors}, {})
    # one step later
    own["model.embed_tokens.weight" if lost.start == 0 else "lm_head.weight"].add_(1.0)
    back = EndCopy(7, kept.digest, checkpoint.load(folder).groups["ends"]).restored()
    made = partner_copy(CONFIG, lost, Neighbour(beside, tensors_of(beside, 3)), back)
    assert made.keys() == names_of(CONFIG, lost)
    assert same(end_tensors(made), end_tensors(tensors_of(lost, 5)))
    build(CONFIG, 0, lost).load_state_dict(made)


def test_stages_between_the_ends_have_nothing_to_keep():
    assert end_tensors(tensors_of(LOST)) == {}
    assert end_tensors(tensors_of(SPANS[0])).keys() == {"model.embed_tokens.weight"}
    assert end_tensors(tensors_of(SPANS[2])).keys() == {"model.norm.weight", "lm_head.weight"}


def test_an_end_that_is_not_what_its_hash_says_is_refused():
    kept = EndCopy.of(7, tensors_of(SPANS[0]))
    altered = {name: x + 1 for name, x in kept.tensors.items()}
    with pytest.raises(Unrecoverable, match="copy of round 7 does not match its hash"):
        EndCopy(7, kept.digest, altered).restored()


@pytest.mark.parametrize("ends", [None, {"lm_head.weight": torch.zeros(50, 24)}])
def test_an_end_without_its_exact_copy_is_refused(ends):
    with pytest.raises(Unrecoverable, match=r"model\.(norm|embed_tokens)\.weight is missing"):
        partner_copy(
            CONFIG, SPANS[2] if ends else SPANS[0], Neighbour(LOST, tensors_of(LOST)), ends
        )


def test_the_rate_is_bumped_at_first_and_bumps_do_not_multiply():
    """Invariant 3."""
    assert bumped_rate(0.5, 0) == bumped_rate(0.5, 0, decay_steps=10) == 0.5 * LR_BUMP
    assert bumped_rate(0.5, 10**6) == 0.5 * 1.1
    assert bumped_rate(0.5, 10, decay_steps=10) == pytest.approx(0.5 * (1 + 0.1 / math.e))
    assert bumped_rate(0.5, 10**6, decay_steps=10) == 0.5
    rates = [bumped_rate(1.0, since, 1.2, 5.0) for since in range(9)]
    assert all(one > other > 1 for one, other in itertools.pairwise(rates))


@pytest.mark.parametrize("wrong", [{"bump": 0.0}, {"decay_steps": 0.0}, {"steps_since": -1}])
def test_a_bump_that_trains_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=r"usually 1\.1 and infinity"):
        bumped_rate(1.0, **{"steps_since": 0, **wrong})


def test_a_replica_of_a_made_stage_has_zero_moments_and_counts_steps_from_zero():
    """Invariant 3: its first step is a new optimizer's, with the bias correction of step 1."""
    made = neighbour_mean(CONFIG, LOST, *neighbours(2.0, 1.0))
    model = build(CONFIG, 0, LOST)
    model.load_state_dict(made)
    inner = InnerConfig(lr=1e-2, weight_decay=0.0)
    replica = PlainReplica(model, inner.build(model), clip_norm=None)
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        assert not any(bool(x.any()) for x in replica.read(replica.names, moment).values())
    replica.write({name: torch.ones(shape) for name, shape in replica.shapes.items()}, "grad")
    replica.inner_step(bumped_rate(1e-2, 0))
    for name, x in replica.read(replica.names, "param").items():
        # Adam's first step is the rate itself
        torch.testing.assert_close(x, made[name] - 1.1e-2, rtol=0, atol=1e-6)


def walked(stages, order, x, targets):
    """Forward and backward pass in this order of stages; by stage, what its weights are to have."""
    inputs = []
    for stage in order:
        inputs.append(x)
        x = stages[stage].forward(x)
    asked, gradient = {}, targets
    for stage, inside in zip(reversed(order), reversed(inputs), strict=True):
        done = stages[stage].backward(inside, gradient)
        asked[stage], gradient = done.staged.gradients, done.input_gradient
    return asked


def test_a_swapped_microbatchs_gradient_is_that_of_the_reordered_model():
    """Invariant 5, in float64, with pairs of one and of two layers."""
    config = msgspec.structs.replace(CONFIG, layers=8)
    sizes = [1, 2, 2, 1, 1, 1]
    spans, policy = split(config, sizes), SwappedPaths(fixed(6), sizes)
    stages = [Stage(build(config, 4, span).double()) for span in spans]
    order = policy.stage_order(Microbatch(0, 1, 0))
    assert order == (0, 2, 1, 4, 3, 5)
    tokens = torch.randint(
        0, config.vocab_size, (3, 10), generator=torch.Generator().manual_seed(0)
    )
    x, targets = tokens[:, :-1], tokens[:, 1:]
    asked = walked(stages, order, x, targets)

    whole = joined(dict(stage.model.named_parameters()) for stage in stages)
    layers = [layer for stage in order for layer in spans[stage]]
    reordered = build(config, 0).double()
    placed = {name: w for name, w in whole.items() if ".layers." not in name}
    for place, layer in enumerate(layers):
        inside = f"model.layers.{layer}."
        placed |= {
            f"model.layers.{place}.{name.removeprefix(inside)}": w
            for name, w in whole.items()
            if name.startswith(inside)
        }
    reordered.load_state_dict(placed)
    expected = Stage(reordered).backward(x, targets).staged.gradients
    for name, gradient in joined(asked.values()).items():
        if ".layers." in name:
            _, _, layer, rest = name.split(".", 3)
            name = f"model.layers.{layers.index(int(layer))}.{rest}"
        torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-14)
    usual = walked(stages, range(6), x, targets)
    assert not torch.allclose(
        usual[1]["model.layers.1.mlp.up_proj.weight"], asked[1]["model.layers.1.mlp.up_proj.weight"]
    )
