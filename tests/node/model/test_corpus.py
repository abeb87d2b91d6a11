"""The shipped plays are the right ones, whole plays are held out, and other texts are refused."""

import hashlib
import lzma
import shutil
import tracemalloc
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from farflock.node.model.corpus import BadCorpus, from_file, load_corpus, shakespeare

SHIPPED_SHA256 = "0e5986fe2f1b4844712915af1b1ca51c24f1aceeb8ad843bb8b03d9a91fcd9e8"


@pytest.fixture(scope="module")
def plays():
    return load_corpus("shakespeare")


@pytest.fixture
def copy(tmp_path):
    folder = Path(str(files("farflock.node") / "texts"))
    for name in ("shakespeare.json", "shakespeare.txt.xz"):
        shutil.copy(folder / name, tmp_path)
    return tmp_path


def user_text(lines=2000):
    return "".join(f"line {number} of a user's own text\n" for number in range(lines))


def test_the_shipped_corpus_has_the_recorded_hash_and_size(plays):
    assert plays.sha256 == SHIPPED_SHA256
    assert len(plays.train.encode()) + len(plays.held_out.encode()) == 4_955_777


def test_whole_plays_are_held_out(plays):
    assert plays.held_out_titles == ("Macbeth", "Richard II", "Twelfth Night")
    for words in (
        "Is this a dagger which I see before me",
        "If music be the food of love",
        "this scepter'd isle",
    ):
        assert words in plays.held_out
        assert words not in plays.train
    assert "To be, or not to be" in plays.train
    assert plays.held_out.startswith("Macbeth\n")
    assert 0.05 < len(plays.held_out) / len(plays.train) < 0.1


def test_no_markdown_is_left(plays):
    assert not set("*_\\#") & set(plays.train + plays.held_out)
    assert "\n\n\n\n" not in plays.train
    assert " \n" not in plays.train


def test_an_altered_text_is_refused(copy):
    packed = copy / "shakespeare.txt.xz"
    text = bytearray(lzma.decompress(packed.read_bytes()))
    text[1000] ^= 1
    packed.write_bytes(lzma.compress(bytes(text), preset=0))
    with pytest.raises(
        BadCorpus, match=r"has SHA-256 .* expected 0e5986fe2f1b4844…; reinstall farflock"
    ):
        shakespeare(copy)


def test_a_text_that_unpacks_to_more_than_it_says_is_not_unpacked(copy):
    (copy / "shakespeare.txt.xz").write_bytes(lzma.compress(bytes(100 << 20), preset=0))
    tracemalloc.start()
    with pytest.raises(BadCorpus, match="reinstall farflock"):
        shakespeare(copy)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20 << 20


@pytest.mark.parametrize("damage", ["cut", "noise", "gone", "json", "sizes"])
def test_damaged_files_are_refused(copy, damage):
    packed, about = copy / "shakespeare.txt.xz", copy / "shakespeare.json"
    if damage == "cut":
        packed.write_bytes(packed.read_bytes()[:-1000])
    elif damage == "noise":
        packed.write_bytes(b"not xz at all")
    elif damage == "gone":
        packed.unlink()
    elif damage == "json":
        about.write_text("{}")
    else:
        value = msgspec.json.decode(about.read_bytes())
        value["plays"].pop()
        about.write_bytes(msgspec.json.encode(value))
    with pytest.raises(BadCorpus, match="reinstall farflock"):
        shakespeare(copy)


def test_a_users_text_is_cut_at_a_line_near_its_end(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(user_text())
    corpus = load_corpus(str(path))
    assert corpus.train + corpus.held_out == user_text()
    assert corpus.train.endswith("\n")
    assert corpus.held_out.startswith("line 1")
    assert 0.04 < len(corpus.held_out) / len(user_text()) < 0.06
    assert corpus.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_another_text_than_the_runs_is_refused(tmp_path, plays):
    path = tmp_path / "mine.txt"
    path.write_text(user_text())
    good = from_file(path).sha256
    assert load_corpus(str(path), good).name == "mine.txt"
    path.write_text(user_text() + "more\n")
    with pytest.raises(BadCorpus, match=r"get the run.s text"):
        load_corpus(str(path), good)
    with pytest.raises(BadCorpus, match=r"get the run.s text"):
        load_corpus("shakespeare", good)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\xff\xfe not utf-8", "not UTF-8 at byte 0; convert it first"),
        (b"", "too few to train on"),
        (b"short\n", "too few to train on"),
        (b"one line without an end " * 1000, "too few to train on"),
    ],
)
def test_an_unusable_text_is_refused(tmp_path, content, sentence):
    path = tmp_path / "mine.txt"
    path.write_bytes(content)
    with pytest.raises(BadCorpus, match=sentence):
        load_corpus(str(path))


def test_a_missing_file_or_unknown_name_is_refused(tmp_path):
    with pytest.raises(BadCorpus, match="No such file"):
        load_corpus(str(tmp_path / "none.txt"))
    with pytest.raises(BadCorpus, match=r"neither 'shakespeare' nor the path of a \.txt file"):
        load_corpus("wikipedia")


def test_a_huge_file_is_refused_unread(tmp_path):
    path = tmp_path / "huge.txt"
    with path.open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(BadCorpus, match="use a part of it"):
        load_corpus(str(path))
