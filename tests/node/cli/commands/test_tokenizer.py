"""`farflock tokenizer` writes whole files, never over others, and says what a tokenizer is."""

import hashlib
import io

import msgspec
import pytest

from farflock.node.tokens.json_tokenizer import JsonTokenizer

pytest.importorskip("tokenizers")
TEXT = "the cat and the hat, and that is that: the cat sat.\n" * 50


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text(TEXT)
    (folder / "more" / "b.md").write_bytes(b"caf\xc3\xa9 caf\xc3\xa9 \xff\n" * 20)
    (folder / "c.bin").write_bytes(b"zzz zzz " * 500)
    return folder


def facts(out):
    return msgspec.json.decode(out.splitlines()[-1])


def test_train_learns_from_the_texts_of_a_folder(farflock, texts, tmp_path):
    made = tmp_path / "out.json"
    code, out, _ = farflock("tokenizer", "train", texts, "-o", made, "--vocabulary", 270, "--json")
    assert code == 0
    tokenizer = JsonTokenizer(made.read_bytes())
    assert facts(out) == {
        "file": str(made),
        "vocabulary": 270,
        "end_of_text": 0,
        "end_of_text_name": "<|endoftext|>",
        "sha256": tokenizer.sha256,
    }
    assert len(tokenizer.encode("the cat")) < 5
    assert len(tokenizer.encode("zzz")) == 3, "other files are not read"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "texts"]


def test_the_same_texts_give_the_same_file(farflock, texts, tmp_path):
    made = [tmp_path / "one.json", tmp_path / "two.json"]
    for path in made:
        assert farflock("tokenizer", "train", texts / "a.txt", "-o", path)[0] == 0
    assert made[0].read_bytes() == made[1].read_bytes()


def test_long_lines_and_files_are_read_in_pieces(farflock, texts, tmp_path, monkeypatch):
    monkeypatch.setattr("farflock.node.cli.commands.tokenizer._READ_CHARS", 7)
    made = tmp_path / "out.json"
    assert farflock("tokenizer", "train", texts, "-o", made, "--vocabulary", 270)[0] == 0
    assert JsonTokenizer(made.read_bytes()).vocab_size == 270


def test_progress_is_shown_on_standard_error(farflock, texts, tmp_path):
    code, out, err = farflock("tokenizer", "train", texts, "-o", tmp_path / "out.json")
    assert code == 0
    assert "reading texts: " in err
    assert out.startswith(f"wrote {tmp_path / 'out.json'}\nvocabulary ")


def test_a_file_is_not_overwritten_unless_that_is_asked_for(farflock, texts, tmp_path):
    made = tmp_path / "out.json"
    made.write_text("mine")
    for words in (("train", texts), ("convert", texts / "a.txt")):
        code, _, err = farflock("tokenizer", *words, "-o", made)
        assert code == 2
        assert "exists; name another file, or use --force" in err
    assert made.read_text() == "mine"
    assert farflock("tokenizer", "train", texts, "-o", made, "--force")[0] == 0
    assert made.read_text() != "mine"


def test_nothing_is_left_of_what_could_not_be_written(farflock, texts, tmp_path, monkeypatch):
    def full(partial, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("os.replace", full)
    code, _, err = farflock("tokenizer", "train", texts, "-o", tmp_path / "out.json")
    assert code == 1
    assert "No space left on device" in err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


@pytest.mark.parametrize(
    ("words", "exit_code", "sentence"),
    [
        (["train", "{}/none", "-o", "{}/x"], 1, "No such file or directory; check the path"),
        (["train", "{}/texts", "-o", "{}/none/x"], 2, "its folder does not exist; make the folder"),
        (["train", "{}/empty", "-o", "{}/x"], 1, "holds no .txt or .md files; name the files"),
        (["train", "-o", "{}/x"], 2, "SOURCE"),
        (["train", "{}/texts", "-o", "{}/x", "--vocabulary", "257"], 2, "258"),
        (["show", "{}/texts/a.txt"], 1, "is not a tokenizer.json"),
        (["show", "{}/none"], 1, "cannot be read"),
        (["convert", "{}/empty/a.model", "-o", "{}/x"], 1, "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_remedy(
    farflock, texts, tmp_path, words, exit_code, sentence
):
    (tmp_path / "empty").mkdir()
    code, _, err = farflock("tokenizer", *(word.format(tmp_path) for word in words))
    assert code == exit_code
    assert sentence in err
    assert not (tmp_path / "x").exists()


def test_show_tells_what_a_file_is_and_how_it_cuts_a_text(farflock, texts, tmp_path):
    made = tmp_path / "out.json"
    farflock("tokenizer", "train", texts, "-o", made, "--vocabulary", 270)
    code, out, _ = farflock("tokenizer", "show", made, "--text", "the cat")
    assert code == 0
    assert "vocabulary     270\nend of text    0 (<|endoftext|>)\n" in out
    assert hashlib.sha256(made.read_bytes()).hexdigest() in out
    assert "' cat'" in out
    code, out, _ = farflock("tokenizer", "show", made, "--end-of-text", "A", "--json")
    assert facts(out)["end_of_text_name"] == "A"


def test_show_knows_bytes(farflock):
    code, out, _ = farflock("tokenizer", "show", "bytes", "--text", "Aé", "--json")
    assert code == 0
    assert facts(out) == {
        "vocabulary": 256,
        "end_of_text": 255,
        "end_of_text_name": None,
        "sha256": None,
        "text": "Aé",
        "ids": [65, 0xC3, 0xA9],
    }
    assert "none: bytes need no file" in farflock("tokenizer", "show", "bytes")[1]


def test_convert_reads_a_model_of_sentencepiece(farflock, tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=model,
        vocab_size=40,
        model_type="bpe",
        minloglevel=2,
    )
    (tmp_path / "a.model").write_bytes(model.getvalue())
    made = tmp_path / "out.json"
    code, out, _ = farflock("tokenizer", "convert", tmp_path / "a.model", "-o", made, "--json")
    assert code == 0
    assert (facts(out)["vocabulary"], facts(out)["end_of_text_name"]) == (40, "</s>")
    known = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    assert JsonTokenizer(made.read_bytes()).encode(TEXT).tolist() == known.encode(TEXT)
