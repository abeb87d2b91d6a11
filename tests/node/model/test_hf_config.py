"""A config.json and a shape say the same of a model; what is not native is refused in words."""

import json

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.model.hf_config import (
    CLASSES,
    MAX_CONFIG_BYTES,
    BadModelFolder,
    config_in,
    config_of,
    hugging_face_config,
)
from farflock.node.model.llama import PRESETS, ModelConfig, RopeScaling, build, rotary
from farflock.node.model.weights_folder import WeightsFolder, initial

SMALL = msgspec.structs.replace(PRESETS["tiny"], norm_eps=1e-6)
LLAMA3 = RopeScaling(factor=8.0, low=1.0, high=4.0, trained_context=16)
SHAPES = {
    "tied": SMALL,
    "untied": msgspec.structs.replace(SMALL, tied=False),
    "long": msgspec.structs.replace(SMALL, rope_scaling=LLAMA3, rope_theta=5_000.0),
    "mistral": msgspec.structs.replace(SMALL, architecture="mistral", head_width=20),
    "qwen2": msgspec.structs.replace(SMALL, architecture="qwen2", tied=False),
    "qwen3": msgspec.structs.replace(SMALL, architecture="qwen3", head_width=32),
}
# The fields that matter of published models' config.json, as these have them.
PUBLISHED = {
    "llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "mistral-7b-v0.1": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "mistral-nemo": {
        "architectures": ["MistralForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 131072,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "max_position_embeddings": 32768,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}


def narrow(name, **changes):
    """Return a published configuration at a small width, with all else as it is."""
    fields = PUBLISHED[name]
    own = {"head_dim": 24} if fields.get("head_dim") == 128 else {"head_dim": None}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 120}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if fields["num_key_value_heads"] == fields["num_attention_heads"]:
        heads["num_key_value_heads"] = 4
    return fields | sizes | heads | {k: x for k, x in own.items() if k in fields} | changes


def said(config=SMALL, **changes):
    """Return a config.json with these changes; a field that is None is left out."""
    fields = hugging_face_config(config) | changes
    return json.dumps({name: x for name, x in fields.items() if x is not None}).encode()


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_what_is_exported_is_read_back(config):
    assert config_of(json.dumps(hugging_face_config(config)).encode()) == config


def read(name, context=None):
    return config_of(json.dumps(PUBLISHED[name]).encode(), "config.json", context)


def test_published_configurations_are_read():
    assert read("llama-3.2-1b") == ModelConfig(
        vocab_size=128_256,
        dim=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        ffn_dim=8192,
        context=131_072,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        rope_scaling=RopeScaling(factor=32.0, low=1.0, high=4.0, trained_context=8192),
    )
    weights = {
        "llama-2-7b": 6_738_415_616,
        "mistral-nemo": 12_247_782_400,
        "qwen2.5-0.5b": 494_032_768,
        "qwen3-0.6b": 596_049_920,
    }
    assert {name: read(name).parameters() for name in weights} == weights
    assert read("mistral-7b-v0.1", 4096).parameters() == 7_241_732_096
    assert read("mistral-nemo").head_dim == read("qwen3-0.6b").head_dim == 128


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_number_of_weights_is_reckoned_for_each_architecture(architecture):
    config = msgspec.structs.replace(SMALL, architecture=architecture, head_width=20)
    model = build(config, 0)
    assert config.parameters() == sum(weight.numel() for weight in model.parameters())


def test_what_a_configuration_leaves_out_means_what_transformers_takes():
    old = said(
        num_key_value_heads=None,
        head_dim=None,
        rope_parameters=None,
        rope_theta=None,
        rms_norm_eps=None,
        tie_word_embeddings=None,
        architectures=None,
    )
    found = config_of(old)
    assert (found.kv_heads, found.rope_theta, found.norm_eps) == (SMALL.heads, 10_000.0, 1e-6)
    assert not found.tied


@pytest.mark.parametrize("place", ["rope_theta", "rope_parameters"])
def test_the_base_of_positions_has_two_places(place):
    other = {"rope_theta", "rope_parameters"} - {place}
    value = {"rope_theta": 70_000.0}
    given_ = {place: value if place == "rope_parameters" else 70_000.0} | dict.fromkeys(other)
    assert config_of(said(**given_)).rope_theta == 70_000.0


def test_a_window_that_never_slides_within_the_context_changes_nothing():
    with pytest.raises(BadModelFolder, match=r"slides over a window of 4096 .* to 4096 or less$"):
        read("mistral-7b-v0.1")
    assert read("mistral-7b-v0.1", 4096).context == 4096
    silent = json.dumps({k: x for k, x in PUBLISHED["mistral-7b-v0.1"].items() if "slid" not in k})
    with pytest.raises(BadModelFolder, match="a window of 4096 tokens"):
        config_of(silent.encode())


@pytest.mark.parametrize(
    ("changes", "slides"),
    [
        ({"use_sliding_window": True, "max_window_layers": 1}, True),
        ({"use_sliding_window": True, "max_window_layers": 28}, False),
        ({"use_sliding_window": True, "layer_types": ["full_attention"] * 28}, False),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 28}, True),
        ({"layer_types": ["full_attention"] * 28, "max_window_layers": 0}, False),
    ],
)
def test_qwens_windows_matter_where_a_layer_uses_them(changes, slides):
    fields = PUBLISHED["qwen3-0.6b"] | {"sliding_window": 4096} | changes
    if slides:
        with pytest.raises(BadModelFolder, match="slides over a window of 4096 tokens"):
            config_of(json.dumps(fields).encode())
    else:
        assert config_of(json.dumps(fields).encode()) == read("qwen3-0.6b")


def test_a_context_longer_than_the_models_is_refused():
    with pytest.raises(BadModelFolder, match=r"set model\.context to 4096 or less"):
        read("llama-2-7b", 8192)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"auto_map": {"AutoModel": "x.y"}},
            "names code of its own (auto_map), which is never run",
        ),
        ({"trust_remote_code": True}, "names code of its own (auto_map)"),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "names the architecture 'GPT2LMHeadModel', which is not native; choose a model of one "
            "of these: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "gemma"}, "names the architecture 'gemma'"),
        ({"architectures": None, "model_type": None}, "names the architecture 'none'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights, which cannot be trained"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and native layers have silu"),
        ({"head_dim": 7}, "head_width is 7; make it even"),
        ({"partial_rotary_factor": 0.5}, "it rotates 0.5 of each head"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "its positions are scaled as 'yarn', and native ones as llama3 or not",
        ),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "its positions are scaled as 'linear'",
        ),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "lacks one of factor"),
        ({"num_attention_heads": 5, "head_dim": None}, "dim 24 cannot be divided into 5 heads"),
        ({"vocab_size": 0}, "the model's vocab_size is 0"),
        ({"num_attention_heads": 0, "head_dim": None}, "the model's heads is 0"),
        ({"hidden_size": None}, "missing required field `hidden_size`"),
        ({"hidden_size": "24"}, "Expected `int`, got `str`"),
    ],
)
def test_what_is_not_native_is_refused_in_words(changes, sentence):
    with pytest.raises(BadModelFolder, match="; ") as caught:
        config_of(said(**changes), "there/config.json")
    assert str(caught.value).startswith("there/config.json")
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"\xff", b"[" * 100_000, b" " * (MAX_CONFIG_BYTES + 1)]
)
def test_what_is_no_configuration_is_refused(raw):
    with pytest.raises(BadModelFolder, match="name a folder that transformers' save_pretrained"):
        config_of(raw)


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(BadModelFolder, match="is no folder of a Hugging Face model"):
        config_in(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(st.sampled_from(sorted(hugging_face_config(SHAPES["qwen3"]))), JSON)
def test_any_value_of_a_field_is_read_or_refused_in_words(name, value):
    fields = hugging_face_config(SHAPES["qwen3"]) | {name: value}
    try:
        config_of(json.dumps(fields).encode())
    except BadModelFolder as error:
        assert "; " in str(error)


def theirs(folder, fields):
    """Return a model of transformers with random weights and this config.json."""
    transformers = pytest.importorskip("transformers")
    (folder / "config.json").write_text(json.dumps(fields))
    kept = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForCausalLM
    torch.manual_seed(5)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = kind.from_config(kept, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # no bias is zero, no norm one, and attention attends
        for weight in model.parameters():
            weight.mul_(3).add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in PUBLISHED if name != "mistral-7b-v0.1"),
        ("mistral-7b-v0.1", {"sliding_window": 300, "max_position_embeddings": 300}),
        ("qwen2.5-0.5b", {"tie_word_embeddings": False, "num_key_value_heads": 4}),
        ("qwen3-0.6b", {"tie_word_embeddings": False}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path, name, changes):
    other = theirs(tmp_path, narrow(name, **changes))
    config = config_in(tmp_path)  # as transformers wrote it
    assert config == config_of(json.dumps(narrow(name, **changes)).encode())
    ours = initial(config, 0, WeightsFolder(tmp_path, config))
    ids = torch.randint(0, 120, (2, 300), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        wanted, loss = other(ids).logits, float(other(ids, labels=ids).loss)
        found = ours(ids)
        assert float(ours(ids[:, :-1], ids[:, 1:])) == pytest.approx(loss, abs=1e-4)
    assert float((found - wanted).abs().max()) <= 1e-4
    assert float(wanted.std()) > 0.5
    config = msgspec.structs.replace(config, rope_theta=2_000.0)
    twisted = initial(config, 0, WeightsFolder(tmp_path, config))
    with torch.no_grad():
        assert float((twisted(ids) - wanted).abs().max()) > 1e-2  # positions count


def test_positions_of_a_lengthened_context_equal_those_of_transformers(tmp_path):
    other = theirs(tmp_path, narrow("llama-3.2-1b"))
    config = config_in(tmp_path)
    at = torch.arange(config.context)[None]
    cos, sin = other.model.rotary_emb(torch.zeros(1), at)
    for ours, wanted in zip(rotary(config), (cos[0], sin[0]), strict=True):
        assert float((ours - wanted).abs().max()) <= 1e-6
    plain = rotary(msgspec.structs.replace(config, rope_scaling=None))
    assert float((plain[0] - cos[0]).abs().max()) > 1
