"""Exports load in transformers with equal logits and ids, and never overwrite by accident."""

import errno
import os

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from farflock.node.model.export import (
    ExportForm,
    ExportRefused,
    byte_level,
    cut_into_shards,
    export,
    printable_bytes,
)
from farflock.node.model.hf_config import hugging_face_config
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TINY = PRESETS["tiny"]
UNTIED = msgspec.structs.replace(TINY, tied=False, kv_heads=2)
TEXT = "To be, or not to be:\n\tthat is the question. Café — 한글 \x00\x7f"


def write(folder, config=TINY, tokenizer=None, **options):
    model = build(config, 0)
    export(folder, config, model.state_dict(), tokenizer or ByteTokenizer(), "# Card", **options)
    return model


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def read(folder):
    """All tensors of an export's files."""
    files = folder.glob("*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}


def name_of(raw, token):
    vocabulary = msgspec.json.decode(raw)["model"]["vocab"]
    return next(name for name, place in vocabulary.items() if place == token)


def learned(*, begin=False):
    """A tokenizer.json of 280 tokens, which puts token 65 in front of texts if asked to."""
    pytest.importorskip("tokenizers")
    raw = train_tokenizer([TEXT * 3 + "the cat and the hat that sat\n" * 9], 280)
    if not begin:
        return raw
    front, text = (
        {"SpecialToken": {"id": "x", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    name = name_of(raw, 65)
    template = {
        "type": "TemplateProcessing",
        "single": [front, text],
        "pair": [front, text],
        "special_tokens": {"x": {"id": "x", "ids": [65], "tokens": [name]}},
    }
    return msgspec.json.encode(msgspec.json.decode(raw) | {"post_processor": template})


def test_the_folder_holds_a_whole_model(tmp_path):
    model = write(tmp_path / "out")
    assert names(tmp_path / "out") == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert names(tmp_path) == ["out"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_rounded_to_the_type_that_the_configuration_names(tmp_path, dtype):
    model, kind = write(tmp_path / "out", form=ExportForm(dtype)), getattr(torch, dtype)
    weights = read(tmp_path / "out")
    assert all(torch.equal(x.to(kind), weights[name]) for name, x in model.state_dict().items())
    assert {x.dtype for x in weights.values()} == {kind}
    said = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    assert said["dtype"] == dtype


def test_a_number_that_the_type_cannot_hold_is_refused_and_nothing_is_written(tmp_path):
    weights = dict(build(TINY, 0).state_dict())
    weights["model.norm.weight"] = torch.full((24,), 1e6)
    with pytest.raises(ExportRefused, match=r"model.norm.weight holds .* float16 does not; choose"):
        export(tmp_path / "o", TINY, weights, ByteTokenizer(), "", form=ExportForm("float16"))
    assert names(tmp_path) == []


@given(sizes=st.lists(st.integers(0, 50)), limit=st.integers(1, 60))
def test_shards_keep_the_order_and_are_as_full_as_allowed(sizes, limit):
    sizes = {str(place): size for place, size in enumerate(sizes)}
    shards = cut_into_shards(sizes, limit)
    assert [name for shard in shards for name in shard] == list(sizes)
    for shard, after in zip(shards, [*shards[1:], None], strict=True):
        taken = sum(sizes[name] for name in shard)
        assert taken <= limit or len(shard) == 1
        assert after is None or taken + sizes[after[0]] > limit


def test_a_large_model_has_several_files_and_an_index(tmp_path):
    model = write(tmp_path / "out", form=ExportForm("float32", 20_000))
    weights = model.state_dict()
    index = msgspec.json.decode((tmp_path / "out" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == 4 * sum(x.numel() for x in weights.values())
    assert index["weight_map"].keys() == weights.keys()
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], weights[name])
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 2
    table = 4 * weights["model.embed_tokens.weight"].numel()
    assert all(file.stat().st_size < max(20_000, table) + 5_000 for file in files)


def test_a_chat_template_and_further_files_are_written(tmp_path):
    more = {"model.gguf": lambda path: path.write_bytes(b"GGUF")}
    write(tmp_path / "out", chat_template="{{ messages }}", more=more)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "out" / "model.gguf").read_bytes() == b"GGUF"


def test_the_configuration_says_what_the_model_is():
    said = hugging_face_config(UNTIED)
    assert said["architectures"] == ["LlamaForCausalLM"]
    assert (said["hidden_size"], said["num_hidden_layers"], said["num_key_value_heads"]) == (
        24,
        2,
        2,
    )
    assert said["head_dim"] * said["num_attention_heads"] == said["hidden_size"]
    assert said["tie_word_embeddings"] is False


def test_each_byte_has_a_printable_stand_in_of_its_own():
    stand_ins = printable_bytes()
    assert len(set(stand_ins)) == 256
    assert stand_ins[ord("A")] == "A"
    assert stand_ins[ord(" ")] == "Ġ"
    assert stand_ins[ord("\n")] == "Ċ"
    assert all(character.isprintable() and not character.isspace() for character in stand_ins)


def test_the_tokenizer_file_maps_each_byte_to_itself_and_255_to_the_end_of_text():
    described = msgspec.json.decode(byte_level())
    vocabulary = described["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == ord("A")
    assert vocabulary["<|endoftext|>"] == ByteTokenizer.end_of_text
    assert [token["id"] for token in described["added_tokens"]] == [255]


@given(text=st.text())
def test_the_tokenizer_file_gives_the_ids_and_the_text_of_bytes(text):
    pytest.importorskip("tokenizers")
    exported = JsonTokenizer(byte_level())
    assert exported.vocab_size == 256
    assert exported.encode(text).tolist() == ByteTokenizer().encode(text).tolist()
    assert exported.decode(exported.encode(text).tolist()) == text


def test_configurations_name_the_end_of_text(tmp_path):
    write(tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        said = msgspec.json.decode((tmp_path / "out" / name).read_bytes())
        assert (said["bos_token_id"], said["eos_token_id"]) == (None, 255)
    said = msgspec.json.decode((tmp_path / "out" / "tokenizer_config.json").read_bytes())
    assert (said["bos_token"], said["eos_token"]) == (None, "<|endoftext|>")


def test_a_tokenizer_from_a_file_is_exported_as_it_is(tmp_path):
    tokenizer = JsonTokenizer(learned())
    write(tmp_path / "out", tokenizer=tokenizer)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.raw
    said = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    assert (said["bos_token_id"], said["eos_token_id"]) == (None, 0)


def test_a_token_that_the_file_puts_in_front_is_named(tmp_path):
    write(tmp_path / "out", tokenizer=JsonTokenizer(learned(begin=True)))
    said = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    assert (said["bos_token_id"], said["eos_token_id"]) == (65, 0)
    said = msgspec.json.decode((tmp_path / "out" / "tokenizer_config.json").read_bytes())
    assert said["bos_token"] == name_of(learned(), 65)


def test_a_folder_that_holds_anything_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportRefused, match="is not empty; name another folder, or use --force"):
        write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert list(tmp_path.parent.glob(".*partial")) == []


def test_force_replaces_its_own_files_and_keeps_others(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "config.json").write_text("old")
    write(tmp_path, force=True)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert msgspec.json.decode((tmp_path / "config.json").read_bytes())["model_type"] == "llama"


def test_force_leaves_no_weights_of_an_earlier_export(tmp_path):
    more = {"model.gguf": lambda path: path.write_bytes(b"GGUF")}
    form = ExportForm("float32", 20_000)
    write(tmp_path / "out", form=form, chat_template="{{ messages }}", more=more)
    write(tmp_path / "out", force=True)
    write(tmp_path / "other")
    assert names(tmp_path / "out") == names(tmp_path / "other")
    write(tmp_path / "out", form=form, force=True)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_an_export_that_is_cut_short_among_its_moves_is_not_taken_for_whole(tmp_path, monkeypatch):
    write(tmp_path / "out")
    moved = []

    def failing(self, target):
        moved.append(target.name)
        if len(moved) == 3:
            raise OSError(errno.EIO, "Input/output error")
        os.rename(self, target)

    monkeypatch.setattr("pathlib.Path.replace", failing)
    with pytest.raises(ExportRefused, match="Input/output error"):
        write(tmp_path / "out", UNTIED, force=True)
    assert "config.json" not in names(tmp_path / "out")


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_weights_of_another_model_are_refused_unwritten(tmp_path, change):
    weights = dict(build(TINY, 0).state_dict())
    if change == "missing":
        del weights["model.norm.weight"]
    elif change == "extra":
        weights["model.extra.weight"] = torch.zeros(1)
    else:
        weights["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(
        ExportRefused, match=r"1 tensors do not fit the configuration, the first of them model\."
    ):
        export(tmp_path / "out", TINY, weights, ByteTokenizer(), "card")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    write(tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    settled = []

    def full(descriptor):
        settled.append(descriptor)
        if len(settled) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportRefused, match=r"No space left on device.*choose a folder with space"):
        write(tmp_path / "out", UNTIED, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (TINY, ExportForm()),
        (UNTIED, ExportForm("float32", 20_000)),
        (PRESETS["demo"], ExportForm("bfloat16")),
        (UNTIED, ExportForm("float16", 20_000)),
    ],
    ids=["tied-grouped", "untied-shards", "demo-bf16", "untied-shards-fp16"],
)
def test_transformers_loads_the_export_with_equal_logits_and_ids(tmp_path, config, form):
    transformers = pytest.importorskip("transformers")
    model = write(tmp_path / "out", config, form=form)
    ids = torch.arange(2 * config.context).reshape(2, -1) % config.vocab_size
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert {x.dtype for x in other.parameters()} == {getattr(torch, form.dtype)}
    with torch.no_grad():
        # products in the narrow type round everywhere; with the weights' own rounding all is exact
        model.load_state_dict(read(tmp_path / "out"))
        assert float((model(ids) - other.float()(ids).logits).abs().max()) <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == ByteTokenizer().encode(TEXT).tolist()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 255)
    assert other.generation_config.eos_token_id == other.config.eos_token_id == 255


def test_transformers_gives_the_ids_of_a_tokenizer_from_a_file(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = JsonTokenizer(learned())
    write(tmp_path / "out", msgspec.structs.replace(TINY, vocab_size=300), ours)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == ours.encode(TEXT).tolist()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert tokenizer.eos_token_id == ours.end_of_text
