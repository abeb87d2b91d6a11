"""Subspace pipelines compared with the constrained dense model: activations, gradients, training, a
change of basis, token ids."""

import dataclasses
import hashlib
import itertools
import re
import struct

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.activation import ActivationContext, CodecOffer, Incompatible, agree
from farflock.compression.activation_catalog import activation_codec, max_bytes, subspace_terms
from farflock.compression.catalog import codec
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.subspace import (
    ROWS,
    Basis,
    Subspace,
    id_bytes,
    outside,
    pack_tokens,
    project,
    settled,
    unpack_tokens,
)

WIDTH, RANK, VOCABULARY, BATCH, LENGTH, LAYERS = 32, 6, 50, 3, 7, 3
NAMES = {"embedding": 1} | {
    f"{layer}.{name}": 0 for layer in range(LAYERS) for name in ("wo", "w2", "b2")
}
SHAPE = (BATCH, LENGTH, WIDTH)


def chance(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=chance(seed))


def weights(seed=0):
    """An unconstrained small transformer: the embedding, a head, and in each layer attention,
    an MLP and its bias."""
    made = {
        "embedding": normal(VOCABULARY, WIDTH, seed=seed),
        "head": normal(VOCABULARY, WIDTH, seed=seed + 1) / 6,
    }
    for layer in range(LAYERS):
        for place, (name, rows, columns) in enumerate(
            [("wqkv", 3 * WIDTH, WIDTH), ("wo", WIDTH, WIDTH), ("w1", 64, WIDTH), ("w2", WIDTH, 64)]
        ):
            made[f"{layer}.{name}"] = (
                normal(rows, columns, seed=seed + 10 * layer + place + 2) / columns**0.5
            )
        made[f"{layer}.b2"] = normal(WIDTH, seed=seed + 10 * layer + 9) / 9
    return made


def normed(x):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def layer_of(theta, layer, x):
    """Pre-norm attention and MLP; only `wo`, `w2` and `b2` write into the stream."""
    q, k, v = (normed(x) @ theta[f"{layer}.wqkv"].T).chunk(3, dim=-1)
    x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True) @ theta[f"{layer}.wo"].T
    hidden = torch.relu(normed(x) @ theta[f"{layer}.w1"].T)
    return x + hidden @ theta[f"{layer}.w2"].T + theta[f"{layer}.b2"]


def loss_of(theta, x, targets):
    return F.cross_entropy(
        (normed(x) @ theta["head"].T).flatten(0, 1), targets.flatten(), reduction="sum"
    )


def batch(seed=0):
    drawn = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH), generator=chance(seed))
    return drawn[0], drawn[1]


def constrained(seed=0, version=1, rank=RANK):
    """Weights in the subspace, and its basis with the frozen embedding."""
    basis, theta = Basis.drawn(WIDTH, rank, seed=seed + 77, version=version), weights(seed)
    theta["embedding"], fixed = settled(
        theta["embedding"], torch.zeros(VOCABULARY, WIDTH), basis.columns_DK
    )
    project(theta, NAMES, basis)
    return theta, basis.with_tables(fixed)


def exact(basis, **more):
    return Subspace(basis, codec("fp32"), codec("fp32"), **more)


def context(tokens, **more):
    return ActivationContext(SHAPE, **{"tokens": tokens, "epoch": 1, **more})


def over(c, x, ctx):
    out = bytearray()
    assert c.encode(x, ctx, out) == len(out) == c.max_bytes(ctx)
    return c.decode(out, ctx)


def back_over(c, grad, ctx):
    out, ctx = bytearray(), dataclasses.replace(ctx, direction="backward")
    assert c.encode_grad(grad, ctx, out) == len(out) == c.max_bytes(ctx)
    return c.decode_grad(out, ctx)


def leaves(theta):
    return {name: value.clone().requires_grad_() for name, value in theta.items()}


def dense(theta, fixed, tokens, targets):
    """The loss and all gradients of the unsplit model."""
    theta = leaves(theta)
    x = theta["embedding"][tokens] + fixed[tokens]
    for layer in range(LAYERS):
        x = layer_of(theta, layer, x)
    loss = loss_of(theta, x, targets)
    loss.backward()
    return loss.item(), {name: value.grad for name, value in theta.items()}


def split(theta, basis, c, tokens, targets):
    """The same with one stage for the embedding, one for each layer and one for the head, and the
    codec between all of them."""
    theta, ctx = leaves(theta), context(tokens)
    arrived, sent = [], [theta["embedding"][tokens] + basis.fixed_VD[tokens]]
    for layer in range(LAYERS):
        arrived.append(over(c, sent[-1], ctx).requires_grad_())
        sent.append(layer_of(theta, layer, arrived[-1]))
    arrived.append(over(c, sent[-1], ctx).requires_grad_())
    loss = loss_of(theta, arrived[-1], targets)
    loss.backward()
    for came, went in zip(reversed(arrived), reversed(sent), strict=True):
        went.backward(back_over(c, came.grad, ctx))
    return loss.item(), {name: value.grad for name, value in theta.items()}


def distance(x, y):
    return float((x - y).double().norm() / y.double().norm())


def test_gradients_of_the_split_model_are_those_of_the_constrained_dense_one():
    """E8: equal up to rounding, with the gradients of everything that writes into the stream
    projected, which is all that training uses of them."""
    theta, basis = constrained()
    tokens, targets = batch()
    loss, expected = dense(theta, basis.fixed_VD, tokens, targets)
    loss_split, found = split(theta, basis, exact(basis), tokens, targets)
    assert loss_split == pytest.approx(loss, rel=1e-5)
    project(expected, NAMES, basis)
    before = {name: value.clone() for name, value in found.items()}
    project(found, NAMES, basis)
    for name, value in expected.items():
        assert distance(found[name], value) < 2e-5, name
        if name == "embedding" or name.endswith(("w2", "b2")):
            assert distance(before[name], value) < 2e-5, (
                f"{name}: what comes straight from an edge lies inside"
            )


def test_without_the_constraint_gradients_would_differ_so_the_test_above_can_fail():
    theta, basis = constrained()
    loose = {**theta, "0.w2": weights()["0.w2"]}
    tokens, targets = batch()
    _, expected = dense(loose, basis.fixed_VD, tokens, targets)
    _, found = split(loose, basis, exact(basis, outside=1.0), tokens, targets)
    assert distance(found["1.w1"], expected["1.w1"]) > 0.05


def test_the_way_from_head_to_tail_changes_activations_by_rounding_only():
    theta, basis = constrained()
    tokens, _ = batch()
    x = through = theta["embedding"][tokens] + basis.fixed_VD[tokens]
    for layer in range(LAYERS):
        x, through = (
            layer_of(theta, layer, x),
            layer_of(theta, layer, over(exact(basis), through, context(tokens))),
        )
        assert distance(through, x) < 1e-5


@pytest.mark.parametrize(
    ("name", "bound"), [("fp32", 1e-6), ("bf16", 2.0**-8), ("fp16", 2.0**-11), ("int8", 0.02)]
)
def test_the_error_is_that_of_the_coordinates_codec(name, bound):
    theta, basis = constrained()
    tokens, _ = batch()
    x = theta["embedding"][tokens] + basis.fixed_VD[tokens]
    back = over(Subspace(basis, codec(name), codec(name)), x, context(tokens))
    assert float((back - x).norm()) <= bound * float(
        theta["embedding"][tokens].norm()
    ) + 1e-6 * float(x.norm())


def test_a_token_takes_rank_numbers_each_way():
    _, basis = constrained()
    ctx = context(batch()[0])
    assert Subspace(basis).max_bytes(ctx) == 12 + 2 * BATCH * LENGTH * RANK
    assert (
        exact(basis).max_bytes(dataclasses.replace(ctx, direction="backward"))
        == 12 + 4 * BATCH * LENGTH * RANK
    )


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_leave_the_subspace_and_projection_after_each_returns_and_is_idempotent(optimizer):
    theta, basis = constrained()
    left, inside = leaves(theta), leaves(theta)
    steps = {
        name: optimizer(one.values(), lr=0.02, weight_decay=0.1)
        for name, one in (("left", left), ("in", inside))
    }
    for step in range(8):
        for name, one in (("left", left), ("in", inside)):
            tokens, targets = batch(step)
            x = one["embedding"][tokens] + basis.fixed_VD[tokens]
            for layer in range(LAYERS):
                x = layer_of(one, layer, x)
            steps[name].zero_grad()
            (loss_of(one, x, targets) / x[..., 0].numel()).backward()
            steps[name].step()
        project(inside, NAMES, basis)
        assert outside(inside, NAMES, basis) < 1e-6
    assert outside(left, NAMES, basis) > 1e-3
    before = {name: value.detach().clone() for name, value in inside.items()}
    project(inside, NAMES, basis)
    assert all(distance(inside[name].detach(), before[name]) < 1e-6 for name in before)


def test_a_forgotten_projection_is_refused_by_the_sender_with_the_remedy():
    theta, basis = constrained()
    theta["0.w2"] = theta["0.w2"] + 0.05 * normal(WIDTH, 64)
    tokens, _ = batch()
    x, out = (
        layer_of(theta, 0, theta["embedding"][tokens] + basis.fixed_VD[tokens]),
        bytearray(b"before"),
    )
    with pytest.raises(
        UnencodableTensor,
        match=r"lies outside the subspace .* version 1: project the weights after every",
    ):
        exact(basis).encode(x, context(tokens), out)
    assert out == b"before"
    project(theta, NAMES, basis)
    over(
        exact(basis),
        layer_of(theta, 0, theta["embedding"][tokens] + basis.fixed_VD[tokens]),
        context(tokens),
    )


def test_bf16_arithmetic_of_a_constrained_stage_is_not_taken_for_a_forgotten_projection():
    theta, basis = constrained()
    tokens, _ = batch()
    low = {name: value.bfloat16() for name, value in theta.items()}
    x = low["embedding"][tokens] + basis.fixed_VD.bfloat16()[tokens]
    for layer in range(LAYERS):
        x = layer_of(low, layer, x)
        back = over(Subspace(basis), x, context(tokens, dtype=torch.bfloat16))
        assert distance(back, x) < 0.03


def test_means_stay_inside_and_quantised_ones_do_not_until_they_are_projected():
    """Invariant (a). It also covers CheckFree's mean of neighbours, which is a mean of matrices in
    the same subspace."""
    (one, basis), (other, _) = constrained(), constrained()
    other["0.w2"] = other["1.w2"]
    mean = {name: 0.3 * one[name] + 0.7 * other[name] for name in one}
    assert outside(mean, NAMES, basis) < 1e-6
    rounded = {}
    for name, value in mean.items():
        out, back = bytearray(), torch.empty(value.numel())
        codec("int8").encode(value.reshape(-1), ActivationContext((0, 0, 0)).flat(), out)
        codec("int8").decode(out, ActivationContext((0, 0, 0)).flat(), back)
        rounded[name] = back.view(value.shape)
    assert outside(rounded, NAMES, basis) > 1e-3
    project(rounded, NAMES, basis)
    assert outside(rounded, NAMES, basis) < 1e-6


def test_swapped_stages_need_no_other_codec():
    """Invariant (d): the basis is the same everywhere."""
    theta, basis = constrained()
    tokens, _ = batch()
    x = theta["embedding"][tokens] + basis.fixed_VD[tokens]
    for layer in (1, 0, 2):
        x = layer_of(theta, layer, x)
        assert distance(over(exact(basis), x, context(tokens)), x) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_projection_is_the_dense_projector_along_either_dimension(dtype):
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    p = (basis.columns_DK @ basis.columns_DK.T).double()
    tensors = {
        "rows": normal(WIDTH, 5),
        "columns": normal(5, WIDTH, seed=1),
        "bias": normal(WIDTH, seed=2),
        "free": normal(3, 3),
    }
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    wanted = {"rows": p @ tensors["rows"].double(), "columns": tensors["columns"].double() @ p}
    wanted |= {"bias": p @ tensors["bias"].double(), "free": tensors["free"].double()}
    project(tensors, {"rows": 0, "columns": 1, "bias": 0}, basis)
    for name, value in wanted.items():
        assert tensors[name].dtype == dtype
        torch.testing.assert_close(
            tensors[name].double(),
            value,
            rtol=0.01 if dtype == torch.bfloat16 else 0,
            atol=2e-3 if dtype == torch.bfloat16 else 2e-6,
        )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"x": 0}, "no tensor 'x'"),
        ({"w": 1}, "not the model's width 32"),
        ({"w": 2}, "dimension 2 of 'w'"),
    ],
)
def test_a_plan_that_does_not_fit_the_model_is_refused_by_name(names, words):
    for call in (project, outside):
        with pytest.raises(ValueError, match=words):
            call({"w": torch.zeros(WIDTH, 3)}, names, Basis.drawn(WIDTH, RANK, seed=3))


def test_settling_keeps_the_sum_and_leaves_nothing_outside():
    """The drift rule of Heterogeneous SparseLoCo, and the first split of an embedding."""
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    inside, fixed = normal(VOCABULARY, WIDTH), normal(VOCABULARY, WIDTH, seed=1)
    settled_inside, settled_fixed = settled(inside, fixed, basis.columns_DK)
    torch.testing.assert_close(settled_inside + settled_fixed, inside + fixed, rtol=0, atol=1e-6)
    assert outside({"e": settled_inside}, {"e": 1}, basis) < 1e-6
    again = settled(settled_inside, settled_fixed, basis.columns_DK)
    torch.testing.assert_close(again[1], settled_fixed, rtol=0, atol=1e-6)


def energy_of(theta, basis, tokens, targets):
    """Σ GᵀG of the gradients at the last boundary, before any projection."""
    x = theta["embedding"][tokens] + basis.fixed_VD[tokens]
    for layer in range(LAYERS):
        x = layer_of(theta, layer, x)
    x = x.detach().requires_grad_()
    loss_of(theta, x, targets).backward()
    flat = x.grad.reshape(-1, WIDTH)
    return flat.T @ flat


def test_the_owner_moves_the_basis_towards_the_energy_and_the_embedding_stays():
    theta, basis = constrained()
    energy = sum(energy_of(theta, basis, *batch(seed)) for seed in range(4))
    captured, inside, start = [], theta["embedding"], basis
    for _ in range(60):
        captured.append(
            float((basis.columns_DK.T @ energy @ basis.columns_DK).trace() / energy.trace())
        )
        basis, inside = basis.moved(energy, 2.0, inside)
    assert all(later > earlier - 1e-6 for earlier, later in itertools.pairwise(captured))
    best = float(torch.linalg.eigvalsh(energy.double())[-RANK:].sum() / energy.trace())
    assert captured[0] < 0.6 * best
    assert captured[-1] > 0.97 * best
    assert basis.version == start.version + 60
    torch.testing.assert_close(
        inside + basis.fixed_VD, theta["embedding"] + start.fixed_VD, rtol=0, atol=1e-4
    )
    assert outside({"e": inside}, {"e": 1}, basis) < 1e-6
    identity = basis.columns_DK.T @ basis.columns_DK
    torch.testing.assert_close(identity, torch.eye(RANK), rtol=0, atol=1e-6)


def test_a_small_step_keeps_the_signs_of_the_columns_and_no_energy_moves_nothing():
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    still, _ = basis.moved(torch.zeros(WIDTH, WIDTH), 1.0, torch.zeros(0, WIDTH))
    torch.testing.assert_close(still.columns_DK, basis.columns_DK, rtol=0, atol=1e-6)
    x = normal(40, WIDTH)
    moved, _ = basis.moved(x.T @ x, 1e-3, torch.zeros(0, WIDTH))
    assert float((moved.columns_DK - basis.columns_DK).abs().amax()) < 1e-2


def moved_run():
    """A run at its change of basis: old and new weights, bases, and the codec that knows both from
    epoch 5 on."""
    theta, basis = constrained()
    new, inside = basis.moved(energy_of(theta, basis, *batch()), 1.0, theta["embedding"])
    after = {name: value.clone() for name, value in theta.items()} | {"embedding": inside}
    project(after, NAMES, new)
    return theta, after, basis, new, exact(basis).followed_by(new, since=5)


def test_at_a_change_the_loss_moves_as_much_as_projecting_the_weights_makes_it():
    theta, after, basis, new, c = moved_run()
    tokens, targets = batch()
    by_hand = {name: value.clone() for name, value in theta.items()}
    project(by_hand, {name: dim for name, dim in NAMES.items() if name != "embedding"}, new)
    expected, _ = dense(by_hand, basis.fixed_VD, tokens, targets)
    x = after["embedding"][tokens] + new.fixed_VD[tokens]
    for layer in range(LAYERS):
        x = layer_of(after, layer, over(c, x, context(tokens, epoch=5)))
    assert loss_of(after, x, targets).item() == pytest.approx(expected, rel=1e-4)


def test_versions_change_at_the_epoch_and_receivers_hold_both_for_two_epochs():
    theta, after, _, new, c = moved_run()
    tokens, _ = batch()
    old = exact(c.old)
    for epoch in range(3, 10):
        spoken, weights_now, basis = (1, theta, c.old) if epoch < 5 else (2, after, new)
        x, out, ctx = (
            weights_now["embedding"][tokens] + basis.fixed_VD[tokens],
            bytearray(),
            context(tokens, epoch=epoch),
        )
        c.encode(x, ctx, out)
        assert struct.unpack_from("<I", out)[0] == spoken
        assert distance(c.decode(out, ctx), x) < 1e-5
        assert [offer.version for offer in c.offers(epoch)] == [[1, 2], [2, 1], [2]][
            (epoch >= 5) + (epoch >= 7)
        ]
        late = bytearray()
        old.encode(theta["embedding"][tokens] + c.old.fixed_VD[tokens], ctx, late)
        if epoch < 7:
            assert c.decode(late, ctx).shape == SHAPE
        else:
            with pytest.raises(
                Incompatible,
                match=r"came with basis 1 .* held in epoch \d are 2 .*: fetch the basis",
            ):
                c.decode(late, ctx)


def test_a_sender_one_step_ahead_is_understood_and_two_agree_by_version():
    _, after, _, new, c = moved_run()
    tokens, _ = batch()
    x, ctx = after["embedding"][tokens] + new.fixed_VD[tokens], context(tokens, epoch=4)
    assert distance(c.decode(payload_of(exact(new), x, ctx), ctx), x) < 1e-5
    assert agree(exact(new).offers(4)[:1], c.offers(4)).version == 2
    with pytest.raises(Incompatible, match=r"is at version 2 here and \[1\] there"):
        agree(exact(new).offers(4)[:1], exact(c.old).offers(4))


def payload_of(c, x, ctx):
    out = bytearray()
    c.encode(x, ctx, out)
    return out


def test_another_basis_of_the_same_version_or_with_another_embedding_is_never_decoded():
    theta, basis = constrained()
    tokens, _ = batch()
    ctx = context(tokens)
    payload = payload_of(exact(basis), theta["embedding"][tokens] + basis.fixed_VD[tokens], ctx)
    grad = bytearray()
    exact(basis).encode_grad(normal(*SHAPE), dataclasses.replace(ctx, direction="backward"), grad)
    for other in (
        Basis.drawn(WIDTH, RANK, seed=9).with_tables(basis.fixed_VD),
        basis.with_tables(basis.fixed_VD + 1e-3),
    ):
        with pytest.raises(Incompatible, match="came with basis 1"):
            exact(other).decode(payload, ctx)
        with pytest.raises(Incompatible, match="came with basis 1"):
            exact(other).decode_grad(grad, dataclasses.replace(ctx, direction="backward"))
        with pytest.raises(Incompatible, match="has digest"):
            agree(exact(basis).offers(1), exact(other).offers(1))


def test_a_basis_is_followed_by_its_successor_of_the_same_size_and_not_too_soon():
    _, basis = constrained()
    new, _ = basis.moved(torch.eye(WIDTH), 1.0, torch.zeros(VOCABULARY, WIDTH))
    assert exact(basis).followed_by(new, 2).version == 2
    for other, since in ((basis, 9), (new, 1)):
        with pytest.raises(ValueError, match="can be followed by version 2 from epoch 2 on"):
            exact(basis).followed_by(other, since)
    with pytest.raises(ValueError, match="same width and rank"):
        exact(basis).followed_by(Basis.drawn(WIDTH, RANK + 1, seed=1, version=2), 9)


def test_positions_that_are_frozen_are_left_out_too():
    basis = Basis.drawn(WIDTH, RANK, seed=3).with_tables(
        torch.zeros(0, WIDTH), normal(LENGTH + 2, WIDTH)
    )
    x = normal(BATCH, LENGTH, RANK) @ basis.columns_DK.T + basis.fixed_LD[:LENGTH]
    assert distance(over(exact(basis), x, ActivationContext(SHAPE)), x) < 1e-6
    with pytest.raises(ValueError, match="knows 9 positions, the microbatch has 10"):
        exact(basis).encode(
            torch.zeros(1, 10, WIDTH), ActivationContext((1, 10, WIDTH)), bytearray()
        )


def test_without_ids_or_with_one_that_is_unknown_nothing_is_sent():
    _, basis = constrained()
    with pytest.raises(ValueError, match="needs the token ids"):
        exact(basis).encode(torch.zeros(SHAPE), ActivationContext(SHAPE), bytearray())
    with pytest.raises(ValueError, match="the vocabulary has 50"):
        exact(basis).encode(
            torch.zeros(SHAPE), context(torch.full((BATCH, LENGTH), VOCABULARY)), bytearray()
        )


def test_another_width_is_refused():
    _, basis = constrained()
    with pytest.raises(ValueError, match="is for a width of 32, the activation has 8"):
        exact(basis).decode(b"", ActivationContext((1, 1, 8)))


def test_coordinates_that_no_sender_writes_are_refused():
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    stamp = struct.pack("<I8s", 1, basis.digest[:8])
    with pytest.raises(CorruptPayload, match=r"above 2\^61"):
        exact(basis).decode(
            stamp + struct.pack("<6f", *[3e38] * 6), ActivationContext((1, 1, WIDTH))
        )


def test_a_basis_travels_as_bytes_and_only_with_its_digest():
    _, basis = constrained()
    raw = basis.to_bytes()
    same = Basis.from_bytes(raw, basis.digest)
    assert same.digest == basis.digest
    assert torch.equal(same.columns_DK, basis.columns_DK)
    assert torch.equal(same.fixed_VD, basis.fixed_VD)
    assert struct.unpack_from("<IIIII", raw) == (1, WIDTH, RANK, VOCABULARY, 0)
    for wrong in (b"", raw[:-1], raw[:-1] + bytes([raw[-1] ^ 1])):
        with pytest.raises(CorruptPayload, match="was asked for and another came"):
            Basis.from_bytes(wrong, basis.digest)


@given(
    st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), min_size=5, max_size=5),
    st.binary(max_size=64),
)
def test_bytes_that_are_no_basis_are_refused_even_if_their_digest_is_announced(numbers, rest):
    for payload in (struct.pack("<IIIII", *numbers) + rest, rest):
        with pytest.raises(CorruptPayload):
            Basis.from_bytes(payload, hashlib.sha256(payload).digest())


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (torch.eye(4)[:, :2] * 1.001, "orthonormal to"),
        (torch.zeros(2, 4), "is not allowed"),
        (torch.full((4, 2), float("nan")), "without NaN"),
        (torch.eye(4).double(), "float32"),
    ],
)
def test_what_is_no_basis_is_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        Basis(1, columns, torch.empty(0, columns.shape[0]), torch.empty(0, columns.shape[0]))


def test_tables_of_another_width_are_refused():
    with pytest.raises(ValueError, match="rows of 32 values"):
        Basis.drawn(WIDTH, RANK, seed=1).with_tables(torch.zeros(5, 31))


@pytest.mark.parametrize(
    "vocabulary", [2, 256, 257, 65_536, 1 << 17, (1 << 17) + 1, 1 << 24, 1 << 31]
)
def test_integer_ids_survive_exactly(vocabulary):
    """E15: they survive even where a bf16 or fp16 channel would round them."""
    ids = torch.tensor(
        [0, 1, 255, 257, 2047, 2049, 65_535, 131_071, 131_072, vocabulary - 1]
    ).clamp(max=vocabulary - 1)
    ids = ids.view(2, 5)
    packed = pack_tokens(ids, vocabulary)
    assert len(packed) == 10 * id_bytes(vocabulary)
    assert torch.equal(unpack_tokens(packed, 2, 5, vocabulary), ids)


def test_every_id_up_to_2_to_the_17_survives_and_reaches_its_row():
    ids = torch.arange(1 << 17).view(2, -1)
    back = unpack_tokens(pack_tokens(ids, 1 << 17), 2, 1 << 16, 1 << 17)
    assert torch.equal(back, ids)
    assert not torch.equal(ids.to(torch.bfloat16).long(), ids), (
        "a float channel would have lost them"
    )
    table = torch.zeros(1 << 17, 2)
    table[:, 1] = torch.arange(1 << 17)
    basis = Basis.drawn(2, 1, seed=1).with_tables(table)
    x = table[back[:, -9:]]
    ctx = ActivationContext((2, 9, 2), tokens=back[:, -9:])
    assert torch.equal(over(exact(basis), x, ctx), x)


@pytest.mark.parametrize(
    ("vocabulary", "width"),
    [(1, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3), (1 << 24, 3), (1 << 32, 4)],
)
def test_ids_take_as_few_bytes_as_the_vocabulary_needs(vocabulary, width):
    assert id_bytes(vocabulary) == width


def test_ids_that_are_floats_or_unknown_are_refused_on_both_sides():
    with pytest.raises(UnencodableTensor, match="which holds few of them exactly"):
        pack_tokens(torch.zeros(1, 2), 9)
    with pytest.raises(UnencodableTensor, match="the vocabulary has 9"):
        pack_tokens(torch.tensor([[0, 9]]), 9)
    with pytest.raises(CorruptPayload, match="the vocabulary has 9"):
        unpack_tokens(b"\x00\x09", 1, 2, 9)
    for wrong in (b"\0", b"\0\0\0", b""):
        with pytest.raises(CorruptPayload, match="needs 2 bytes"):
            unpack_tokens(wrong, 1, 2, 9)
    with pytest.raises(ValueError, match="smaller microbatches"):
        unpack_tokens(b"", 1 << 20, 1 << 20, 9)
    with pytest.raises(ValueError, match="is not allowed"):
        id_bytes(0)


@given(st.integers(0, 3), st.integers(0, 5), st.integers(1, 1 << 32), st.binary(max_size=40))
def test_any_bytes_are_ids_of_the_vocabulary_or_refused(count, length, vocabulary, payload):
    try:
        ids = unpack_tokens(payload, count, length, vocabulary)
    except CorruptPayload:
        return
    assert ids.shape == (count, length)
    assert pack_tokens(ids, vocabulary) == payload


def test_offers_name_version_and_digest():
    _, basis = constrained()
    assert Subspace(basis).offers(0) == (CodecOffer("subspace:6+bf16,bf16", 1, basis.digest),)


# coordinates as they are, and names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_coordinates_as_they_are_lose_nothing_but_the_stages_own_rounding(dtype):
    basis, ctx = Basis.drawn(WIDTH, RANK, seed=3), context(None, dtype=dtype)
    bare = Subspace(basis, None, None)
    assert bare.name == f"subspace:{RANK}+raw,raw"
    assert bare.max_bytes(ctx) == 12 + BATCH * LENGTH * RANK * dtype.itemsize
    inside = (normal(BATCH, LENGTH, RANK).double() @ basis.exact_DK.T).to(dtype)
    eps = torch.finfo(dtype).eps
    for there in (over(bare, inside, ctx), back_over(bare, inside, ctx)):
        assert there.dtype == dtype
        torch.testing.assert_close(there, inside, rtol=0, atol=8 * eps * float(inside.abs().amax()))


@given(st.binary(max_size=200), st.booleans(), st.booleans())
def test_any_bytes_are_coordinates_as_they_are_or_refused(payload, stamped, filled):
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    bare, ctx = Subspace(basis, None, None), ActivationContext((1, 3, WIDTH))
    if stamped:
        payload = struct.pack("<I8s", 1, basis.digest[:8]) + payload
    if filled:
        payload = payload.ljust(bare.max_bytes(ctx), b"\x7f")
    try:
        found = bare.decode(payload, ctx)
    except (CorruptPayload, Incompatible):
        return
    assert found.shape == ctx.shape
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**62])
def test_coordinates_that_are_no_numbers_are_refused(value):
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    coordinates = torch.zeros(3 * RANK)
    coordinates[5] = value
    payload = struct.pack("<I8s", 1, basis.digest[:8]) + coordinates.numpy().tobytes()
    with pytest.raises(CorruptPayload, match="a coordinate of"):
        Subspace(basis, None, None).decode(payload, ActivationContext((1, 3, WIDTH)))


@given(
    st.text(max_size=40)
    | st.from_regex(r"subspace:[0-9]{0,6}(\+[a-z0-9:/]{0,8})?(,[a-z0-9:/]{0,8})?", fullmatch=True)
)
def test_any_name_says_its_size_or_is_refused_as_the_codec_itself_would_be(spec):
    ctx = ActivationContext((2, 3, WIDTH))
    try:
        terms = subspace_terms(spec)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            activation_codec(spec, basis=Basis.drawn(WIDTH, RANK, seed=3))
        return
    if terms is not None and terms.rank <= WIDTH:
        built = activation_codec(spec, basis=Basis.drawn(WIDTH, terms.rank, seed=3))
        assert built.scope == "shared_params"
        for direction in ("forward", "backward"):
            there = dataclasses.replace(ctx, direction=direction)
            assert max_bytes(spec, there) == built.max_bytes(there) == terms.max_bytes(there)


def test_of_other_codecs_the_size_is_theirs():
    ctx = ActivationContext((2, 3, WIDTH))
    for name in ("raw", "int8", "topk:3/10", "hadamard4"):
        assert subspace_terms(name) is None
        assert max_bytes(name, ctx) == activation_codec(name).max_bytes(ctx)


def test_a_tensor_around_a_frozen_one_keeps_that():
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    frozen, table = normal(9, WIDTH), normal(9, WIDTH, seed=1)
    expected = frozen.double() + (table - frozen).double() @ basis.exact_DK @ basis.exact_DK.T
    tensors = {"e": table.clone()}
    assert outside(tensors, {"e": 1}, basis, {"e": frozen}) > 0.1
    project(tensors, {"e": 1}, basis, {"e": frozen})
    torch.testing.assert_close(tensors["e"].double(), expected, rtol=0, atol=1e-6)
    assert outside(tensors, {"e": 1}, basis, {"e": frozen}) < 1e-6


def test_of_a_tall_tensor_each_part_of_its_rows_is_projected_by_itself():
    basis = Basis.drawn(WIDTH, RANK, seed=3)
    tall, frozen = normal(ROWS + 5, WIDTH), normal(ROWS + 5, WIDTH, seed=1)
    whole, parts = {"e": tall.clone()}, ({"e": tall[:ROWS].clone()}, {"e": tall[ROWS:].clone()})
    project(whole, {"e": 1}, basis, {"e": frozen})
    for part, around in zip(parts, (frozen[:ROWS], frozen[ROWS:]), strict=True):
        project(part, {"e": 1}, basis, {"e": around})
    assert torch.equal(whole["e"], torch.cat([part["e"] for part in parts]))
