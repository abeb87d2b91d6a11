"""Files of tokens that others have made are indexed where they lie, and read as prepared data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.node.data import in_place
from farflock.node.data.folder import PreparedFolder
from farflock.node.data.in_place import InPlace, LeftOut
from farflock.node.data.index import BadIndex
from farflock.node.errors import Failure, Usage
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

TOKENIZER = JsonTokenizer(train_tokenizer(["some words to learn, and more words " * 9], 280))
END, MAX = TOKENIZER.end_of_text, 40  # tokens of a shard here
HEADER = (20240520).to_bytes(4, "little") + bytes(1020)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Shards of 40 tokens, which nobody waits for."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    monkeypatch.setattr(in_place, "MAX_SHARD_BYTES", 2 * MAX + 1)


def written(path, *documents, header=b"", rest=()):
    """A file of documents, each of so many tokens and the end of text, and what follows them."""
    tokens = [token for size in documents for token in [*(1 + k % 99 for k in range(size)), END]]
    path.write_bytes(header + np.array([*tokens, *rest], dtype="<u2").tobytes())
    return path


def indexed(folder, files, held_out=()):
    told = []
    left = InPlace(files, held_out, TOKENIZER).make(folder, told.append)
    assert all(0 <= share <= 1 for share in told)
    assert told == sorted(told)
    return PreparedFolder(folder), left


def tokens_of(content, split="train"):
    return [content.read(split, number).tolist() for number in range(content.shards(split))]


def test_shards_are_whole_documents_in_the_files_order(tmp_path):
    first = written(tmp_path / "a.bin", 20, 10, 30, 39, 3)
    second = written(tmp_path / "b.bin", 5, header=HEADER)
    val = written(tmp_path / "val.bin", 7)
    content, left = indexed(tmp_path / "out", [first, second], [val])
    assert left == LeftOut()
    assert [len(shard) for shard in tokens_of(content)] == [32, 31, 40, 4, 6]
    assert [len(shard) for shard in tokens_of(content, "held-out")] == [8]
    assert content.place("train", 4).path == second
    assert content.place("train", 4).offset == 1024
    assert content.index.totals("train").documents == 6
    assert content.index.tokenizer.hash == TOKENIZER.hash
    assert not (tmp_path / "out" / "tokens").exists(), "nothing is copied"


@given(st.lists(st.integers(0, 2 * MAX), max_size=12), st.integers(0, 2 * MAX))
def test_what_is_in_no_shard_is_counted(tmp_path_factory, sizes, rest):
    folder = tmp_path_factory.mktemp("texts")
    path = written(folder / "a.bin", 1, *sizes, rest=[1] * rest)
    val = written(folder / "val.bin", 1)
    content, left = indexed(folder / "out", [path], [val])
    fitting = [size for size in (1, *sizes) if size < MAX]
    assert left == LeftOut(len(sizes) + 1 - len(fitting), rest)
    assert content.index.totals("train")[1:] == (sum(fitting) + len(fitting), len(fitting))
    assert sorted(token for shard in tokens_of(content) for token in shard) == sorted(
        token for size in fitting for token in [*(1 + k % 99 for k in range(size)), END]
    )


def test_without_a_file_for_it_a_share_of_the_shards_is_held_out(tmp_path):
    path = written(tmp_path / "a.bin", *[39] * 500, *range(30, 39))
    content, _ = indexed(tmp_path / "out", [path])
    assert (content.shards("train"), content.shards("held-out")) == (506, 3)
    alone, _ = indexed(tmp_path / "alone", [written(tmp_path / "b.bin", 9)])
    assert (alone.shards("train"), alone.shards("held-out")) == (1, 0)


def test_the_root_is_that_of_the_tokens_wherever_they_lie(tmp_path):
    roots = set()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = written(tmp_path / name / f"{name}.bin", 20, 30, 11)
        roots.add(indexed(tmp_path / name / "out", [path])[0].root)
    assert len(roots) == 1


@pytest.mark.parametrize(
    ("tokens", "kind", "sentence"),
    [
        ([1, 2, END, 999], "<u2", "it has the token 999, and the tokenizer [0-9]+; name the tok"),
        ([1, 2], "<u2", f"it has no token {END}, which ends documents; name that"),
        ([1, 2, END], "<u1", "it has 3 bytes, no whole number of tokens of 2"),
        ([], "<u2", "it is no file of tokens; name one"),
    ],
)
def test_a_file_of_something_else_is_refused_and_leaves_nothing(tmp_path, tokens, kind, sentence):
    path = tmp_path / "a.bin"
    path.write_bytes(np.array(tokens, dtype=kind).tobytes())
    with pytest.raises(Usage, match=sentence):
        InPlace([path], [], TOKENIZER).make(tmp_path / "out", lambda share: None)
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]


def test_a_folder_that_is_there_is_not_replaced(tmp_path):
    path = written(tmp_path / "a.bin", 3)
    indexed(tmp_path / "out", [path])
    with pytest.raises(Failure, match="it is there already; choose another name"):
        indexed(tmp_path / "out", [path])


def test_a_file_that_went_or_shrank_is_named_and_other_tokens_are_not_read(tmp_path):
    path = written(tmp_path / "a.bin", 20, 30)
    content, _ = indexed(tmp_path / "out", [path], [written(tmp_path / "val.bin", 3)])
    written(path, 20, 29, rest=[0])
    with pytest.raises(BadIndex, match="is damaged at byte"):
        content.read("train", 1)
    written(path, 20, 3)
    with pytest.raises(BadIndex, match=rf"{path} is gone, or shorter than its index says; put"):
        PreparedFolder(tmp_path / "out")
    path.unlink()
    with pytest.raises(BadIndex, match=rf"{path} is gone"):
        PreparedFolder(tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("places/000-train", b"short"),
        ("places/000-train", b"\xff" * 24),
        ("in-place.json", b"{}"),
    ],
)
def test_a_damaged_list_of_places_is_refused(tmp_path, name, raw):
    path = written(tmp_path / "a.bin", 20, 30)
    indexed(tmp_path / "out", [path], [written(tmp_path / "val.bin", 3)])
    (tmp_path / "out" / name).write_bytes(raw)
    with pytest.raises(BadIndex, match="is damaged; make the folder again"):
        PreparedFolder(tmp_path / "out")
