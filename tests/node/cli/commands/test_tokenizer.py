"""`farflock tokenizer train` writes a whole file, never over another, and says what it is."""

import msgspec
import pytest

from farflock.node.tokens.json_tokenizer import JsonTokenizer

TEXT = "the cat and the hat, and that is that: the cat sat.\n" * 50


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (folder / "more" / "b.md").write_bytes(b"caf\xc3\xa9 caf\xc3\xa9 \xff\n" * 20)
    (folder / "c.bin").write_bytes(b"zzz zzz " * 500)
    return folder


def test_it_learns_from_the_texts_of_a_folder(farflock, texts, tmp_path):
    made = tmp_path / "out.json"
    code, out, _ = farflock("tokenizer", "train", texts, "-o", made, "--vocab", 270, "--json")
    assert code == 0
    tokenizer = JsonTokenizer(made.read_bytes())
    assert msgspec.json.decode(out.splitlines()[-1]) == {
        "file": str(made),
        "vocabulary": 270,
        "end_of_text": "<|endoftext|>",
        "hash": tokenizer.hash,
        "bytes": made.stat().st_size,
    }
    assert len(tokenizer.encode("the cat")) < 5
    assert len(tokenizer.encode("zzz")) == 3, "other files are not read"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "texts"]


def test_long_lines_and_files_are_read_in_pieces(farflock, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("farflock.node.cli.commands.tokenizer._READ_CHARS", 7)
    made = tmp_path / "out.json"
    assert farflock("tokenizer", "train", texts, "-o", made, "--vocab", 270)[0] == 0
    assert JsonTokenizer(made.read_bytes()).vocab_size == 270


def test_progress_is_shown_on_standard_error(farflock, texts, tmp_path):
    code, out, err = farflock("tokenizer", "train", texts, "-o", tmp_path / "out.json")
    assert code == 0
    assert "reading texts: " in err
    learning, wrote = out.splitlines()
    assert learning == "learning from 2,920 bytes of text"
    assert wrote.startswith(f"wrote {tmp_path / 'out.json'}: ")


def test_a_file_is_not_overwritten_unless_that_is_asked_for(farflock, texts, tmp_path):
    made = tmp_path / "out.json"
    made.write_text("mine")
    code, _, err = farflock("tokenizer", "train", texts, "-o", made)
    assert code == 2
    assert "it exists; name another file, or use --force" in err
    assert made.read_text() == "mine"
    assert farflock("tokenizer", "train", texts, "-o", made, "--force")[0] == 0
    assert made.read_text() != "mine"


@pytest.mark.parametrize(
    ("words", "exit_code", "sentence"),
    [
        (["{}/none", "-o", "{}/x"], 1, "No such file or directory; check the path"),
        (["{}/texts", "-o", "{}/none/x"], 2, "its folder does not exist; make the folder"),
        (["{}/empty", "-o", "{}/x"], 1, "holds no .txt or .md files; name the files"),
        (["-o", "{}/x"], 2, "SOURCE"),
        (["{}/texts", "-o", "{}/x", "--vocab", "257"], 2, "258"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_remedy(
    farflock, texts, tmp_path, words, exit_code, sentence
):
    (tmp_path / "empty").mkdir()
    code, _, err = farflock("tokenizer", "train", *(word.format(tmp_path) for word in words))
    assert code == exit_code
    assert sentence in err
    assert not (tmp_path / "x").exists()
