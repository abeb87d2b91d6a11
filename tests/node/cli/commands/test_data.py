"""`farflock data` prepares texts, says what it read and left, and shows what a folder has."""

import msgspec
import numpy as np
import pytest

from farflock.node.data import prepare
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"the text of number {number}, and some more text\n")
    (folder / "again.md").write_bytes((folder / "0.txt").read_bytes())
    (folder / "bad.txt").write_bytes(b"\xff")
    (folder / "code.py").write_text("pass")
    return folder


def facts(out):
    return msgspec.json.decode(out.splitlines()[-1])


def test_it_says_what_was_read_and_gives_the_root_as_json(farflock, texts, tmp_path):
    made = tmp_path / "out"
    code, out, err = farflock("data", "prepare", texts, "-o", made, "--held-out", "0.2", "--json")
    assert code == 0
    found = facts(out)
    assert found["root"]
    assert found["documents"] + found["held_out_documents"] == 20
    assert (found["shards"], found["vocabulary"], found["tokenizer"]) == (1, 256, "bytes")
    assert (found["skipped"], found["duplicates"]) == (1, 1)
    assert found["tokens"] > 500
    assert "22 files with 0.0 MB\nleft alone for their endings: 1 .py\n" in err
    assert "skipped: " in err
    assert "bad.txt is not UTF-8" in err
    assert "preparing: 100%" in err


def test_a_tokenizer_is_used_and_its_end_of_text_named(farflock, texts, tmp_path):
    text = "".join(path.read_text(errors="replace") for path in texts.glob("*.txt"))
    raw = train_tokenizer([text], 280).replace(b"<|endoftext|>", b"<|stop|>")
    (tmp_path / "tok.json").write_bytes(raw)
    words = ["data", "prepare", texts, "-o", tmp_path / "out", "--tokenizer", tmp_path / "tok.json"]
    code, _, err = farflock(*words)
    assert code == 2
    assert "name the token with --end-of-text" in err
    code, out, _ = farflock(*words, "--end-of-text", "<|stop|>", "--json")
    assert code == 0
    assert facts(out)["tokenizer"] == JsonTokenizer(raw).hash
    (texts / "new.txt").write_text("a new text")
    code, out, _ = farflock("data", "prepare", texts, "-o", tmp_path / "out", "--add", "--json")
    assert code == 0, "the tokenizer, its end of text and the share are those of the folder"
    assert (facts(out)["parts"], facts(out)["duplicates"]) == (2, 21)


def test_a_document_that_cannot_be_read_is_refused_if_that_is_asked_for(farflock, texts, tmp_path):
    code, _, err = farflock("data", "prepare", texts, "-o", tmp_path / "out", "--strict")
    assert code == 1
    assert "bad.txt is not UTF-8" in err
    assert "or leave out --strict" in err
    assert not (tmp_path / "out").exists()


def test_an_interrupted_command_says_that_it_can_go_on(farflock, texts, tmp_path, monkeypatch):
    words = ["data", "prepare", texts, "-o", tmp_path / "out"]

    def interrupted(preparation, *given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare.Preparation, "_merged", interrupted)
        code, out, _ = farflock(*words)
    assert code == 130
    assert f"so far is in {tmp_path}/out.partial; the same command goes on from there" in out
    code, out, _ = farflock(*words)
    assert code == 0
    assert f"going on with {tmp_path}/out.partial" in out


def test_files_of_tokens_are_used_where_they_are(farflock, tmp_path):
    raw = train_tokenizer(["some words to learn, and more words " * 9], 280)
    (tmp_path / "tokenizer.json").write_bytes(raw)
    end = JsonTokenizer(raw).end_of_text
    for name, tokens in (("train", [5, 6, end] * 20 + [7]), ("val", [5, end])):
        (tmp_path / f"{name}.bin").write_bytes(np.array(tokens, dtype="<u2").tobytes())
    words = ["data", "index", tmp_path / "train.bin", "-o", tmp_path / "out"]
    code, _, err = farflock(*words, "--tokenizer", "bytes")
    assert code == 2
    assert "bytes need no index; prepare the texts instead" in err
    more = ["--tokenizer", tmp_path, "--held-out", tmp_path / "val.bin", "--json"]
    code, out, _ = farflock(*words, *more)
    assert code == 0
    found = facts(out)
    assert (found["documents"], found["tokens"], found["held_out_tokens"]) == (20, 60, 2)
    assert found["tokens_after_the_last_end"] == 1
    code, out, _ = farflock("data", "show", tmp_path / "out", "--verify", "--json")
    assert facts(out)["root"] == found["root"]
    code, _, err = farflock("data", "prepare", tmp_path / "val.bin", "--add", *words[3:])
    assert code == 1
    assert "its shards lie in files that others have made; prepare the texts into a fol" in err


def test_show_tells_what_a_folder_has_and_verifies_it(farflock, texts, tmp_path):
    _, out, _ = farflock("data", "prepare", texts, "-o", tmp_path / "out", "--json")
    root = facts(out)["root"]
    code, out, _ = farflock("data", "show", tmp_path / "out", "--verify")
    assert code == 0
    assert out.splitlines()[-1] == f"root {root}"
    assert "to train on" in out
    assert sum(line.startswith("- the text of number") for line in out.splitlines()) == 5
    _, again, _ = farflock("data", "show", tmp_path / "out")
    assert again == out
    _, other, _ = farflock("data", "show", tmp_path / "out", "--seed", "1", "--json")
    assert facts(other)["samples"] != [line[2:] for line in out.splitlines() if line[0] == "-"]
    (file,) = (tmp_path / "out" / "tokens").glob("*train*")
    file.write_bytes(b"?" + file.read_bytes()[1:])
    code, _, err = farflock("data", "show", tmp_path / "out", "--verify")
    assert code == 1
    assert "is damaged at byte 0; copy the file again" in err


@pytest.mark.parametrize(
    ("words", "exit_code", "sentence"),
    [
        (["prepare", "{}/none", "-o", "{}/x"], 2, "No such file or directory; check the path"),
        (["prepare", "-o", "{}/x"], 2, "SOURCE"),
        (["prepare", "{}/texts"], 2, "-o"),
        (["prepare", "{}/texts", "-o", "{}/x", "--held-out", "0.7"], 2, "0.7"),
        (["prepare", "{}/texts", "-o", "{}/x", "--tokenizer", "{}/no"], 1, "name a tokenizer.json"),
        (["prepare", "{}/texts", "-o", "{}/x", "--add"], 1, "there is nothing to add to"),
        (["prepare", "{}/texts", "-o", "{}/texts"], 1, "farflock data prepare"),
        (["show", "{}/texts"], 1, "name a folder that `farflock data prepare` made"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_remedy(
    farflock, texts, tmp_path, words, exit_code, sentence
):
    code, _, err = farflock("data", *(word.format(tmp_path) for word in words))
    assert code == exit_code
    assert sentence in err
    assert not (tmp_path / "x").exists()
