"""The shipped plays are the right ones, whole plays are held out, and other texts are refused."""

import lzma
import shutil
import tracemalloc
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from farflock.node.model.corpus import BadCorpus, load_corpus, shakespeare

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


def test_another_version_of_the_plays_is_refused(plays):
    assert load_corpus("shakespeare", plays.sha256) == plays
    with pytest.raises(BadCorpus, match="use the founder's version"):
        load_corpus("shakespeare", "ab" * 32)


@pytest.mark.parametrize("name", ["own.txt", "/etc/passwd", "wikipedia", ""])
def test_any_other_text_is_refused_with_the_command_that_prepares_it(name):
    with pytest.raises(BadCorpus, match="only 'shakespeare' does; prepare a text of your own"):
        load_corpus(name)
