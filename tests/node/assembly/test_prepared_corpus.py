"""A corpus is prepared once on a machine, as `farflock data prepare` would do it."""

import threading

import pytest
from worlds.prepared import prepared

from farflock.node.assembly import prepared_corpus as module
from farflock.node.assembly.prepared_corpus import prepared_corpus
from farflock.node.errors import Failure
from farflock.node.model.corpus import BadCorpus, load_corpus
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

LINES = "".join(f"{number} squared is {number * number}.\n" for number in range(2000))


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    return tmp_path / "home"


@pytest.fixture
def corpus(tmp_path, home):
    (tmp_path / "own.txt").write_text(LINES)
    return load_corpus(str(tmp_path / "own.txt"))


def work_at(monkeypatch):
    """A list that grows with each preparation."""
    made, run = [], module.Preparation.run
    counted = lambda self, **terms: made.append(self.target) or run(self, **terms)  # noqa: E731
    monkeypatch.setattr(module.Preparation, "run", counted)
    return made


def test_its_root_is_that_of_the_same_text_prepared_by_hand(corpus, tmp_path):
    (tmp_path / "train.md").write_text(corpus.train)
    by_hand = prepared(
        tmp_path / "train.md", tmp_path / "out", held_out=0.0, keep_duplicates=True
    ).content
    assert prepared_corpus(corpus, ByteTokenizer()).root == by_hand.root


def test_a_corpus_is_prepared_once_for_each_tokenizer(corpus, monkeypatch):
    made = work_at(monkeypatch)
    tokenizer = JsonTokenizer(train_tokenizer([LINES], 300))
    roots = {prepared_corpus(corpus, ByteTokenizer()).root for _ in range(3)}
    assert (len(made), len(roots)) == (1, 1)
    assert prepared_corpus(corpus, tokenizer).root not in roots
    assert len(made) == 2


def test_what_is_damaged_or_half_made_is_made_again(corpus, home, monkeypatch):
    made, first = work_at(monkeypatch), prepared_corpus(corpus, ByteTokenizer())
    with first.place("train", 0).path.open("r+b") as file:
        file.write(b"?")
    (home / "prepared" / "making" / "done.partial").mkdir(parents=True)
    again = prepared_corpus(corpus, ByteTokenizer())
    assert again.root == first.root
    assert again.read("train", 0)[0] == ord("0")
    assert len(made) == 2
    assert [path.name for path in (home / "prepared").iterdir()] == [again.folder.name]


@pytest.mark.net  # the second waits for the first
def test_two_at_once_prepare_it_once(corpus, monkeypatch):
    made, roots = work_at(monkeypatch), []
    threads = [
        threading.Thread(target=lambda: roots.append(prepared_corpus(corpus, ByteTokenizer()).root))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(made), len(roots), len(set(roots))) == (1, 2, 1)


class WithoutEnd(ByteTokenizer):
    end_of_text = None


class WithEnd(ByteTokenizer):
    end_of_text = ord("s")


@pytest.mark.parametrize(
    ("tokenizer", "sentence"),
    [
        (WithoutEnd(), "nothing says which token of the run's tokenizer ends a document; prepare"),
        (WithEnd(), "own.txt has the token that ends documents; prepare the text with"),
    ],
)
def test_a_tokenizer_that_does_not_go_with_it_is_refused(corpus, tokenizer, sentence):
    with pytest.raises(BadCorpus, match=sentence):
        prepared_corpus(corpus, tokenizer)


def test_a_place_where_nothing_can_be_written_is_named(corpus, home):
    home.write_text("a file")
    with pytest.raises(Failure, match=r"cannot be prepared in .*; .* by FARFLOCK_HOME"):
        prepared_corpus(corpus, ByteTokenizer())
