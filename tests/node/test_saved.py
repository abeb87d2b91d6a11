"""A checkpoint becomes a model again, or says in one sentence why it cannot."""

import msgspec
import pytest
import torch

from farflock.node import checkpoint
from farflock.node.checkpoint import CheckpointCorrupt, CheckpointError
from farflock.node.model import PRESETS, build
from farflock.node.saved import open_model

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
    assert saved.facts() == {"run": "ab12", "step": "3", "tokens": "640"}
    assert not saved.model.training


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
    with pytest.raises(CheckpointCorrupt, match=r"no checkpoint in .* is whole"):
        open_model(tmp_path)


def test_a_folder_without_checkpoints_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*step-N"):
        open_model(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("files", "parts", "reason"),
    [
        ({}, None, "holds no config.json"),
        ({"config.json": b"{"}, None, "is no model's"),
        ({"config.json": b'{"dim": -1}'}, None, "is no model's"),
        ({"config.json": b"[" * 100_000}, None, "is no model's"),
        ({"config.json": msgspec.json.encode(PRESETS["demo"])}, None, "do not fit its config.json"),
        (None, {"other": {"x": torch.zeros(1)}}, "holds no model"),
    ],
)
def test_a_checkpoint_that_is_no_model_is_refused(tmp_path, files, parts, reason):
    with pytest.raises(CheckpointCorrupt, match=reason):
        open_model(write(tmp_path, files=files, parts=parts))


def test_an_absurd_size_is_refused_before_memory_is_taken(tmp_path):
    huge = msgspec.structs.replace(TINY, dim=65_536, layers=1_024, heads=1, kv_heads=1, ffn_dim=262_144)
    with pytest.raises(CheckpointError, match="must be damaged"):
        open_model(write(tmp_path, files={"config.json": msgspec.json.encode(huge)}))
