"""peft and Farflock read each other's adapters and compute the same with them; nothing else is
read."""

import errno
import os

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from farflock.node.model.export import export
from farflock.node.model.llama import PRESETS, build
from farflock.node.model.lora import (
    ADAPTER_TARGETS,
    LoraTerms,
    adapted_layers,
    adapter_shapes,
    add_adapters,
    merge_adapters,
)
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.use.adapter_file import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    MAX_ADAPTER_CONFIG_BYTES,
    AdapterRefused,
    read_adapters,
    write_adapters,
)

TINY = PRESETS["tiny"]
UNTIED = msgspec.structs.replace(TINY, tied=False)
EXPERTS = msgspec.structs.replace(TINY, experts=3, experts_per_token=2, balance=0.01)
USUAL_TERMS = LoraTerms(r=4, alpha=8)
ALL_TERMS = LoraTerms(r=3, alpha=4.5, targets=ADAPTER_TARGETS)
KINDS = [(TINY, ALL_TERMS), (UNTIED, USUAL_TERMS), (EXPERTS, USUAL_TERMS)]
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


def adapted(config=TINY, terms=USUAL_TERMS):
    """A model with adapters that have values as of training."""
    model = build(config, 1)
    add_adapters(model, terms, 7)
    chance = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for _, layer in adapted_layers(model):
            layer.lora_B.weight.normal_(0, 0.1, generator=chance)
    return model


def adapters_of(model):
    return {name: x.detach() for name, x in model.named_parameters() if x.requires_grad}


def put(model, adapters):
    """Put adapters into a model that has others."""
    places = dict(model.named_parameters())
    with torch.no_grad():
        for name, x in adapters.items():
            places[name].copy_(x)
    return model


def tokens():
    return torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def folder(tmp_path):
    """A folder of adapters for TINY."""
    made = tmp_path / "adapter"
    write_adapters(made, TINY, USUAL_TERMS, adapters_of(adapted()), "someone/model", card="# Card")
    return made


def change(folder, **fields):
    """Change the configuration of a folder."""
    path = folder / ADAPTER_CONFIG_NAME
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | fields))


@pytest.mark.parametrize(("config", "terms"), KINDS)
def test_what_is_written_is_read(tmp_path, config, terms):
    adapters = adapters_of(adapted(config, terms))
    write_adapters(tmp_path / "a" / "b", config, terms, adapters, "someone/model")
    found = read_adapters(tmp_path / "a" / "b", config)
    assert (found.terms, found.base) == (terms, "someone/model")
    assert list(found.adapters) == list(adapter_shapes(config, terms))
    assert all(torch.equal(x, adapters[name]) for name, x in found.adapters.items())
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert names == [ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(
    r=st.integers(1, 40),
    alpha=st.floats(1e-3, 1e9) | st.sampled_from([1e300, 2.0**53]),
    targets=st.lists(st.sampled_from(ADAPTER_TARGETS), min_size=1, unique=True),
    base=st.text(max_size=20),
)
def test_any_terms_survive(tmp_path, r, alpha, targets, base):
    terms = LoraTerms(r=r, alpha=alpha, targets=tuple(targets))
    zeros = {name: torch.zeros(shape) for name, shape in adapter_shapes(TINY, terms).items()}
    write_adapters(tmp_path / "x", TINY, terms, zeros, base, force=True)
    found = read_adapters(tmp_path / "x", TINY)
    assert (found.terms.r, found.terms.alpha, found.base) == (r, alpha, base)
    assert sorted(found.terms.targets) == sorted(targets)
    assert found.adapters.keys() == zeros.keys()


def test_a_folder_with_files_is_not_written_to(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before["README.md"] == b"# Card"
    zeros = {name: x * 0 for name, x in adapters_of(adapted()).items()}
    with pytest.raises(AdapterRefused, match="is not empty; name another folder"):
        write_adapters(folder, TINY, USUAL_TERMS, zeros, "other")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_adapters(folder, TINY, USUAL_TERMS, zeros, "other", force=True)
    found = read_adapters(folder, TINY)
    assert found.base == "other"
    assert not any(x.any() for x in found.adapters.values())


def test_a_full_disk_leaves_what_was_there(folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AdapterRefused, match="No space left"):
        write_adapters(folder, TINY, USUAL_TERMS, adapters_of(adapted()), "other", force=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_adapters_that_do_not_fit_their_terms_are_not_written(tmp_path):
    adapters = adapters_of(adapted())
    with pytest.raises(AdapterRefused, match=r"do not fit their terms: of \d+ tensors"):
        write_adapters(tmp_path / "x", TINY, ALL_TERMS, adapters, "base")
    next(iter(adapters.values()))[0, 0] = torch.nan
    with pytest.raises(AdapterRefused, match=r"lora_A\.weight holds NaN or infinity"):
        write_adapters(tmp_path / "x", TINY, USUAL_TERMS, adapters, "base")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"peft_type": "LOHA"}, "of the type 'LOHA', and only LORA is read"),
        ({"use_rslora": True}, r"use_rslora is True, which means a factor of alpha / √r"),
        ({"use_dora": True}, r"use_dora is True, which means trained magnitudes"),
        ({"bias": "all"}, "bias is all, which means trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is .*, which means whole layers"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern is .* adapters of different ranks"),
        ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern is .* of different factors"),
        ({"layers_to_transform": [0]}, "layers_to_transform is .* some of the layers"),
        ({"exclude_modules": ["layers.0"]}, "exclude_modules is .* plain LoRA does not have"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is True, which means what plain LoRA"),
        ({"use_novelty": 1}, "use_novelty is 1, which means what plain LoRA does not have"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which may have changed"),
        ({"target_modules": "all-linear"}, "by 'all-linear', and not in a list"),
        ({"target_modules": None}, "by 'None', and not in a list"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "names 'embed_tokens'"),
        ({"target_modules": ["q_proj"] * 2}, "names a layer twice"),
        ({"target_modules": []}, "targets is empty"),
        ({"r": 0}, r"lora\.r is 0"),
        ({"r": 10**30}, "cannot be read|lora.r is"),
        ({"r": 1.5}, "cannot be read"),
        ({"lora_alpha": 0}, r"lora\.alpha is 0"),
        ({"lora_alpha": "8"}, "cannot be read"),
        ({"base_model_name_or_path": 3}, "cannot be read"),
    ],
)
def test_what_is_not_plain_lora_is_refused_in_words(folder, fields, why):
    path = folder / ADAPTER_CONFIG_NAME
    fields = msgspec.json.decode(path.read_bytes()) | fields
    raw = str(fields.pop("r")).encode()  # a number may be larger than msgspec writes
    path.write_bytes(msgspec.json.encode(fields)[:-1] + b',"r":' + raw + b"}")
    with pytest.raises(AdapterRefused, match=why):
        read_adapters(folder, TINY)


def test_what_has_no_effect_is_not_asked_about(folder):
    change(folder, lora_dropout=0.1, use_later=False, peft_version="9.0", later_config=None)
    assert read_adapters(folder, TINY).terms == USUAL_TERMS


def test_the_order_of_a_set_in_the_configuration_means_nothing(folder):
    change(folder, target_modules=["v_proj", "q_proj"])
    assert read_adapters(folder, TINY).terms == USUAL_TERMS


def test_experts_adapters_are_refused(folder):
    change(folder, target_modules=["q_proj", "up_proj"])
    with pytest.raises(AdapterRefused, match="this model has experts"):
        read_adapters(folder, EXPERTS)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"r": 1}'])
def test_a_configuration_that_is_none_is_refused(folder, raw):
    (folder / ADAPTER_CONFIG_NAME).write_bytes(raw)
    with pytest.raises(AdapterRefused, match="cannot be read"):
        read_adapters(folder, TINY)


def test_a_large_configuration_is_not_read(folder):
    (folder / ADAPTER_CONFIG_NAME).write_bytes(b" " * (MAX_ADAPTER_CONFIG_BYTES + 1))
    with pytest.raises(AdapterRefused, match="is larger than 1,048,576 bytes"):
        read_adapters(folder, TINY)


def test_missing_files_are_named(folder):
    with pytest.raises(AdapterRefused, match="is no folder of adapters"):
        read_adapters(folder / "other", TINY)
    (folder / ADAPTER_WEIGHTS_NAME).unlink()
    with pytest.raises(AdapterRefused, match=r"has no adapter_model\.safetensors .*No such file"):
        read_adapters(folder, TINY)
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(AdapterRefused, match="pickled weights, which may run code"):
        read_adapters(folder, TINY)
    (folder / ADAPTER_WEIGHTS_NAME).mkdir()
    with pytest.raises(AdapterRefused):
        read_adapters(folder, TINY)


def without_one(tensors):
    del tensors[FIRST]


def with_another(tensors):
    tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)


def of_another_shape(tensors):
    tensors[FIRST] = tensors[FIRST].t().contiguous()


def of_whole_numbers(tensors):
    tensors[FIRST] = tensors[FIRST].int()


def with_infinity(tensors):
    tensors[FIRST][0, 0] = torch.inf


def too_large(tensors):
    tensors["x"] = torch.zeros(5 * 1024 * 1024)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (without_one, r"of 1 tensors, .*q_proj\.lora_A\.weight is nothing, and a tensor of shape"),
        (with_another, r"lm_head\.weight is a tensor of shape \(2, 2\), and nothing is needed"),
        (of_another_shape, r"is a tensor of shape \(24, 4\), and a tensor of shape \(4, 24\)"),
        (of_whole_numbers, "is of type I32, and adapters are F32, F16, BF16"),
        (with_infinity, "holds NaN or infinity"),
        (too_large, r"has [\d,]+ bytes, and such adapters at most"),
    ],
)
def test_other_tensors_are_refused(folder, spoil, why):
    path = folder / ADAPTER_WEIGHTS_NAME
    tensors = load_file(path)
    spoil(tensors)
    save_file(tensors, path)
    with pytest.raises(AdapterRefused, match=why):
        read_adapters(folder, TINY)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves_are_read_as_float32(folder, kind):
    path = folder / ADAPTER_WEIGHTS_NAME
    tensors = {name: x.to(kind) for name, x in load_file(path).items()}
    save_file(tensors, path)
    found = read_adapters(folder, TINY).adapters
    assert {x.dtype for x in found.values()} == {torch.float32}
    assert torch.equal(found[FIRST.removeprefix("base_model.model.")], tensors[FIRST].float())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_is_read_as_finite_tensors_or_refused(folder, data):
    whole = (folder / ADAPTER_WEIGHTS_NAME).read_bytes()
    head = 8 + int.from_bytes(whole[:8], "little")
    at = data.draw(st.integers(0, head) | st.integers(0, len(whole) - 1))
    spoilt = bytearray(whole)
    spoilt[at] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.none() | st.integers(0, len(whole) - 1))
    (folder / "spoilt").mkdir(exist_ok=True)
    (folder / "spoilt" / ADAPTER_CONFIG_NAME).write_bytes(
        (folder / ADAPTER_CONFIG_NAME).read_bytes()
    )
    (folder / "spoilt" / ADAPTER_WEIGHTS_NAME).write_bytes(spoilt[:cut])
    try:
        found = read_adapters(folder / "spoilt", TINY).adapters
    except AdapterRefused as error:
        assert len(str(error)) < 2_000
    else:
        assert cut is None
        assert {n: tuple(x.shape) for n, x in found.items()} == adapter_shapes(TINY, USUAL_TERMS)
        assert all(torch.isfinite(x).all() for x in found.values())


@pytest.fixture(scope="module")
def peft():
    pytest.importorskip("transformers")
    return pytest.importorskip("peft")


def exported(folder, config):
    """The base that adapters of `adapted` are for, as transformers has it."""
    import transformers

    base = build(config, 1)
    export(folder, config, base.state_dict(), ByteTokenizer(), "# Card", force=True)
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize(("config", "terms"), KINDS)
def test_peft_computes_the_same_and_merges_the_same(peft, tmp_path, config, terms):
    model, x = adapted(config, terms), tokens()
    write_adapters(tmp_path / "adapter", config, terms, adapters_of(model), str(tmp_path / "base"))
    base = exported(tmp_path / "base", config)
    with torch.no_grad():
        plain = base(x).logits
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        logits = theirs(x).logits
        assert float((model(x) - logits).abs().max()) <= 1e-5
        assert float((plain - logits).abs().max()) > 1e-2
        merged = dict(theirs.merge_and_unload().named_parameters())
        merge_adapters(model)
        layers = [name for name in adapter_shapes(config, terms) if name.endswith("_A.weight")]
        for name in (name.replace(".lora_A", "") for name in layers):
            ours = dict(model.named_parameters())[name]
            torch.testing.assert_close(ours, merged[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("config", [TINY, EXPERTS])
def test_what_peft_writes_is_read(peft, tmp_path, config):
    lora = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=["o_proj", "k_proj"], task_type="CAUSAL_LM"
    )
    made = peft.get_peft_model(exported(tmp_path / "base", config), lora).eval()
    chance = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if "lora_B" in name:
                x.normal_(0, 0.1, generator=chance)
    made.save_pretrained(tmp_path / "adapter")
    found = read_adapters(tmp_path / "adapter", config)
    assert found.terms == LoraTerms(r=5, alpha=7, targets=("k_proj", "o_proj"))
    assert found.base == str(tmp_path / "base")
    model = build(config, 1)
    add_adapters(model, found.terms, 0)
    with torch.no_grad():
        ours, theirs = put(model, found.adapters)(tokens()), made(tokens()).logits
    assert float((ours - theirs).abs().max()) <= 1e-5
