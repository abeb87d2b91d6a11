"""`farflock export` writes a folder in bf16, and says what it wrote or why it did not."""

import json

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from farflock.node.model.llama import PRESETS, build
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TINY = PRESETS["tiny"]
MANIFEST = resolve({"run": {"name": "plays"}, "model": {"preset": "tiny"}}).canonical().decode()
META = {"run": "ab12", "step": 7, "manifest": MANIFEST}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of a tiny model."""
    files = {"config.json": msgspec.json.encode(TINY)}
    parts = {"model": dict(build(TINY, 0).named_parameters())}
    return checkpoint.save(tmp_path / "home", 7, parts, META, files)


def test_it_writes_bf16_and_with_an_option_fp32(farflock, saved, tmp_path):
    code, out, err = farflock("export", saved.parent, tmp_path / "half", "--json")
    assert code == 0
    assert json.loads(out.splitlines()[-1]) == {
        "checkpoint": str(saved),
        "folder": str(tmp_path / "half"),
        "dtype": "bf16",
        "bytes": 2 * TINY.parameters(),
    }
    assert "exporting: 100%" in err
    code, out, _ = farflock("export", saved, tmp_path / "full", "--dtype", "fp32")
    assert code == 0
    assert f"{TINY.parameters():,} parameters in fp32" in out
    kinds = {
        name: {x.dtype for x in load_file(tmp_path / name / "model.safetensors").values()}
        for name in ("half", "full")
    }
    assert kinds == {"half": {torch.bfloat16}, "full": {torch.float32}}


def test_the_card_has_the_facts_of_the_run(farflock, saved, tmp_path):
    assert farflock("export", saved, tmp_path / "out")[0] == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "\n# plays\n" in card
    assert f"{TINY.parameters():,}, written in bf16" in card
    assert "| run | `ab12` |" in card
    assert "| bytes of `" in card
    assert MANIFEST in card


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_a_token_that_ends_a_text_can_be_named_and_is_asked_for(farflock, tmp_path, named):
    raw = train_tokenizer(["the cat and the hat\n" * 5], 270)
    raw = raw.replace(b"<|endoftext|>", b"<|stop|>")
    wide = msgspec.structs.replace(TINY, vocab_size=270)
    files = {"config.json": msgspec.json.encode(wide), "tokenizer.json": raw}
    parts = {"model": dict(build(wide, 0).named_parameters())}
    checkpoint.save(tmp_path / "home", 7, parts, {}, files)
    words = ["--end-of-text", "<|stop|>"] if named else []
    code, out, _ = farflock("export", tmp_path / "home", tmp_path / "out", *words)
    assert code == 0
    assert ("name it with --end-of-text" in out) is not named
    said = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())["eos_token_id"]
    assert said == (JsonTokenizer(raw, "<|stop|>").end_of_text if named else None)


def test_shards_are_as_large_as_is_asked_for(farflock, saved, tmp_path):
    code, _, _ = farflock("export", saved, tmp_path / "out", "--shard-size", "10kB")
    assert code == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize(
    ("words", "exit_code", "sentence"),
    [
        (["{}/none", "{}/out"], 1, "there is no checkpoint at"),
        (["{}/home", "{}/home"], 1, "is not empty; name another folder"),
        (["{}/home", "{}/home", "--force"], 1, "step-7, which no export wrote, and stays as it is"),
        (["{}/home", "{}/out", "--dtype", "fp8"], 2, "'fp8' is not one of 'bf16', 'fp32'"),
        (["{}/home", "{}/out", "--end-of-text", "x"], 2, "the model reads bytes, and 255 ends a"),
        (["{}/home", "{}/out", "--shard-size", "big"], 2, "'big' is not a size; write it as in"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_remedy(
    farflock, saved, tmp_path, words, exit_code, sentence
):
    code, _, err = farflock("export", *(word.format(tmp_path) for word in words))
    assert code == exit_code
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
