"""Exports load in transformers with equal logits and ids, and never overwrite by accident."""

import errno
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from farflock.node.model.export import (
    ExportRefused,
    export,
    printable_bytes,
    tokenizer_files,
)
from farflock.node.model.hf_config import hugging_face_config
from farflock.node.model.llama import PRESETS, build
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TINY = PRESETS["tiny"]
UNTIED = msgspec.structs.replace(TINY, tied=False, kv_heads=2)
TEXT = "To be, or not to be:\n\tthat is the question. Café — 한글 \x00\x7f"


def write(folder, config=TINY, **options):
    model = build(config, 0)
    export(folder, config, model.state_dict(), ByteTokenizer(), "a card", **options)
    return model


def test_the_folder_holds_a_whole_model(tmp_path):
    model = write(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


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


def test_the_tokenizer_file_maps_each_byte_to_itself():
    vocabulary = msgspec.json.decode(tokenizer_files(ByteTokenizer(), 64)["tokenizer.json"])[
        "model"
    ]["vocab"]
    assert sorted(vocabulary.values()) == list(range(256))
    assert vocabulary["A"] == ord("A")


def test_other_tokenizers_bring_their_own_file_and_transformers_gives_equal_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = JsonTokenizer(train_tokenizer([TEXT * 3], 280))
    model = build(msgspec.structs.replace(TINY, vocab_size=300), 0)
    export(tmp_path / "out", model.config, model.state_dict(), tokenizer, "card")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.raw
    said = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    assert said["eos_token_id"] == tokenizer.end_of_text
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist()
    assert theirs.eos_token == tokenizer.end_name


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
    written = []

    def full(self, content):
        written.append(self)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        with self.open("wb") as file:
            return file.write(content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ExportRefused, match=r"No space left on device.*choose a folder with space"):
        write(tmp_path / "out", UNTIED, force=True)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    "config", [TINY, UNTIED, PRESETS["demo"]], ids=["tied-grouped", "untied", "demo"]
)
def test_transformers_loads_the_export_with_equal_logits_and_ids(tmp_path, config):
    transformers = pytest.importorskip("transformers")
    model = write(tmp_path / "out", config)
    ids = torch.arange(2 * config.context).reshape(2, -1) % config.vocab_size
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert float((model(ids) - other(ids).logits).abs().max()) <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == ByteTokenizer().encode(TEXT).tolist()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
