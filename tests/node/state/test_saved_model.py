"""A checkpoint becomes a model again, or says in one sentence why it cannot."""

import msgspec
import pytest
import torch

from farflock.node.model.export import ExportForm, export
from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.llama import PRESETS, ModelConfig, build
from farflock.node.model.weights_folder import WeightsFolder
from farflock.node.state import checkpoint
from farflock.node.state.checkpoint import CheckpointCorrupt, CheckpointError
from farflock.node.state.saved_model import open_model
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import BadTokenizer, ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TINY = PRESETS["tiny"]


def write(folder, step=3, *, seed=0, files=None, parts=None):
    model = build(TINY, seed)
    files = {"config.json": msgspec.json.encode(TINY)} if files is None else files
    parts = {"model": dict(model.named_parameters())} if parts is None else parts
    return checkpoint.save(folder, step, parts, {"run": "ab12", "step": step, "tokens": 640}, files)


def test_the_model_computes_what_the_saved_one_computed(tmp_path):
    saved = open_model(write(tmp_path, seed=5))
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(saved.model(tokens), build(TINY, 5)(tokens))
    assert saved.meta == {"run": "ab12", "step": 3, "tokens": 640}
    assert not saved.model.training


def test_the_tokenizer_is_beside_the_weights_unless_tokens_are_bytes(tmp_path):
    assert isinstance(open_model(write(tmp_path, 1)).tokenizer, ByteTokenizer)
    raw = train_tokenizer(["the cat and the hat, and that is that.\n"], 270)
    files = {"config.json": msgspec.json.encode(TINY), "tokenizer.json": raw}
    assert open_model(write(tmp_path, 2, files=files)).tokenizer.raw == raw


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_a_folder_of_checkpoints_stands_for_its_newest(tmp_path, inside):
    write(tmp_path / inside, 1, seed=1)
    newest = write(tmp_path / inside, 20, seed=2)
    assert open_model(tmp_path).folder.samefile(newest)


def test_a_broken_newest_checkpoint_is_passed_over(tmp_path):
    whole = write(tmp_path, 1)
    (write(tmp_path, 2) / "model.safetensors").write_bytes(b"short")
    assert open_model(tmp_path).folder == whole


def test_if_none_is_whole_it_is_said(tmp_path):
    (write(tmp_path, 2) / "config.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"no checkpoint in .* is intact"):
        open_model(tmp_path)


def test_a_folder_without_checkpoints_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*step-N"):
        open_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("files", "parts", "reason"),
    [
        ({}, None, "holds no config.json"),
        ({"config.json": b"{"}, None, "does not describe a model"),
        ({"config.json": b'{"dim": -1}'}, None, "does not describe a model"),
        ({"config.json": b"[" * 100_000}, None, "does not describe a model"),
        ({"config.json": msgspec.json.encode(PRESETS["demo"])}, None, "do not fit its config.json"),
        (None, {"other": {"x": torch.zeros(1)}}, "holds no model"),
    ],
)
def test_a_checkpoint_that_is_no_model_is_refused(tmp_path, files, parts, reason):
    with pytest.raises(CheckpointCorrupt, match=reason):
        open_model(write(tmp_path, files=files, parts=parts))


def test_an_absurd_size_is_refused_before_memory_is_taken(tmp_path):
    huge = msgspec.structs.replace(
        TINY, dim=65_536, layers=1_024, heads=1, kv_heads=1, ffn_dim=262_144
    )
    with pytest.raises(CheckpointCorrupt, match=r"do not fit its config\.json"):
        open_model(write(tmp_path, files={"config.json": msgspec.json.encode(huge)}))


CUT = ModelConfig(
    vocab_size=256, dim=24, layers=3, heads=2, kv_heads=1, ffn_dim=48, context=64, tied=False
)
STAGES = (range(1), range(1, 2), range(2, 3))


def write_stage(folder, index, *, step=3, seed=0, config=CUT, run="ab12", tokens=640):
    weights = dict(build(config, seed, STAGES[index]).named_parameters())
    files = {"config.json": msgspec.json.encode(config)}
    meta = {"run": run, "step": step, "tokens": tokens}
    return checkpoint.save(folder / f"stage-{index}", step, {"model": weights}, meta, files)


@pytest.mark.parametrize("inside", [".", "checkpoints"])
def test_the_newest_checkpoints_of_all_stages_make_up_the_model(tmp_path, inside):
    for index in range(3):
        write_stage(tmp_path / inside, index, step=1, seed=9)
        write_stage(tmp_path / inside, index, step=5 + index, seed=4, tokens=640 - 8 * index)
    saved = open_model(tmp_path)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(saved.model(tokens), build(CUT, 4)(tokens))
    assert saved.meta == {"run": "ab12", "step": 7, "tokens": 624}, (
        "as far as the stage that is behind"
    )
    assert saved.folder.samefile(tmp_path / inside)


def test_a_stage_that_is_missing_is_named_with_the_remedy(tmp_path):
    for index in (0, 2):
        write_stage(tmp_path, index)
    with pytest.raises(
        CheckpointError, match=r"stage-0, stage-2 .* lack \d+ .*model.layers.1.*; copy the other"
    ):
        open_model(tmp_path)


def test_stages_of_several_runs_or_models_make_up_none(tmp_path):
    for index in range(3):
        write_stage(tmp_path / "runs", index, run=f"run{index // 2}")
        write_stage(
            tmp_path / "models", index, config=msgspec.structs.replace(CUT, context=64 + index)
        )
    for name in ("runs", "models"):
        with pytest.raises(CheckpointError, match="belong to several runs"):
            open_model(tmp_path / name)


def test_stages_of_another_cut_that_contradict_each_other_make_up_none(tmp_path):
    for index in range(3):
        write_stage(tmp_path, index)
    whole = dict(build(CUT, 7).named_parameters())
    files = {"config.json": msgspec.json.encode(CUT)}
    checkpoint.save(tmp_path / "stage-7", 3, {"model": whole}, {"run": "ab12", "tokens": 1}, files)
    with pytest.raises(
        CheckpointCorrupt, match=r"do not make up a model: .* differs between two pieces"
    ):
        open_model(tmp_path)


def test_whole_checkpoints_beside_stages_come_first_and_other_folders_are_not_looked_at(tmp_path):
    write_stage(tmp_path, 0)
    (tmp_path / "stage-x").mkdir()
    newest = write(tmp_path, 4, seed=2)
    assert open_model(tmp_path).folder == newest


def exported(folder, config=TINY, dtype="bf16", tokenizer=None, seed=5):
    """A folder in Hugging Face's form."""
    weights = build(config, seed).state_dict()
    form = ExportForm(dtype)
    export(folder, config, weights, tokenizer or ByteTokenizer(), "a card", form=form)
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_hugging_face_folder_is_a_model_too(tmp_path, dtype):
    saved = open_model(exported(tmp_path / "out", dtype=dtype))
    tokens, model = torch.arange(20)[None], build(TINY, 5)
    if dtype == "bf16":
        model.load_state_dict({name: x.bfloat16() for name, x in model.state_dict().items()})
    with torch.no_grad():
        assert torch.equal(saved.model(tokens), model(tokens))
    assert saved.weights.keys() == dict(model.named_parameters()).keys()
    assert len(saved.weights) == len(list(model.parameters()))
    assert isinstance(saved.tokenizer, ByteTokenizer)
    assert (saved.config, saved.meta) == (TINY, {})


def test_the_configuration_of_such_a_folder_says_what_ends_a_text(tmp_path):
    raw = train_tokenizer(["the cat and the hat, and that is that.\n"], 270)
    raw = raw.replace(b"<|endoftext|>", b"<|unheard of|>")
    wide = msgspec.structs.replace(TINY, vocab_size=270)
    named = JsonTokenizer(raw, "<|unheard of|>")
    folder = exported(tmp_path / "out", wide, tokenizer=named)
    assert open_model(folder).tokenizer.end_name == "<|unheard of|>"
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    for said, end in (([7, 8], 7), ([], None), (None, None)):
        text = msgspec.json.encode(config | {"eos_token_id": said})
        (folder / "config.json").write_bytes(text)
        assert open_model(folder).tokenizer.end_of_text == end


def test_a_hugging_face_folder_that_is_no_model_is_refused(tmp_path):
    folder = exported(tmp_path / "out")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadTokenizer, match=r"out/tokenizer\.json cannot be read"):
        open_model(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadModelFolder, match="it has no weights"):
        open_model(folder)


def test_opening_a_model_takes_no_memory_for_its_weights_before_they_are_asked_for(
    tmp_path, monkeypatch
):
    """A checkpoint's weights are those of its files; a folder's are read one at a time."""
    read = []
    fill = WeightsFolder.fill
    monkeypatch.setattr(
        WeightsFolder, "fill", lambda self, name, x: (read.append(name), fill(self, name, x))
    )
    saved = open_model(exported(tmp_path / "out"))
    assert not read
    assert saved.weights["model.norm.weight"].dtype == torch.float32
    assert read == ["model.norm.weight"]
