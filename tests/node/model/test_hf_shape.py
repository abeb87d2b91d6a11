"""Configurations of transformers become canonical text, or are refused in words."""

import copy
import json
import sys

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farflock.node.model.hf_config import MAX_CONFIG_BYTES, BadModelFolder
from farflock.node.model.hf_shape import (
    MAX_HF_BYTES,
    HfShape,
    canonical_text,
    facts_of,
    hf_shape,
    hub_config,
    text_in,
)

transformers = pytest.importorskip("transformers")

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 96,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
}


def text_of(fields, **changes):
    return canonical_text(json.dumps(fields | changes).encode())


def canonical(fields):
    return msgspec.json.encode(fields, order="sorted").decode()


def test_a_text_spells_out_what_a_file_leaves_out_and_means_itself():
    said = json.loads(text_of(QWEN2))
    assert said["rope_parameters"] == {"rope_theta": 500.0, "rope_type": "default"}
    assert said["rms_norm_eps"] == 1e-6
    assert not said.keys() & {"transformers_version", "dtype", "use_cache", "architectures"}
    assert text_of(said) == text_of(QWEN2)


def test_equal_files_in_other_words_are_one_text():
    other = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    rest = {name: x for name, x in GPT2.items() if name not in ("n_embd", "n_layer", "n_head")}
    assert text_of(rest | other) == text_of(GPT2, transformers_version="4.0", _name_or_path="x")


def test_what_concerns_other_uses_of_a_class_is_left_out():
    other = {"id2label": {"a": 1}, "dtype": "bfloat16", "use_cache": False, "unknown": [1]}
    other |= {"attn_implementation": "kernels-community/flash-attn", "output_hidden_states": True}
    assert text_of(GPT2 | other) == text_of(GPT2)


def test_every_dropout_is_0():
    said = json.loads(text_of(GPT2, attn_pdrop=0.3))
    assert [said[name] for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")] == [0, 0, 0]
    mixtral = QWEN2 | {"model_type": "mixtral", "router_jitter_noise": 0.1}
    assert json.loads(text_of(mixtral))["router_jitter_noise"] == 0


def test_sizes_follow_and_the_context_may_be_shorter():
    shape = hf_shape(text_of(GPT2), context=16)
    assert (shape.vocab_size, shape.dim, shape.layers, shape.heads) == (96, 32, 2, 4)
    assert (shape.kv_heads, shape.ffn_dim, shape.context, shape.tied) == (4, 128, 16, True)
    config = transformers.GPT2Config(
        **{name: x for name, x in GPT2.items() if name != "model_type"}
    )
    other = transformers.GPT2LMHeadModel(config)
    assert shape.parameters() == sum(x.numel() for x in other.parameters())
    assert dict(shape.facts.shapes) == {
        name: tuple(x.shape) for name, x in other.named_parameters()
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dim": 16}, "dim is 16, and its hf says 32"),
        ({"context": 65}, "context is 65, and its hf says 64"),
        ({"context": 0}, "must lie between 1"),
        ({"tied": False}, "tied is False"),
        ({"experts": 4}, "experts is for native models"),
        ({"hf": "{}"}, "of the type 'None'"),
    ],
)
def test_a_size_that_does_not_follow_is_refused(change, why):
    whole = msgspec.to_builtins(hf_shape(text_of(GPT2)))
    assert msgspec.convert(whole, HfShape) == hf_shape(text_of(GPT2))
    with pytest.raises(msgspec.ValidationError, match=why):
        msgspec.convert(whole | change, HfShape)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"auto_map": {"AutoConfig": "a.B"}}, "never run"),
        ({"trust_remote_code": True}, "never run"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"model_type": "no-such"}, "no causal language model"),
        ({"model_type": ["gpt2"]}, "no causal language model"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"model_type": "bert"}, "trained as BertLMHeadModel"),
        ({"model_type": "bert", "architectures": None}, "fills gaps"),
        ({"model_type": "pegasus", "architectures": None}, "several parts"),
        ({"model_type": "gemma3", "architectures": None}, "several parts"),
        ({"architectures": ["GPT2Model"]}, "trained as GPT2LMHeadModel"),
        ({"architectures": 3}, "trained as GPT2LMHeadModel"),
        ({"n_layer": 2**20}, "'n_layer' is 1048576"),
        ({"n_embd": 80_000}, "dim by its hf is 80000"),
        ({"n_embd": 2**30}, "refused by transformers"),
        ({"n_embd": 33}, "refused by transformers"),
        ({"activation_function": "os.system"}, "refused by transformers"),
        ({"n_embd": "wide"}, "refused by transformers"),
        ({"initializer_range": 10**400}, "cannot be read|is 1000"),
        ({"summary_type": "x" * 300}, "'summary_type' is xxx"),
    ],
)
def test_a_configuration_that_is_not_trained_is_refused_in_words(change, why):
    with pytest.raises(BadModelFolder, match=why) as caught:
        text_of(GPT2, **change)
    assert "; " in str(caught.value)


def test_values_that_no_gradient_changes_are_refused():
    fields = {**QWEN2, "model_type": "exaone_moe", "moe_intermediate_size": 16, "num_experts": 4}
    with pytest.raises(BadModelFolder, match=r"e_score_correction_bias, and peers exchange"):
        text_of(fields, head_dim=8, n_group=1, topk_group=1)


def test_a_value_that_json_cannot_say_is_refused():
    bamba = {"mamba_n_heads": 4, "mamba_d_head": 16, "model_type": "bamba"}
    with pytest.raises(BadModelFolder, match="time_step_limit is inf"):
        text_of(QWEN2 | bamba)


def test_a_routers_loss_is_refused():
    with pytest.raises(BadModelFolder, match="output_router_logits to false"):
        text_of(QWEN2, model_type="mixtral", output_router_logits=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps(GPT2), "not in canonical form"),
        (canonical(GPT2), "unknown field 'architectures'"),
        (canonical({"model_type": "gpt2", "new_field": 1}), "unknown field 'new_field'"),
        (canonical({"model_type": "gpt2", "attn_pdrop": 0.1}), "means something else here"),
        (canonical({"model_type": "gpt2", "_attn_implementation": "hub/x"}), "unknown field"),
        (" " * MAX_HF_BYTES + "{}", "larger than 16,384"),
        ("[]", "no table"),
        ("\ud800", "cannot be read"),
    ],
)
def test_a_text_from_a_peer_has_to_be_canonical(text, why):
    with pytest.raises(BadModelFolder, match=why):
        facts_of(text)


def test_a_peer_with_a_later_version_may_know_more_fields():
    fields = json.loads(text_of(GPT2))
    del fields["scale_attn_weights"]  # as if the founder's version had none
    assert facts_of(canonical(fields)).sizes == facts_of(text_of(GPT2)).sizes


def test_a_model_without_a_longest_sequence_needs_one():
    bloom = {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
    with pytest.raises(BadModelFolder, match="write context = N"):
        hf_shape(text_of(bloom))
    assert hf_shape(text_of(bloom), 128).context == 128


def test_a_folder_or_its_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert text_in(tmp_path) == text_in(tmp_path / "config.json") == text_of(GPT2)
    with pytest.raises(BadModelFolder, match="No such file"):
        text_in(tmp_path / "other")
    (tmp_path / "config.json").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(BadModelFolder, match="larger than"):
        text_in(tmp_path)


def test_transformers_reads_what_is_written_for_it(tmp_path):
    shape = hf_shape(text_of(QWEN2))
    (tmp_path / "config.json").write_text(json.dumps(hub_config(shape)))
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == ["Qwen2ForCausalLM"]
    assert text_in(tmp_path) == shape.hf


def test_names_in_files_may_lack_the_prefix_or_mean_nothing():
    facts = facts_of(text_of(GPT2))
    named = facts.parameter_named
    assert named("wte.weight") == named("lm_head.weight") == "transformer.wte.weight"
    assert named("transformer.h.0.ln_1.bias") == "transformer.h.0.ln_1.bias"
    assert named("h.0.attn.bias") is None
    assert named("h.9.ln_1.bias") == "h.9.ln_1.bias"  # of no layer: it does not fit


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BadModelFolder, match=r"pip install 'farflock\[hf\]'"):
        text_of(GPT2)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(["gelu", "full_attention", "sliding_attention", "default", "yarn"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)
NAMES = sorted({*GPT2, *QWEN2, "rope_scaling", "rope_parameters", "layer_types", "to_dict"})


@settings(max_examples=60, deadline=None)
@given(
    base=st.sampled_from([GPT2, QWEN2, QWEN2 | {"model_type": "gemma2"}]),
    changes=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), JSON, max_size=3),
)
def test_a_strange_file_is_refused_or_means_something(base, changes):
    before = copy.deepcopy(base)
    try:
        text = text_of(base, **changes)
    except BadModelFolder:
        return
    finally:
        assert base == before
    assert text_of(json.loads(text)) == text
    assert facts_of(text).shapes


@settings(max_examples=60, deadline=None)
@example(base=QWEN2, changes={"rope_parameters": {}})  # failed once
@given(
    base=st.sampled_from([GPT2, QWEN2]),
    changes=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=12), JSON, max_size=2),
)
def test_a_strange_text_is_refused_or_means_itself(base, changes):
    text = canonical(json.loads(text_of(base)) | changes)
    try:
        shape = hf_shape(text)
    except BadModelFolder:
        return
    assert text_of(json.loads(text)) == shape.hf
