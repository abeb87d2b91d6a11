"""The decoder equals a slow reference and Hugging Face's, splits at any layer, and draws nothing.

No global random generator is touched.
"""

import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from farflock.node.model.llama import (
    PRESETS,
    Llama,
    ModelConfig,
    RopeScaling,
    TiedHead,
    build,
    next_token_loss,
    rotary,
    rotate,
)

TIED = ModelConfig(vocab_size=40, dim=24, layers=3, heads=4, kv_heads=2, ffn_dim=32, context=16)
UNTIED = msgspec.structs.replace(TIED, tied=False, kv_heads=4, rope_theta=500.0, norm_eps=1e-3)
QWEN2 = msgspec.structs.replace(UNTIED, architecture="qwen2", head_width=8)
QWEN3 = msgspec.structs.replace(UNTIED, architecture="qwen3", kv_heads=2, head_width=10)
VALID = {"dim": 24, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_dim": 48, "context": 8}


def tokens(config, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (batch, config.context), generator=generator)


def lively(config, seed=0):
    """A model whose norms are not all ones, so that a forgotten one shows."""
    model = build(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
    return model


class SlowLlama:
    """The textbook formulas, position by position, in float64 numpy."""

    def __init__(self, config, weights):
        self.config = config
        self.w = {
            name: weight.detach().numpy().astype(np.float64) for name, weight in weights.items()
        }

    def norm(self, x, name):
        return x / math.sqrt((x * x).mean() + self.config.norm_eps) * self.w[name]

    def turn(self, x, position):
        half = len(x) // 2
        out = x.copy()
        for i in range(half):
            angle = position * self.config.rope_theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def attend(self, xs, layer):
        c, name = self.config, f"model.layers.{layer}.self_attn."
        out = []
        for position in range(len(xs)):
            heads = []
            for head in range(c.heads):
                rows = slice(head * c.head_dim, (head + 1) * c.head_dim)
                shared = head * c.kv_heads // c.heads
                kv = slice(shared * c.head_dim, (shared + 1) * c.head_dim)
                q = self.turn(self.w[name + "q_proj.weight"][rows] @ xs[position], position)
                keys = [
                    self.turn(self.w[name + "k_proj.weight"][kv] @ xs[p], p)
                    for p in range(position + 1)
                ]
                values = [self.w[name + "v_proj.weight"][kv] @ xs[p] for p in range(position + 1)]
                scores = np.exp([q @ k / math.sqrt(c.head_dim) for k in keys])
                heads.append(sum(s * v for s, v in zip(scores / scores.sum(), values, strict=True)))
            out.append(self.w[name + "o_proj.weight"] @ np.concatenate(heads))
        return out

    def logits(self, ids):
        xs = [self.w["model.embed_tokens.weight"][token] for token in ids]
        for layer in range(self.config.layers):
            name = f"model.layers.{layer}."
            mixed = self.attend([self.norm(x, name + "input_layernorm.weight") for x in xs], layer)
            xs = [x + m for x, m in zip(xs, mixed, strict=True)]
            for i, x in enumerate(xs):
                h = self.norm(x, name + "post_attention_layernorm.weight")
                gate = self.w[name + "mlp.gate_proj.weight"] @ h
                up = self.w[name + "mlp.up_proj.weight"] @ h
                xs[i] = x + self.w[name + "mlp.down_proj.weight"] @ (
                    gate / (1 + np.exp(-gate)) * up
                )
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return np.stack([head @ self.norm(x, "model.norm.weight") for x in xs])


@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied-grouped", "untied"])
def test_logits_equal_the_slow_reference(config):
    model, ids = lively(config), tokens(config, batch=1)
    expected = SlowLlama(config, model.state_dict()).logits(ids[0].tolist())
    np.testing.assert_allclose(model(ids)[0].detach().numpy(), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "config", [TIED, UNTIED, PRESETS["demo"]], ids=["tied-grouped", "untied", "demo"]
)
def test_logits_equal_transformers(config):
    transformers = pytest.importorskip("transformers")
    from farflock.node.model.hf_config import hugging_face_config

    model, ids = lively(config), tokens(config, batch=3)
    other = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**hugging_face_config(config))
    ).eval()
    missing, unexpected = other.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tied else [])
    with torch.no_grad():
        ours, theirs = model(ids), other(ids).logits
    assert float((ours - theirs).abs().max()) <= 1e-5


def test_tensors_have_hugging_faces_names():
    names = set(build(msgspec.structs.replace(UNTIED, layers=1), 0).state_dict())
    layer = "model.layers.0."
    assert names == {
        "model.embed_tokens.weight",
        *(f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        f"{layer}input_layernorm.weight",
        f"{layer}post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }


@pytest.mark.parametrize("name", PRESETS)
def test_the_number_of_weights_is_known_before_they_are_made(name):
    config = PRESETS[name]
    assert config.parameters() == sum(weight.numel() for weight in Llama(config).parameters())


def test_presets_have_the_promised_sizes():
    assert PRESETS["tiny"].parameters() < 25_000
    assert PRESETS["demo"].parameters() <= 600_000
    assert 9e6 < PRESETS["10m"].parameters() < 12e6
    assert UNTIED.parameters() == sum(weight.numel() for weight in Llama(UNTIED).parameters())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"vocab_size": 1}, "vocab_size is 1; it must lie between 2 and 1048576"),
        ({"vocab_size": 1_048_577}, "vocab_size is 1048577"),
        ({"layers": 0}, "layers is 0"),
        ({"context": 10**9}, "context is 1000000000"),
        ({"dim": 25}, "make dim a multiple of 4"),
        ({"dim": 22}, "make dim a multiple of 4"),
        ({"heads": 3, "kv_heads": 2}, "3 heads cannot share 2 key-value heads evenly"),
        ({"head_width": 5}, "head_width is 5; make it even"),
        ({"head_width": 1026}, "head_width is 1026; it must lie between 2 and 1024"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0"),
        ({"norm_eps": math.nan}, "norm_eps is nan"),
    ],
)
def test_a_bad_shape_is_refused_in_a_sentence(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig(**(VALID | change))


def test_a_shape_decoded_from_a_file_is_checked_alike():
    body = msgspec.json.encode
    assert msgspec.json.decode(body(TIED), type=ModelConfig) == TIED
    with pytest.raises(msgspec.ValidationError, match="layers is 5000"):
        msgspec.json.decode(body(VALID | {"layers": 5000}), type=ModelConfig)
    with pytest.raises(msgspec.ValidationError, match="unknown field `code`"):
        msgspec.json.decode(body(VALID | {"code": "x"}), type=ModelConfig)


@pytest.mark.parametrize(
    "change",
    [
        {"factor": 0.5},
        {"factor": math.inf},
        {"low": 0.0},
        {"low": 4.0},
        {"low": math.nan},
        {"trained_context": 0},
    ],
)
def test_a_bad_scaling_of_positions_is_refused_in_a_sentence(change):
    with pytest.raises(ValueError, match=f"rope_scaling.{next(iter(change))} is .*; .*must"):
        RopeScaling(**({"factor": 8.0, "low": 1.0, "high": 4.0, "trained_context": 8} | change))


@pytest.mark.parametrize("config", [UNTIED, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("cuts", [(1,), (2,), (1, 2)])
def test_stages_of_any_split_compute_what_the_whole_model_computes(cuts, config):
    whole, ids = lively(config), tokens(config)
    ends = [0, *cuts, config.layers]
    stages = [Llama(config, range(a, b)) for a, b in pairwise(ends)]
    for stage in stages:
        stage.load_state_dict({name: whole.state_dict()[name] for name in stage.state_dict()})
    names = [name for stage in stages for name in stage.state_dict()]
    assert sorted(names) == sorted(whole.state_dict())

    x = ids
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, whole(ids))
    next_token_loss(x, ids).backward()
    next_token_loss(whole(ids), ids).backward()
    gradients = {name: weight.grad for name, weight in whole.named_parameters()}
    for stage in stages:
        for name, weight in stage.named_parameters():
            assert torch.equal(weight.grad, gradients[name]), name


def test_biases_begin_at_zero_and_norms_at_one():
    names = {**dict(build(QWEN2, 0).named_parameters()), **dict(build(QWEN3, 0).named_parameters())}
    biases = [weight for name, weight in names.items() if name.endswith("_proj.bias")]
    norms = [weight for name, weight in names.items() if name.endswith("q_norm.weight")]
    assert len(biases) == 9
    assert len(norms) == 3
    assert all(bool((weight == 0).all()) for weight in biases)
    assert all(bool((weight == 1).all()) for weight in norms)


def test_a_stage_starts_with_the_whole_models_weights():
    whole, stage = build(UNTIED, 7).state_dict(), build(UNTIED, 7, range(1, 2)).state_dict()
    assert stage.keys() < whole.keys()
    assert all(torch.equal(weight, whole[name]) for name, weight in stage.items())


@pytest.mark.parametrize("span", [range(0), range(2, 4), range(0, 3, 2), range(-1, 2)])
def test_a_span_that_is_no_run_of_layers_is_refused(span):
    with pytest.raises(ValueError, match="consecutive layers of 0 to 2"):
        Llama(UNTIED, span)


def test_a_tied_model_is_not_split():
    with pytest.raises(ValueError, match="set tied to false"):
        Llama(TIED, range(1))


def test_weights_follow_the_seed_and_leave_the_global_generator_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = build(TIED, 1), build(TIED, 1), build(TIED, 2)
    assert torch.equal(torch.get_rng_state(), before)
    name, twin = "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_proj.weight"
    assert not torch.equal(first.state_dict()[name], first.state_dict()[twin])
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_weights_have_the_documented_spread():
    config = PRESETS["demo"]
    weights = build(config, 3).state_dict()
    spread = math.sqrt(2 / (5 * config.dim))
    assert weights["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(
        spread, rel=0.03
    )
    adding = weights["model.layers.0.mlp.down_proj.weight"].std().item()
    assert adding == pytest.approx(spread / math.sqrt(2 * config.layers), rel=0.03)
    assert bool((weights["model.norm.weight"] == 1).all())


def test_no_position_sees_a_later_token():
    model, ids = lively(TIED), tokens(TIED)
    changed = ids.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TIED.vocab_size
    before, after = model(ids), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_rotated_products_depend_on_the_distance_alone():
    cos, sin = rotary(TIED)
    q, k = torch.randn(2, 1, TIED.head_dim, generator=torch.Generator().manual_seed(0))

    def product(m, n):
        return float((rotate(q, cos[m], sin[m]) * rotate(k, cos[n], sin[n])).sum())

    assert product(3, 1) == pytest.approx(product(14, 12), abs=1e-5)
    assert product(3, 1) != pytest.approx(product(4, 1), abs=1e-3)
    assert torch.equal(rotate(q, cos[0], sin[0]), q)


def test_a_sequence_beyond_the_context_is_refused():
    with pytest.raises(ValueError, match="17 tokens is longer than the model's context 16"):
        build(TIED, 0)(torch.zeros(1, 17, dtype=torch.int64))


def test_bfloat16_autocast_computes_nearly_the_same_loss_and_float32_gradients():
    model, ids = build(PRESETS["tiny"], 0), tokens(PRESETS["tiny"])
    exact = next_token_loss(model(ids), ids)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = next_token_loss(model(ids), ids)
    rounded.backward()
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), rel=5e-3)
    assert rounded.item() != exact.item()
    assert all(weight.grad.dtype == torch.float32 for weight in model.parameters())


def test_the_loss_is_the_mean_negative_log_probability_of_the_targets():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    by_hand = [
        -math.log(float(logits[b, t].softmax(0)[targets[b, t]])) for b in range(2) for t in range(3)
    ]
    assert next_token_loss(logits, targets).item() == pytest.approx(sum(by_hand) / 6, rel=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_tied_head_trains_as_a_plain_linear_layer_bit_for_bit(kind, autocast, monkeypatch):
    config = msgspec.structs.replace(PRESETS["demo"], tied=True)
    x = torch.randint(config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(1))

    def gradients():
        model = build(config, 1).to(kind)
        for _ in range(2):  # the second time, gradients are there already
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = next_token_loss(model(x[:, :-1]), x[:, 1:])
            loss.backward()
        return [loss.detach(), *(x.grad for x in model.parameters())]

    ours, calls = gradients(), []

    def plain(x, weight):
        calls.append(weight)
        return torch.nn.functional.linear(x, weight)

    monkeypatch.setattr(TiedHead, "apply", plain)
    theirs = gradients()
    assert len(calls) == 2
    assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))
