"""`farflock finetune` prepares conversations and writes a manifest; what cannot be is refused."""

import json

import pytest
from worlds.folders.model_folder import SMALL, write_model

from farflock.node.data.verify import FolderContent
from farflock.node.model.export import tokenizer_files
from farflock.node.run.manifest import load
from farflock.node.tokens.tokenizer import ByteTokenizer

ASKED, ANSWER = [{"role": "user", "content": "hi"}], {"role": "assistant", "content": "ho"}
PAIRS = [{"prompt": f"{n} + 1 = ", "completion": f"{n + 1}."} for n in range(200)]


@pytest.fixture
def base(tmp_path):
    pytest.importorskip("tokenizers")
    folder = write_model(tmp_path / "base")
    for name, raw in tokenizer_files(ByteTokenizer(), SMALL.context).items():
        (folder / name).write_bytes(raw)
    return folder


def lines(path, objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


@pytest.fixture
def pairs(tmp_path):
    return lines(tmp_path / "pairs.jsonl", PAIRS)


def test_it_writes_a_manifest_that_run_takes_too(farflock, base, pairs, tmp_path):
    words = ("finetune", base, "--data", pairs, "--folder", tmp_path / "tuned", "--rank", "4")
    code, out, _ = farflock(*words, "--set", "train.clip=0.5", "--dry-run", "--json")
    assert code == 0
    said = json.loads(out.splitlines()[-1])
    manifest = load(tmp_path / "tuned" / "finetune.toml", ["train.clip=0.5"])
    assert (said["manifest"], said["hash"]) == (manifest.canonical().decode(), manifest.hash())
    assert manifest.train.lora.r == 4
    assert manifest.data.root == FolderContent(tmp_path / "tuned" / "data").root
    assert farflock(*words, "--dry-run")[0] == 0  # the data are there already


def test_data_may_be_prepared_before(farflock, base, pairs, tmp_path):
    words = ("data", "prepare", pairs, "--chat", "--tokenizer", base, "-o", tmp_path / "texts")
    assert farflock(*words)[0] == 0
    words = ("finetune", base, "--data", tmp_path / "texts", "--folder", tmp_path / "tuned")
    assert farflock(*words, "--dry-run")[0] == 0
    assert not (tmp_path / "tuned" / "data").exists()


@pytest.mark.parametrize(
    ("objects", "more", "said"),
    [
        ([{"text": "no conversation"}], (), "line 1"),
        ([{"messages": ASKED}], (), "it has no answer"),
        ([{"messages": [*ASKED, ANSWER]}], (), "--chat-template"),
        (PAIRS, ("--targets", "q_prj"), "did you mean 'q_proj'"),
        (PAIRS, ("--rank", "0"), "lora.r is 0"),
        (PAIRS, ("--seq", "65"), "sequences of 65 tokens do not fit a context of 64"),
        (PAIRS[:10], ("--seq", "64"), "less than a step"),
    ],
)
def test_what_cannot_be_trained_is_refused(farflock, base, tmp_path, objects, more, said):
    data = lines(tmp_path / "some.jsonl", objects)
    words = ("finetune", base, "--data", data, "--folder", tmp_path / "tuned", "--dry-run")
    code, _, err = farflock(*words, *more)
    assert code in (1, 2)
    assert said in err
    assert len(err.splitlines()[-1]) < 500


def test_a_model_without_a_tokenizer_is_refused(farflock, base, pairs, tmp_path):
    (base / "tokenizer.json").unlink()
    words = ("finetune", base, "--data", pairs, "--folder", tmp_path / "tuned", "--dry-run")
    code, _, err = farflock(*words)
    assert code in (1, 2)
    assert "tokenizer" in err
