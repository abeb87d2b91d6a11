"""`farflock export` and `farflock generate` use the tokenizer that a checkpoint brings, and
`farflock push` takes what `export` wrote."""

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from farflock.node.model.llama import PRESETS, build
from farflock.node.state import checkpoint
from farflock.node.tokens.tokenizer_training import train_tokenizer

TINY = msgspec.structs.replace(PRESETS["tiny"], vocab_size=280)


@pytest.fixture(params=["bytes", "file"])
def saved(request, tmp_path):
    """A checkpoint's folder, and its tokenizer.json or None."""
    raw = None
    if request.param == "file":
        pytest.importorskip("tokenizers")
        raw = train_tokenizer(["the cat and the hat, and that is that\n" * 9], 270)
    files = {"config.json": msgspec.json.encode(TINY)}
    files |= {} if raw is None else {"tokenizer.json": raw}
    parts = {"model": dict(build(TINY, 0).named_parameters())}
    meta = {"run": "ab12", "end_of_text": 255 if raw is None else 0}
    return checkpoint.save(tmp_path / "saved", 3, parts, meta, files), raw


def test_the_export_has_the_tokenizer_and_its_end_of_text(farflock, saved, tmp_path):
    folder, raw = saved
    assert farflock("export", folder, tmp_path / "out")[0] == 0
    exported = (tmp_path / "out" / "tokenizer.json").read_bytes()
    assert exported == raw or raw is None
    said = msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())
    assert said["eos_token_id"] == (255 if raw is None else 0)


def test_text_is_sampled_with_the_tokenizer(farflock, saved):
    folder, _ = saved
    code, out, _ = farflock("generate", folder, "--prompt", "the", "--tokens", 9, "--device", "cpu")
    assert code == 0
    assert out.startswith("the")
    assert (
        out == farflock("generate", folder, "--prompt", "the", "--tokens", 9, "--device", "cpu")[1]
    )


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(farflock, tmp_path):
    pytest.importorskip("tokenizers")
    raw = train_tokenizer(["the cat and the hat and that\n"], 262)
    small = msgspec.structs.replace(TINY, vocab_size=261)
    files = {"config.json": msgspec.json.encode(small), "tokenizer.json": raw}
    parts = {"model": dict(build(small, 0).named_parameters())}
    folder = checkpoint.save(tmp_path, 3, parts, {}, files)
    for words in (("export", folder, tmp_path / "out"), ("generate", folder)):
        code, _, err = farflock(*words)
        assert code == 1
        assert "has 262 tokens, its model only 261" in err


def test_weights_are_bf16_unless_another_type_is_asked_for(farflock, saved, tmp_path):
    folder, _ = saved
    for options, dtype in (((), torch.bfloat16), (("--dtype", "float32"), torch.float32)):
        target = tmp_path / str(dtype)
        assert farflock("export", folder, target, *options)[0] == 0
        weights = load_file(target / "model.safetensors")
        assert {x.dtype for x in weights.values()} == {dtype}
        assert torch.equal(
            weights["model.norm.weight"].float(), build(TINY, 0).state_dict()["model.norm.weight"]
        )


def test_large_weights_are_cut_into_files(farflock, saved, tmp_path):
    folder, _ = saved
    assert farflock("export", folder, tmp_path / "out", "--shard-size", "20kB")[0] == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    code, _, err = farflock("export", folder, tmp_path / "other", "--shard-size", "some")
    assert code == 2
    assert "is not a size" in err


def test_the_card_states_the_run_of_the_checkpoint(farflock, saved, tmp_path):
    folder, _ = saved
    farflock("export", folder, tmp_path / "out", "--base-model", "org/start")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# out\n" in card
    assert "| run | `ab12` |" in card
    assert "written as bfloat16" in card
    assert 'base_model: "org/start"' in card


def test_a_file_for_llama_cpp_comes_with_it(farflock, saved, tmp_path):
    gguf = pytest.importorskip("gguf")
    folder, _ = saved
    assert farflock("export", folder, tmp_path / "out", "--gguf")[0] == 0
    reader = gguf.GGUFReader(tmp_path / "out" / "model.gguf")
    assert len(reader.tensors) == len(build(TINY, 0).state_dict())
    assert len(reader.get_field("tokenizer.ggml.tokens").contents()) == 280


def test_an_export_can_be_pushed(farflock, saved, tmp_path):
    folder, _ = saved
    farflock("export", folder, tmp_path / "out")
    code, out, _ = farflock("push", tmp_path / "out", "org/model", "--dry-run")
    assert code == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert [line.split()[0] for line in out.splitlines()[1:-1]] == names
    assert out.splitlines()[-1].endswith("nothing was uploaded")


@pytest.mark.parametrize("public", [False, True])
def test_a_push_says_where_the_model_is(farflock, saved, tmp_path, monkeypatch, public):
    folder, _ = saved
    farflock("export", folder, tmp_path / "out")
    asked = []

    def push(files, repository, public):
        asked.append((len(files), repository, public))
        return "https://hub/c/1"

    monkeypatch.setattr("farflock.node.use.hub.push", push)
    words = ["push", tmp_path / "out", "org/model", *(["--public"] if public else [])]
    code, out, _ = farflock(*words, "--json")
    said = msgspec.json.decode(out)
    assert (code, said["commit"], said["repository"]) == (0, "https://hub/c/1", "org/model")
    assert asked == [(len(said["files"]), "org/model", public)]


def test_a_folder_that_is_no_export_is_not_pushed(farflock, saved, tmp_path):
    for words in (("push", tmp_path, "org/model"), ("push", tmp_path, "model")):
        code, _, err = farflock(*words)
        assert code != 0
        assert "it is no whole export" in err or "is not the name of a repository" in err
