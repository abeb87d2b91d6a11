"""Adapters compute what LoRA's formula says, and nothing of the weights beside them is trained."""

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from farflock.node.model import loss
from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.generate import GREEDY, generate
from farflock.node.model.kv_cache import KeyValueCache
from farflock.node.model.llama import PRESETS, ModelConfig, build
from farflock.node.model.lora import (
    ADAPTER_TARGETS,
    MAX_ADAPTER_RANK,
    LoraTerms,
    adapted_layers,
    adapter_shapes,
    add_adapters,
    merge_adapters,
    merged_weights,
)
from farflock.node.model.replica import PlainReplica
from farflock.node.model.stage_tensors import shapes_of
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.optimizers.parts.inner import InnerConfig

TINY = PRESETS["tiny"]
UNTIED = msgspec.structs.replace(TINY, tied=False)
EXPERTS = msgspec.structs.replace(TINY, experts=3, experts_per_token=2, balance=0.01)
USUAL_TERMS = LoraTerms(r=4, alpha=8)
ALL_TERMS = LoraTerms(r=3, alpha=4.5, targets=ADAPTER_TARGETS)
KINDS = [(TINY, ALL_TERMS), (UNTIED, USUAL_TERMS), (EXPERTS, USUAL_TERMS)]


def batch(config=TINY):
    """Tokens and targets of 2 sequences of 24."""
    chance = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (2, 2, 24), generator=chance)


def adapted(config=TINY, terms=ALL_TERMS, *, trained=True):
    """A model with adapters, which are as new or have values as of training."""
    model = build(config, 1)
    add_adapters(model, terms, 7)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in adapted_layers(model) if trained else ():
            layer.lora_B.weight.normal_(0, 0.1, generator=chance)
    return model


def adapters_of(model):
    return {name: x for name, x in model.named_parameters() if x.requires_grad}


def gradients(model, found):
    found.backward()
    grads = {name: x.grad for name, x in adapters_of(model).items()}
    model.zero_grad()
    return found.detach(), grads


@pytest.mark.parametrize(("config", "terms"), KINDS)
def test_a_model_with_new_adapters_computes_what_it_did_before(config, terms, elsewhere):
    ours = build(config, 1).to(elsewhere)
    x, y = batch(config).to(elsewhere)
    logits, before = ours(x), ours(x, y)
    add_adapters(ours, terms, 7)
    assert all(weight.device == x.device for weight in ours.parameters())
    assert torch.equal(ours(x), logits)
    assert torch.equal(ours(x, y), before)


@pytest.mark.parametrize(("config", "terms"), KINDS)
def test_only_adapters_are_trained_and_names_of_weights_stay(config, terms):
    model = adapted(config, terms)
    replica = PlainReplica(model, InnerConfig().build(model))
    shapes = adapter_shapes(config, terms)
    assert list(replica.shapes.items()) == list(shapes.items())  # in this order too
    assert replica.names == tuple(shapes)
    every = {name: tuple(x.shape) for name, x in model.named_parameters()}
    assert every == shapes_of(config, range(config.layers)) | shapes
    assert every.keys() == model.state_dict().keys()
    assert {x.dtype for x in model.parameters()} == {torch.float32}


def test_shapes_are_those_of_the_layers():
    shapes = adapter_shapes(TINY, LoraTerms(r=2, alpha=1, targets=("down_proj", "k_proj")))
    assert list(shapes.items())[:4] == [
        ("model.layers.0.self_attn.k_proj.lora_A.weight", (2, 24)),
        ("model.layers.0.self_attn.k_proj.lora_B.weight", (12, 2)),
        ("model.layers.0.mlp.down_proj.lora_A.weight", (2, 48)),
        ("model.layers.0.mlp.down_proj.lora_B.weight", (24, 2)),
    ]
    assert len(shapes) == 2 * 2 * TINY.layers
    shapes.clear()
    assert adapter_shapes(TINY, USUAL_TERMS)


def test_first_values_are_pefts_and_depend_on_seed_and_name_alone():
    before = torch.get_rng_state()
    wide = ModelConfig(dim=64, layers=2, heads=2, kv_heads=1, ffn_dim=256, context=8)
    one, two, other = (build(wide, 1) for _ in range(3))
    add_adapters(one, LoraTerms(r=32, alpha=1, targets=("q_proj", "down_proj")), 7)
    add_adapters(two, LoraTerms(r=32, alpha=9, targets=("down_proj",)), 7)
    add_adapters(other, LoraTerms(r=32, alpha=9, targets=("down_proj",)), 8)
    assert torch.equal(torch.get_rng_state(), before)
    first, second, third = (adapters_of(model) for model in (one, two, other))
    for name, x in first.items():
        bound = x.shape[1] ** -0.5
        if name.endswith("lora_B.weight"):
            assert not x.any()
        else:
            assert 0.97 * bound < float(x.detach().abs().max()) <= bound
            assert abs(float(x.detach().std()) / bound - 3**-0.5) < 0.02  # of a uniform draw
    for name, x in second.items():
        assert torch.equal(x, first[name])
        assert name.endswith("B.weight") or not torch.equal(x, third[name])
    drawn = [x.flatten()[:8].tolist() for name, x in first.items() if "lora_A" in name]
    assert len({tuple(values) for values in drawn}) == 2 * wide.layers


def whole(model, config, terms):
    """The slow twin: a plain model whose weights are computed from the adapters."""
    plain = build(config, 1).double()
    adapters = {name: x.detach().clone().requires_grad_() for name, x in adapters_of(model).items()}
    weights = dict(plain.named_parameters())
    for name in weights:
        path = name.removesuffix(".weight")
        if path + ".lora_A.weight" in adapters:
            a, b = (adapters[f"{path}.lora_{which}.weight"] for which in "AB")
            weights[name] = weights[name] + b @ a * (terms.alpha / terms.r)
    return plain, weights, adapters


@pytest.mark.parametrize("at_once", [None, 256 * 10], ids=["whole", "chunks"])
@pytest.mark.parametrize(("config", "terms"), KINDS)
def test_loss_and_gradients_are_those_of_weights_with_the_product_added(config, terms, at_once):
    model, (x, y) = adapted(config, terms).double(), batch(config)
    plain, weights, adapters = whole(model, config, terms)
    for one in (model, plain):
        one.logits_at_once = at_once
    ours, grads = gradients(model, model(x, y))
    theirs = functional_call(plain, weights, (x, y))
    theirs.backward()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-10, atol=1e-10)
    assert grads.keys() == adapters.keys()
    for name, grad in grads.items():
        assert float(grad.norm()) > 0
        torch.testing.assert_close(grad, adapters[name].grad, rtol=1e-8, atol=1e-12, msg=name)


class Largest(TorchDispatchMode):
    """Notes how many values the largest tensor has that an operator makes."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.values = max(self.values, made.numel())
        return made


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("at_once", [None, 4096 * 5], ids=["whole", "chunks"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_backward_pass_makes_nothing_of_a_frozen_weights_size(tied, at_once, checkpointing):
    wide = msgspec.structs.replace(TINY, vocab_size=4096, dim=64, ffn_dim=512, tied=tied)
    model = build(wide, 1)
    add_adapters(model, ALL_TERMS, 7)
    model.logits_at_once, model.checkpointing = at_once, checkpointing
    x, y = batch(wide)[:, :1, :12]
    with Largest() as made:
        model(x, y).backward()
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())
    logits = wide.vocab_size * (5 if at_once else y.numel())
    assert logits <= made.values < wide.vocab_size * wide.dim
    with Largest() as made:
        build(wide, 1)(x, y).backward()
    assert made.values >= wide.vocab_size * wide.dim  # as where it is trained


@pytest.mark.parametrize("at_once", [None, 256 * 10], ids=["whole", "chunks"])
def test_what_is_computed_again_for_its_gradient_is_the_same(at_once):
    model, (x, y) = adapted(), batch()
    model.logits_at_once = at_once
    before = gradients(model, model(x, y))
    model.checkpointing = True
    after = gradients(model, model(x, y))
    assert torch.equal(before[0], after[0])
    assert all(torch.equal(grad, after[1][name]) for name, grad in before[1].items())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_with_autocast_gradients_are_near(kind):
    model, (x, y) = adapted(), batch()
    exact, wanted = gradients(model, model(x, y))
    with torch.autocast("cpu", kind):
        ours = model(x, y)
    assert float(ours.detach()) == pytest.approx(float(exact), rel=5e-3)
    for name, grad in gradients(model, ours)[1].items():
        assert grad.dtype == torch.float32
        assert (grad - wanted[name]).norm() < 0.05 * wanted[name].norm()


def test_steps_lower_the_loss_and_leave_the_weights_beside(elsewhere):
    model = build(TINY, 1).to(elsewhere)
    add_adapters(model, USUAL_TERMS, 7)
    replica = PlainReplica(model, InnerConfig(lr=0.05).build(model))
    frozen = {name: x.clone() for name, x in model.named_parameters() if not x.requires_grad}
    x, y = batch().to(elsewhere)
    first = float(model(x, y).detach())
    for _ in range(12):
        model(x, y).backward()
        replica.inner_step(0.05)
    assert float(model(x, y).detach()) < first - 0.3
    now = dict(model.named_parameters())
    assert all(torch.equal(x, now[name]) for name, x in frozen.items())


def test_a_device_beside_the_cpu_computes_the_same(accelerator):
    here, there, (x, y) = adapted(), adapted().to(accelerator), batch()
    ours, grads = gradients(there, there(x.to(accelerator), y.to(accelerator)))
    wanted, exact = gradients(here, here(x, y))
    torch.testing.assert_close(ours.cpu(), wanted)
    for name, grad in grads.items():
        torch.testing.assert_close(grad.cpu(), exact[name], msg=name)


def test_a_cache_continues_a_text_as_the_whole_model_does():
    model, (x, _) = adapted(), batch()
    cache = KeyValueCache(TINY.layers, TINY.context)
    with torch.no_grad():
        model(x[:, :20], cache=cache)
        torch.testing.assert_close(model(x[:, 20:], cache=cache), model(x)[:, -1:])


@pytest.mark.parametrize(("config", "terms"), KINDS)
def test_a_merged_model_is_a_plain_one_that_computes_the_same(config, terms):
    model, (x, _) = adapted(config, terms), batch(config)
    logits, adapters = model(x), adapters_of(model)
    said = generate(model, ByteTokenizer(), "To be", 12, sampling=GREEDY)
    weights = merged_weights(build(config, 1).state_dict(), adapters, terms)
    merge_adapters(model)
    torch.testing.assert_close(model(x), logits)
    assert not list(adapted_layers(model))
    assert not adapters_of(model)
    assert generate(model, ByteTokenizer(), "To be", 12, sampling=GREEDY) == said
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())
    plain = build(config, 9)
    plain.load_state_dict(weights)
    assert torch.equal(plain(x), model(x))
    add_adapters(model, terms, 7)  # as on any other model


def test_weights_without_an_adapter_are_not_copied_by_a_merge():
    weights = build(TINY, 1).state_dict()
    merged = merged_weights(weights, adapters_of(adapted(terms=USUAL_TERMS)), USUAL_TERMS)
    same = [name for name, x in merged.items() if x is weights[name]]
    assert len(same) == len(weights) - 2 * TINY.layers


def test_adapters_of_another_model_are_not_merged():
    weights = build(msgspec.structs.replace(TINY, layers=1), 1).state_dict()
    with pytest.raises(ValueError, match=r"4 tensors .* such as model\.layers\.1\.self_attn"):
        merged_weights(weights, adapters_of(adapted(terms=USUAL_TERMS)), USUAL_TERMS)


def test_a_second_adapter_is_refused():
    with pytest.raises(ValueError, match=r"q_proj has an adapter already; merge it"):
        add_adapters(adapted(), USUAL_TERMS, 7)


def test_the_adapted_layers_memory_is_that_of_the_plain_ones():
    model = build(TINY, 1)
    storages = {name: x.data_ptr() for name, x in model.named_parameters()}
    add_adapters(model, ALL_TERMS, 7)
    now = dict(model.named_parameters())
    assert all(now[name].data_ptr() == at for name, at in storages.items())


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"r": 0}, r"lora\.r is 0; it must lie between 1 and"),
        ({"r": MAX_ADAPTER_RANK + 1}, r"lora\.r is 1025"),
        ({"alpha": 0.0}, r"lora\.alpha is 0\.0; it must be finite and above 0"),
        ({"alpha": -1.0}, r"lora\.alpha is -1\.0"),
        ({"alpha": float("inf")}, r"lora\.alpha is inf"),
        ({"alpha": float("nan")}, r"lora\.alpha is nan"),
        ({"targets": ()}, r"targets is empty; name layers"),
        ({"targets": ("q_prj",)}, r"names 'q_prj', .* did you mean 'q_proj'"),
        ({"targets": ("lm_head",)}, r"names 'lm_head', .* choose from"),
        ({"targets": ("q_proj", "v_proj", "q_proj")}, r"names a layer twice"),
    ],
)
def test_impossible_terms_are_refused_in_words(given, why):
    with pytest.raises(ValueError, match=why):
        LoraTerms(**{"r": 4, "alpha": 8} | given)


@given(
    st.integers(1, MAX_ADAPTER_RANK),
    st.floats(1e-6, 1e6),
    st.lists(st.sampled_from(ADAPTER_TARGETS), min_size=1, unique=True),
)
def test_terms_survive_a_manifest(r, alpha, targets):
    terms = LoraTerms(r=r, alpha=alpha, targets=tuple(targets))
    assert msgspec.json.decode(msgspec.json.encode(terms), type=LoraTerms) == terms
    assert terms.scale == alpha / r


def test_experts_have_no_adapters():
    terms = LoraTerms(r=4, alpha=8, targets=("q_proj", "up_proj"))
    for refused in (
        lambda: adapter_shapes(EXPERTS, terms),
        lambda: add_adapters(build(EXPERTS, 1), terms, 7),
    ):
        with pytest.raises(ValueError, match=r"names up_proj, and this model has experts"):
            refused()


@pytest.mark.ci_more
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_compute_the_same(checkpointing, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(loss, "MAX_LOGITS", 256 * 20)
    model, (x, y) = adapted(), batch()
    model.checkpointing = checkpointing
    wanted, exact = gradients(model, model(x, y))
    layers = CompiledLayers(model, "aot_eager")
    layers.settle(2, lambda: model(x, y))
    assert not layers.failed
    ours, grads = gradients(model, model(x, y))
    torch.testing.assert_close(ours, wanted)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, exact[name], msg=name)
