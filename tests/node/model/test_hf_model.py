"""Models of transformers compute here what they compute there, and nothing random."""

import copy
import json

import pytest
import torch
from torch.func import functional_call

from farflock.node.model import loss
from farflock.node.model.compiled import CompiledLayers
from farflock.node.model.device import Device
from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.hf_model import HfModel, model_of_shape
from farflock.node.model.hf_shape import canonical_text, hf_shape
from farflock.node.model.llama import PRESETS, Llama

transformers = pytest.importorskip("transformers")

MODERN = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
GROUPED = MODERN | {"num_key_value_heads": 2, "head_dim": 8}
CONFIGS = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 32},
    "gpt_neox": MODERN,
    "opt": MODERN | {"ffn_dim": 48, "word_embed_proj_dim": 16, "layerdrop": 0.5},
    "qwen2": MODERN | {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "gemma2": GROUPED | {"final_logit_softcapping": 0.5, "sliding_window": 6},
    "cohere": GROUPED | {"logit_scale": 0.5},
    "mixtral": GROUPED | {"num_local_experts": 4, "router_jitter_noise": 0.5},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 96, "state_size": 4},
}
PLAIN = {"gpt2", "gpt_neox", "opt", "qwen2", "mixtral", "mamba"}


def shape_of(kind, **changes):
    fields = CONFIGS[kind] | {"model_type": kind, "bos_token_id": 1, "eos_token_id": 1} | changes
    return hf_shape(canonical_text(json.dumps(fields).encode()), context=32)


def lively(shape, seed=0):
    """A model whose biases and norms are not all equal, so that a forgotten one shows."""
    model, generator = HfModel(shape, seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return model


def batch(rows=2, length=9):
    ids = torch.randint(2, 96, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    return ids[:, :-1], ids[:, 1:].clone()


def reference(model):
    """Transformers' own model with the same weights, out of training, where nothing is random."""
    fields = json.loads(model.config.hf)
    config = transformers.AutoConfig.for_model(**fields)
    other = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = dict(model.named_parameters())
    missing = other.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= set(model.config.facts.aliases)
    other.tie_weights()
    return other.eval()


def gradients(model, value):
    model.zero_grad()
    value.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_equal(found, wanted, atol=1e-5):
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=atol, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_loss_and_gradients_are_those_of_transformers(kind):
    model, (x, y) = lively(shape_of(kind)), batch()
    other = reference(model)
    y[0, :4] = loss.IGNORED
    ids = torch.cat((x, torch.zeros_like(x[:, :1])), dim=1)
    labels = torch.cat((torch.full_like(x[:, :1], loss.IGNORED), y), dim=1)
    wanted = other(input_ids=ids, labels=labels, use_cache=False).loss
    found = model(x, y)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert_equal(gradients(model, found), gradients(other, wanted))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_loss_in_chunks_is_the_loss(kind):
    model, (x, y) = lively(shape_of(kind)), batch()
    y[1, 3:] = loss.IGNORED
    wanted = {how: model(x, y, how) for how in ("mean", "sum", "none")}
    slopes = gradients(model, wanted["mean"])
    model.logits_at_once = 2 * 96
    for how, value in wanted.items():
        torch.testing.assert_close(model(x, y, how), value, atol=1e-5, rtol=1e-5)
    assert_equal(gradients(model, model(x, y)), slopes)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_taken_in_chunks_only_where_nothing_follows_the_head(kind, monkeypatch):
    model, (x, y) = lively(shape_of(kind)), batch()
    model.logits_at_once, chunks = 2 * 96, []
    summed = loss.summed_loss
    monkeypatch.setattr(loss, "summed_loss", lambda *given: chunks.append(1) or summed(*given))
    model(x, y)
    assert bool(chunks) == (kind in PLAIN)


@pytest.mark.parametrize("kind", CONFIGS)
def test_training_draws_nothing_and_repeats(kind):
    model, (x, y) = lively(shape_of(kind)), batch()
    model.require_causal()
    before = torch.get_rng_state()
    first = model.train()(x, y)
    assert torch.equal(first, model(x, y))
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(first, model.eval()(x, y))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gpt_neox", "gemma2"])
def test_layers_that_are_computed_again_give_the_same_gradients(kind):
    model, (x, y) = lively(shape_of(kind)).train(), batch()
    kept = []

    def gradients_counted():
        kept.append(0)

        def keep(tensor):
            kept[-1] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = model(x, y)
        return gradients(model, value)

    wanted = gradients_counted()
    model.checkpointing = True
    assert_equal(gradients_counted(), wanted, atol=0)
    assert kept[1] < kept[0] / 2
    model.checkpointing = False
    gradients_counted()
    assert kept[2] == kept[0]


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_text_continued_token_by_token_has_the_logits_of_the_whole(kind):
    model, (x, _) = lively(shape_of(kind)).eval(), batch(1)
    whole, cache = model(x), model.empty_cache()
    with torch.no_grad():
        parts = [x[:, :4], *x[:, 4:].split(1, dim=1)]
        found = torch.cat([model(part, cache=cache) for part in parts], dim=1)
    torch.testing.assert_close(found, whole[:, 3:], atol=1e-5, rtol=1e-4)
    assert cache.length == x.shape[1]
    assert (cache.kept is None) == (kind == "mamba")
    with pytest.raises(ValueError, match="longer than the model's context 32"):
        model(torch.zeros(1, 24, dtype=torch.int64), cache=cache)


def test_weights_depend_on_the_seed_and_on_no_global_state():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = HfModel(shape_of("gpt2"), 7)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again, other = HfModel(shape_of("gpt2"), 7), HfModel(shape_of("gpt2"), 8)
    assert all(map(torch.equal, first.parameters(), again.parameters()))
    name = "transformer.h.0.mlp.c_fc.weight"
    drawn = dict(first.named_parameters())[name]
    assert not torch.equal(drawn, dict(other.named_parameters())[name])
    assert 0.018 < float(drawn.detach().std()) < 0.022  # the class's own initializer_range
    assert {x.dtype for x in first.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_are_those_of_transformers_and_tied_ones_are_there_once(kind):
    shape = shape_of(kind)
    model = HfModel(shape)
    names = [name for name, _ in model.named_parameters()]
    assert names == list(shape.facts.shapes)
    other = [name for name, _ in reference(model).named_parameters()]
    assert names == other
    assert shape.tied == ("lm_head.weight" not in names and "embed_out.weight" not in names)


def test_layers_are_found():
    model = HfModel(shape_of("opt"))
    kinds = [type(block).__name__ for block in model.blocks()]
    assert kinds == ["OPTDecoderLayer"] * 2


@pytest.mark.ci_more
def test_compiled_layers_give_the_same_gradients():
    model, (x, y) = lively(shape_of("qwen2")).train(), batch()
    wanted, compiled = gradients(model, model(x, y)), CompiledLayers(model, "aot_eager")
    compiled.settle(len(x), lambda: model(x, y))
    assert not compiled.failed
    assert_equal(gradients(model, model(x, y)), wanted)


def test_a_copy_is_of_its_own_and_whole():
    model, (x, y) = lively(shape_of("gpt2")), batch()
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    assert not torch.equal(model(x, y), other(x, y))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model(x, y), other(x, y))


def test_a_skeleton_without_memory_computes_with_given_weights():
    model, (x, y) = lively(shape_of("gemma2")).eval(), batch()
    with torch.device("meta"):
        skeleton = HfModel(model.config).eval()
    assert {one.device.type for one in skeleton.parameters()} == {"meta"}
    skeleton.logits_at_once = 2 * 96
    tensors = {name: one.detach() for name, one in model.named_parameters()}
    found = functional_call(skeleton, tensors | dict(model.named_buffers()), (x, y, "none"))
    torch.testing.assert_close(found, model(x, y, "none"))


@pytest.mark.parametrize("kind", ["gpt2", "qwen2", "gemma2"])
def test_it_trains_on_a_device(kind, card):
    model, (x, y) = lively(shape_of(kind)), batch()
    wanted = gradients(model, model(x, y))
    on_card = copy.deepcopy(model).to(card)
    on_card.checkpointing = True
    assert list(dict(on_card.named_parameters())) == list(model.config.facts.shapes)
    place = Device(card, "Double Card")
    found = gradients(on_card, on_card(place.bring(x), place.bring(y)))
    assert_equal({name: one.cpu() for name, one in found.items()}, wanted)
    with card:
        assert next(HfModel(shape_of(kind)).parameters()).device.type == card.type


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("cpmant", {"dim_head": 8, "dim_ff": 48, "num_attention_heads": 4}, "sees the tokens"),
        ("gpt2", {"initializer_range": 1e30}, "not finite"),
    ],
)
def test_a_model_that_cannot_be_trained_is_found_by_its_passes(kind, fields, why):
    given = CONFIGS["mamba" if kind == "cpmant" else kind] | fields | {"model_type": kind}
    given.pop("state_size", None)
    model = HfModel(hf_shape(canonical_text(json.dumps(given).encode()), 32), 1)
    with pytest.raises(BadModelFolder, match=why):
        model.require_causal()


def test_a_class_that_draws_nevertheless_is_found():
    model = HfModel(shape_of("gpt2"))
    model.transformer.drop.p = 0.5  # as if the class had it written down
    with pytest.raises(BadModelFolder, match="draws random numbers"):
        model.require_causal()


def test_a_shape_is_made_into_its_own_kind_of_model():
    assert isinstance(model_of_shape(PRESETS["tiny"]), Llama)
    assert isinstance(model_of_shape(shape_of("gpt2")), HfModel)
