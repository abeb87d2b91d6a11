"""`[model] hf` names a configuration of transformers, which the resolved manifest holds."""

import json

import pytest
import torch

from farflock.node.assembly.followers import Assignment, lead
from farflock.node.errors import RefusedByRun, Usage
from farflock.node.model.device import Device
from farflock.node.model.hf_shape import HfShape
from farflock.node.run.manifest import load, parse, resolve
from farflock.node.run.memory import Exchanged, needed_bytes, needed_device_bytes

transformers = pytest.importorskip("transformers")

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
GPT2 |= {"vocab_size": 256, "bos_token_id": 255, "eos_token_id": 255}
TRAIN = {"batch": 2, "seq": 32}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(GPT2))
    return tmp_path / "model"


def resolved(**model):
    return resolve({"model": model, "train": TRAIN})


def test_the_manifest_holds_the_configuration_and_no_path(folder):
    manifest = resolved(hf=str(folder), context=32)
    shape = manifest.plan().model
    assert isinstance(shape, HfShape)
    assert (shape.dim, shape.layers, shape.context, shape.vocab_size) == (16, 2, 32, 256)
    assert json.loads(shape.hf)["n_embd"] == 16
    assert str(folder) not in manifest.canonical().decode()
    assert parse(manifest.canonical()) == manifest
    assert resolved(hf=str(folder / "config.json"), context=32) == manifest
    assert resolved(hf=shape.hf, context=32) == manifest


def test_a_file_names_a_folder_relative_to_its_own(folder, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nhf = "model"\n[train]\nseq = 32\n')
    assert load(path).model.layers == 2


def test_memory_is_reckoned(folder):
    plan = resolved(hf=str(folder)).plan()
    weights = 4 * plan.model.parameters()
    assert plan.trained_values == plan.model.parameters()
    assert needed_bytes(plan, Exchanged()) > 3 * weights
    assert needed_device_bytes(plan) > 3 * weights


def test_weights_of_a_folder_are_named_by_their_hash(folder):
    torch.manual_seed(3)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).save_pretrained(folder)
    manifest = resolve({"model": {"hf": str(folder), "from": str(folder)}, "train": TRAIN})
    assert manifest.plan().start
    assert parse(manifest.canonical()) == manifest


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dim": 32}, "model.dim: model.hf has the sizes already"),
        ({"preset": "tiny"}, "model.preset"),
        ({"context": 65}, "its hf says 64"),
        ({"hf": 3}, "not a path"),
        ({"hf": "/nowhere"}, "No such file"),
        ({"hf": '{"model_type":"bert"}'}, "fills gaps"),
    ],
)
def test_what_does_not_fit_is_refused(folder, change, why):
    with pytest.raises(Usage, match=why):
        resolved(**({"hf": str(folder)} | change))


def test_stages_and_adapters_are_refused(folder):
    table = {"model": {"hf": str(folder)}, "train": TRAIN}
    with pytest.raises(Usage, match="not cut into stages"):
        resolve(table | {"pipeline": {"stages": 2}})
    lora = {"r": 2, "alpha": 4.0, "targets": ["q_proj"]}
    with pytest.raises(Usage, match="adapters are for native models"):
        resolve({"model": {"hf": str(folder)}, "train": TRAIN | {"lora": lora}})


def test_several_processes_do_not_share_one(folder):
    assignment = Assignment(resolved(hf=str(folder)).canonical(), "peer")
    with pytest.raises(Usage, match="start this peer as one process"):
        lead(None, assignment, None, Device())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dim = 16", "dim = 8"),
        ("n_embd", "n_embed"),
        ('\\"attn_pdrop\\":0.0', '\\"attn_pdrop\\":0.5'),
        ("gpt2", "gpt3"),
    ],
)
def test_a_peers_manifest_with_another_meaning_is_refused(folder, old, new):
    text = resolved(hf=str(folder)).canonical().decode()
    assert old in text
    with pytest.raises(RefusedByRun):
        parse(text.replace(old, new))
