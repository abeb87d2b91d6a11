"""A config.json and a shape say the same of a model; what is not native is refused in words."""

import json

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from worlds.folders.model_folder import EXPERTS, SMALL, SPLIT

from farflock.node.model.hf_config import (
    MAX_CONFIG_BYTES,
    BadModelFolder,
    config_in,
    config_of,
    hugging_face_config,
)
from farflock.node.model.llama import ModelConfig, RopeScaling
from farflock.node.state.weights_file import WeightsFolder, initial

LLAMA3 = RopeScaling(factor=8.0, low=1.0, high=4.0, trained_context=16)
LONG = msgspec.structs.replace(SPLIT, rope_scaling=LLAMA3, rope_theta=5_000.0)
LLAMA_3_2 = {  # the fields of Llama 3.2 1B that matter, as its config.json has them
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
}


def said(**changes):
    """Return a config.json with these changes; a field that is None is left out."""
    fields = hugging_face_config(SMALL) | changes
    return json.dumps({name: x for name, x in fields.items() if x is not None}).encode()


@pytest.mark.parametrize(
    "config", [SMALL, SPLIT, LONG, EXPERTS], ids=["tied", "untied", "long", "experts"]
)
def test_what_is_exported_is_read_back(config):
    assert config_of(json.dumps(hugging_face_config(config)).encode()) == config


def test_a_published_configuration_is_read():
    assert config_of(json.dumps(LLAMA_3_2).encode()) == ModelConfig(
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
    read = config_of(old)
    assert (read.kv_heads, read.rope_theta, read.norm_eps) == (SMALL.heads, 10_000.0, 1e-6)
    assert not read.tied


@pytest.mark.parametrize("place", ["rope_theta", "rope_parameters"])
def test_the_base_of_positions_has_two_places(place):
    other = {"rope_theta", "rope_parameters"} - {place}
    value = {"rope_theta": 70_000.0}
    given_ = {place: value if place == "rope_parameters" else 70_000.0} | dict.fromkeys(other)
    assert config_of(said(**given_)).rope_theta == 70_000.0


@pytest.mark.parametrize("window", [None, 64, 4096])
def test_a_mistral_whose_window_never_slides_is_native(window):
    fields = hugging_face_config(SMALL) | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": window,
    }
    assert config_of(json.dumps(fields).encode()) == SMALL


MISTRAL = {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32_768}


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
            "of these: LlamaForCausalLM, MistralForCausalLM, MixtralForCausalLM",
        ),
        ({"architectures": None, "model_type": "qwen3"}, "names the architecture 'qwen3'"),
        ({"architectures": None, "model_type": None}, "names the architecture 'none'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights, which cannot be trained"),
        ({"attention_bias": True}, "attention_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and native layers have silu"),
        ({"head_dim": 128}, "its heads are 128 wide, and native ones 24 / 2"),
        ({"partial_rotary_factor": 0.5}, "it rotates 0.5 of each head"),
        (MISTRAL | {"sliding_window": 4096}, "slides over a window of 4096 tokens"),
        (MISTRAL, "slides over a window of 4096 tokens"),
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


@given(st.sampled_from(sorted(hugging_face_config(SMALL))), JSON)
def test_any_value_of_a_field_is_read_or_refused_in_words(name, value):
    fields = hugging_face_config(SMALL) | {name: value}
    try:
        config_of(json.dumps(fields).encode())
    except BadModelFolder as error:
        assert "; " in str(error)


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Llama", SMALL),
        ("Llama", SPLIT),
        ("Llama", LONG),
        ("Mistral", SPLIT),
        ("Mixtral", EXPERTS),
        ("Mixtral", msgspec.structs.replace(EXPERTS, tied=False, experts=3, experts_per_token=1)),
    ],
    ids=["tied", "untied", "long", "mistral", "experts", "one-expert"],
)
def test_a_model_of_transformers_has_equal_logits_here(tmp_path, family, config):
    transformers = pytest.importorskip("transformers")
    fields = {k: x for k, x in hugging_face_config(config).items() if k != "rope_scaling"}
    fields |= {"sliding_window": None, "architectures": None, "model_type": family.lower()}
    torch.manual_seed(3)
    other = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**fields)
    ).eval()
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(4.0)  # so that attention attends
    other.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    read = config_in(tmp_path)
    assert read == config
    ours = initial(read, 0, WeightsFolder(tmp_path, read))
    ids = torch.randint(0, config.vocab_size, (2, config.context))
    with torch.no_grad():
        theirs = other(ids).logits
        assert float((ours(ids) - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
        loss = float(other(ids, labels=ids).loss)
        assert float(ours(ids[:, :-1], ids[:, 1:])) == pytest.approx(loss, abs=1e-4)
