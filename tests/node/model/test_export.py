"""Exports load in transformers with equal logits and ids; they are whole, and replace nothing that
no export wrote."""

import errno
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from farflock.node.model import export as module
from farflock.node.model.evaluation import measure
from farflock.node.model.export import ExportForm, ExportRefused, cut_into_shards, export
from farflock.node.model.hf_config import CLASSES, config_in
from farflock.node.model.llama import PRESETS, Llama, RopeScaling, build
from farflock.node.model.weights_folder import WeightsFolder, initial
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TINY = PRESETS["tiny"]
UNTIED = msgspec.structs.replace(TINY, tied=False, kv_heads=2)
BF16 = ExportForm("bf16")
TEXT = "To be, or not to be:\n\tthat is the question. Café — 한글 \x00\x7f"


def shape(architecture, **more):
    return msgspec.structs.replace(TINY, architecture=architecture, norm_eps=1e-6, **more)


FAMILIES = {
    "llama": TINY,
    "llama2": UNTIED,
    "llama3": msgspec.structs.replace(
        TINY, rope_scaling=RopeScaling(factor=8.0, low=1.0, high=4.0, trained_context=16)
    ),
    "mistral": shape("mistral", head_width=20, tied=False),
    "qwen2": shape("qwen2"),
    "qwen3": shape("qwen3", head_width=32, tied=False),
}


def write(folder, config=TINY, seed=0, **options):
    model = build(config, seed)
    with torch.no_grad():  # as trained weights: norms are not 1, biases not 0
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.linspace(-0.3, 0.4, len(weight)))
    weights = model.state_dict()
    export(folder, config, weights, ByteTokenizer(), "a card\n", **options)
    return model


def rounded(model):
    """The model with the weights that an export in bf16 has, in float32."""
    other = Llama(model.config)
    other.load_state_dict({name: x.bfloat16() for name, x in model.state_dict().items()})
    return other


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read(folder, name):
    return msgspec.json.decode((folder / name).read_bytes())


def test_the_folder_holds_a_whole_model_and_nothing_else_is_left(tmp_path):
    model, shares = build(TINY, 0), []
    written = export(
        tmp_path / "out",
        TINY,
        model.state_dict(),
        ByteTokenizer(),
        "a card\n",
        progress=shares.append,
    )
    assert sorted(content(tmp_path / "out")) == [
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
    assert written == 4 * TINY.parameters()
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_in_bf16_weights_are_rounded_to_the_nearest_and_the_configuration_says_so(tmp_path):
    model = write(tmp_path / "out", form=BF16)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert all(torch.equal(x.bfloat16(), weights[name]) for name, x in model.state_dict().items())
    assert read(tmp_path / "out", "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_shards_and_blocks_of_any_size_hold_the_same_weights(tmp_path, monkeypatch, dtype):
    write(tmp_path / "one", UNTIED, form=ExportForm(dtype))
    monkeypatch.setattr(module, "BLOCK_VALUES", 7)
    write(tmp_path / "many", UNTIED, form=ExportForm(dtype, shard_bytes=10_000))
    index = read(tmp_path / "many", "model.safetensors.index.json")
    shards = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == shards
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert index["metadata"]["total_size"] == UNTIED.parameters() * (2 if dtype == "bf16" else 4)
    whole = load_file(tmp_path / "one" / "model.safetensors")
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "many" / file)[name], whole[name])
    one, many = (WeightsFolder(tmp_path / name, UNTIED).hash for name in ("one", "many"))
    assert one == many


def test_files_are_as_full_as_they_may_be_and_a_large_tensor_has_its_own():
    sizes = {"a": 4, "b": 5, "c": 2, "d": 30, "e": 1, "f": 1}
    assert cut_into_shards(sizes, 9) == [["a", "b"], ["c"], ["d"], ["e", "f"]]
    assert cut_into_shards(sizes, 100) == [list(sizes)]


def test_equal_models_give_equal_bytes(tmp_path):
    for name in ("one", "other"):
        write(tmp_path / name, form=BF16)
    assert content(tmp_path / "one") == content(tmp_path / "other")


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_a_run_can_begin_from_its_export_as_the_architecture_that_it_was(tmp_path, config):
    model = write(tmp_path / "out", config)
    said = config_in(tmp_path / "out")
    assert said == config
    assert read(tmp_path / "out", "config.json")["architectures"] == [CLASSES[config.architecture]]
    again = initial(config, 0, WeightsFolder(tmp_path / "out", said))
    ids = torch.arange(config.context)[None]
    with torch.no_grad():
        assert torch.equal(model(ids), again(ids))


def test_configurations_and_generation_end_at_the_end_of_text(tmp_path):
    write(tmp_path / "out")
    assert read(tmp_path / "out", "config.json")["eos_token_id"] == 255
    generation = read(tmp_path / "out", "generation_config.json")
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (255, 255)
    assert (generation["temperature"], generation["top_k"]) == (0.8, 40)


def test_other_tokenizers_bring_their_own_file_and_transformers_gives_equal_ids(tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = JsonTokenizer(train_tokenizer([TEXT * 3], 280))
    model = build(msgspec.structs.replace(TINY, vocab_size=300), 0)
    export(tmp_path / "out", model.config, model.state_dict(), tokenizer, "card")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.raw
    assert read(tmp_path / "out", "config.json")["eos_token_id"] == tokenizer.end_of_text
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(TEXT)["input_ids"] == tokenizer.encode(TEXT).tolist()
    assert theirs.eos_token == tokenizer.end_name


def test_a_folder_that_holds_anything_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportRefused, match=r"is not empty; name another folder$"):
        write(tmp_path)
    with pytest.raises(ExportRefused, match=r"notes\.txt, which no export wrote, and stays as it"):
        write(tmp_path, force=True)
    assert content(tmp_path) == {"notes.txt": b"mine"}
    assert list(tmp_path.parent.glob(".*partial")) == []


def test_a_model_of_the_same_files_that_no_export_wrote_is_not_replaced(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(ExportRefused, match=r"config\.json, which no export wrote"):
        write(tmp_path, force=True)
    assert (tmp_path / "model.safetensors").read_bytes() == b"precious"


def test_force_replaces_an_earlier_export_as_a_whole(tmp_path):
    write(tmp_path / "out", UNTIED, form=ExportForm(shard_bytes=10_000))
    with pytest.raises(ExportRefused, match="or use --force to replace the export in it"):
        write(tmp_path / "out")
    write(tmp_path / "out", seed=3, force=True)
    write(tmp_path / "fresh", seed=3)
    assert content(tmp_path / "out") == content(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


@pytest.mark.parametrize("is_there", [False, True])
def test_an_empty_folder_and_one_below_others_are_taken(tmp_path, is_there):
    target = tmp_path / "some" / "where"
    if is_there:
        target.mkdir(parents=True)
    write(target)
    assert (target / "config.json").exists()


def test_a_link_leads_to_the_folder_that_is_written(tmp_path):
    (tmp_path / "large disk").mkdir()
    (tmp_path / "out").symlink_to("large disk")
    write(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "large disk" / "config.json").exists()


def test_what_a_crash_left_is_cleared_away(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "config.json").write_text("half")
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


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


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3.4e38])
def test_values_that_the_type_does_not_hold_are_refused(tmp_path, value):
    weights = dict(build(TINY, 0).state_dict())
    weights["model.norm.weight"] = torch.full((TINY.dim,), value)
    with pytest.raises(ExportRefused, match=r"model\.norm\.weight holds values that bfloat16 does"):
        export(tmp_path / "out", TINY, weights, ByteTokenizer(), "card", form=BF16)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("force", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("nth", [1, 4, 7, 9])
def test_a_full_disk_leaves_what_was_there_and_is_said_in_a_sentence(
    tmp_path, monkeypatch, force, nth
):
    if force:
        write(tmp_path / "out")
    before = {path.name: content(path) for path in tmp_path.iterdir()}
    calls, fsync = [], os.fsync

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == nth:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    form = ExportForm(shard_bytes=10_000)
    with pytest.raises(ExportRefused, match=r"^no room on the disk for .*, which stays as it was"):
        write(tmp_path / "out", UNTIED, form=form, force=force)
    assert {path.name: content(path) for path in tmp_path.iterdir()} == before


def test_an_old_export_is_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write(tmp_path / "out")
    before, replace = content(tmp_path / "out"), Path.replace

    def failing(self, target):
        if self.name.endswith(".partial"):
            raise OSError(errno.EACCES, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(ExportRefused, match=r"cannot write to .*out \(Permission denied\); choose"):
        write(tmp_path / "out", UNTIED, force=True)
    assert content(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_interrupted_export_leaves_nothing(tmp_path):
    def interrupted(share):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", progress=interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_transformers_computes_the_logits_of_the_model_with_the_weights_of_the_export(
    tmp_path, config
):
    transformers = pytest.importorskip("transformers")
    form = ExportForm("bf16", shard_bytes=10_000)
    model = rounded(write(tmp_path / "out", config, form=form))
    ids = torch.arange(2 * config.context).reshape(2, -1) % config.vocab_size
    load = transformers.AutoModelForCausalLM.from_pretrained
    exact, native = load(tmp_path / "out", dtype=torch.float32), load(tmp_path / "out")
    assert type(exact).__name__ == CLASSES[config.architecture]
    assert native.dtype == torch.bfloat16
    with torch.no_grad():
        ours = model(ids)
        assert float((ours - exact(ids).logits).abs().max()) <= 1e-5
        spread = float((model.bfloat16()(ids) - native(ids).logits).abs().max())
        assert spread <= 0.03 * float(ours.abs().max())  # a few roundings to 8 bits


@pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)
def test_in_fp32_the_logits_are_those_of_the_model(tmp_path, config):
    transformers = pytest.importorskip("transformers")
    model = write(tmp_path / "out", config)
    ids = torch.arange(2 * config.context).reshape(2, -1) % config.vocab_size
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert float((model(ids) - other(ids).logits).abs().max()) <= 1e-5


def test_transformers_reads_bytes_as_ids_and_stops_at_the_end_of_text(tmp_path):
    transformers = pytest.importorskip("transformers")
    write(tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer(TEXT)["input_ids"] == ByteTokenizer().encode(TEXT).tolist()
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 255)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert other.generation_config.eos_token_id == 255


@pytest.mark.parametrize("form", [ExportForm(), BF16], ids=["fp32", "bf16"])
def test_the_loss_of_an_export_is_that_of_transformers_on_the_same_tokens(tmp_path, form):
    transformers = pytest.importorskip("transformers")
    model = write(tmp_path / "out", form=form)
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    rows = np.random.default_rng(3).integers(0, 255, (5, 33)).astype(np.uint16)
    found = measure(rounded(model) if form is BF16 else model, rows).estimate
    ids = torch.from_numpy(rows.astype(np.int64))
    with torch.no_grad():
        losses = torch.stack([other(row[None], labels=row[None]).loss for row in ids]).double()
    assert found.mean == pytest.approx(float(losses.mean()), abs=1e-4)
    assert found.standard_error == pytest.approx(float(losses.std()) / math.sqrt(5), abs=1e-4)
