"""The same texts give the same root, whatever happens on the way; nothing is lost or doubled."""

import os
import random
import shutil

import numpy as np
import pytest
from worlds.prepared import documents, preparation, prepared

from farflock.node.data import buckets, prepare
from farflock.node.data import documents as reading
from farflock.node.data.documents import BadDocuments
from farflock.node.errors import Failure, Usage
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer

pytestmark = pytest.mark.usefixtures("small")


class Killed(BaseException):
    """The end of a process."""


def sources(texts):
    """The documents of the folder of texts."""
    lines = [f"line {number} of many".encode() for number in range(40)]
    return [path.read_bytes() for path in sorted(texts.glob("*.txt"))] + lines


def files(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "prepared-from.json"
    }


def killed_at(share):
    """A progress that ends the process there."""

    def progress(now):
        if now >= share:
            raise Killed

    return progress


def test_every_document_is_there_once_in_another_order(texts, tmp_path):
    made = prepared(texts, tmp_path / "out", held_out=0.1)
    train, held_out = documents(made.content), documents(made.content, "held-out")
    assert sorted(train + held_out) == sorted(sources(texts))
    assert train != [each for each in sources(texts) if each in train]
    assert 2 <= len(held_out) <= 25
    assert (made.skipped, made.duplicates, made.named) == (0, 0, ())
    assert made.content.index.totals("train").documents == len(train)
    assert not (tmp_path / "out.partial").exists()


def test_the_root_is_what_it_was(tmp_path):
    (tmp_path / "a.txt").write_text("a text of no importance")
    made = prepared(tmp_path / "a.txt", tmp_path / "out", held_out=0)
    assert made.content.root == "88c9aad3d59c3af5838718ba5ea5341bac2f4be901a01d0c216a5b45663e7418"


def test_the_root_does_not_depend_on_names_order_time_or_cores(texts, tmp_path, often):
    root = prepared(texts, tmp_path / "one").content.root
    other = tmp_path / "other"
    other.mkdir()
    for number, path in enumerate(sorted(texts.glob("*.txt"), reverse=True)):
        shutil.copy(path, other / f"{number}-renamed.md")
    shutil.copy(texts / "lines.jsonl", other / "again.jsonl")
    assert prepared(other, tmp_path / "two", cores=4).content.root == root


@pytest.mark.parametrize("bits", [0, 1, 5])
def test_the_root_does_not_depend_on_the_number_of_buckets(texts, tmp_path, monkeypatch, bits):
    root = prepared(texts, tmp_path / "one").content.root
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    monkeypatch.setattr(buckets, "MAX_BUCKET_BITS", bits)
    assert prepared(texts, tmp_path / "two").content.root == root


def test_the_root_does_not_depend_on_how_much_of_a_bucket_is_read_at_once(
    texts, tmp_path, monkeypatch
):
    root = prepared(texts, tmp_path / "one").content.root
    monkeypatch.setattr(buckets, "WHOLE_BYTES", 10)
    assert prepared(texts, tmp_path / "two").content.root == root


def test_killed_anywhere_and_resumed_the_folder_is_that_of_an_undisturbed_run(
    texts, tmp_path, often
):
    undisturbed = prepared(texts, tmp_path / "one", held_out=0.1)
    draws = random.Random(5)
    for number in range(20):
        target = tmp_path / f"killed-{number}"
        at = sorted(draws.uniform(0, 1) for _ in range(3))
        for share in at:
            with pytest.raises(Killed):
                prepared(texts, target, held_out=0.1, progress=killed_at(share))
            assert not target.exists(), "nothing half-written is taken for whole"
        said = []
        made = prepared(texts, target, held_out=0.1, said=said)
        assert said == [f"going on with {target}.partial"]
        assert made.content.root == undisturbed.content.root
        assert files(target) == files(tmp_path / "one")
        shutil.rmtree(target)


def test_what_was_done_is_not_done_again(texts, tmp_path, often):
    with pytest.raises(Killed):
        prepared(texts, tmp_path / "out", progress=killed_at(0.5))
    shares = []
    prepared(texts, tmp_path / "out", progress=shares.append)
    assert shares[0] > 0.4


def test_a_bucket_that_is_shorter_than_it_was_is_not_gone_on_with(texts, tmp_path, often):
    with pytest.raises(Killed):
        prepared(texts, tmp_path / "out", progress=killed_at(0.5))
    bucket = tmp_path / "out.partial" / "buckets" / "0000.tokens"
    os.truncate(bucket, bucket.stat().st_size - 1)
    with pytest.raises(Failure, match=r"0000.tokens: it has .* remove .*out.partial, and begin"):
        prepared(texts, tmp_path / "out")


def test_other_options_or_files_do_not_go_on_with_what_was_begun(texts, tmp_path, often):
    with pytest.raises(Killed):
        prepared(texts, tmp_path / "out", progress=killed_at(0.5))
    with pytest.raises(Failure, match="give the same options, or remove it"):
        prepared(texts, tmp_path / "out", held_out=0.2)
    (texts / "00.txt").write_text("changed")
    with pytest.raises(Failure, match="its sources have changed since"):
        prepared(texts, tmp_path / "out")


def test_equal_documents_are_dropped_and_counted_or_kept(tmp_path, often):
    lines = "".join(f'{{"text": "{word}"}}\n' for word in ["a", "b", "a", "c", "b", "a"] * 4)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_text("c")
    source = tmp_path / "*.[jt]*"
    made = prepared(source, tmp_path / "out", held_out=0)
    assert sorted(documents(made.content)) == [b"a", b"b", b"c"]
    assert made.duplicates == 22
    kept = prepared(source, tmp_path / "kept", held_out=0, keep_duplicates=True)
    found = documents(kept.content)
    assert sorted(found) == [b"a"] * 12 + [b"b"] * 8 + [b"c"] * 5
    assert found == [each for one in dict.fromkeys(found) for each in found if each == one]
    assert kept.duplicates == 0


def test_adding_documents_moves_none_across_what_is_held_out(texts, tmp_path):
    before = prepared(texts, tmp_path / "one", held_out=0.2).content
    for number in range(60, 120):
        (texts / f"{number}.txt").write_text(f"another text, number {number}")
    after = prepared(texts, tmp_path / "two", held_out=0.2).content
    for split in ("train", "held-out"):
        assert set(documents(before, split)) < set(documents(after, split))


def test_a_long_text_becomes_parts_that_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "PASSAGE_BYTES", 50)
    text = " ".join(f"word{number}" for number in range(100))
    (tmp_path / "long.txt").write_text(text)
    (tmp_path / "other.txt").write_text("another")
    made = prepared(tmp_path / "*.txt", tmp_path / "out", held_out=0)
    increments = [each for each in documents(made.content) if each != b"another"]
    assert b"".join(increments) == text.encode()
    assert len(increments) > 10
    assert made.content.index.totals("train").documents == len(increments) + 1


def test_parts_keep_their_order_though_the_process_is_killed_between_them(
    tmp_path, monkeypatch, often
):
    monkeypatch.setattr(reading, "PASSAGE_BYTES", 50)
    text = " ".join(f"word{number}" for number in range(300))
    (tmp_path / "long.txt").write_text(text)
    for share in (0.2, 0.5, 0.7):
        with pytest.raises(Killed):
            prepared(tmp_path / "long.txt", tmp_path / "out", held_out=0, progress=killed_at(share))
    made = prepared(tmp_path / "long.txt", tmp_path / "out", held_out=0)
    assert b"".join(documents(made.content)) == text.encode()


def test_what_cannot_be_read_is_counted_and_named_or_refused(texts, tmp_path):
    (texts / "bad.txt").write_bytes(b"\xff")
    (texts / "bad.jsonl").write_text('{"text": "good"}\n{\n')
    (texts / "empty.txt").touch()
    made = prepared(texts, tmp_path / "out")
    assert made.skipped == 2
    assert sorted(fault.split(" ")[0].rpartition("/")[2] for fault in made.named) == [
        "bad.jsonl,",
        "bad.txt",
    ]
    assert b"good" in documents(made.content)
    with pytest.raises(BadDocuments, match=r"bad.*; .*, or leave out --strict"):
        prepared(texts, tmp_path / "strict", strict=True)


def test_a_tokenizer_of_its_own_travels_with_the_data(texts, tmp_path):
    text = "".join(path.read_text() for path in texts.glob("*.txt"))
    tokenizer = JsonTokenizer(train_tokenizer([text], 300))
    made = prepared(texts, tmp_path / "out", tokenizer=tokenizer, held_out=0)
    index = made.content.index
    assert (index.vocabulary, index.end_of_text) == (tokenizer.vocab_size, tokenizer.end_of_text)
    assert index.tokenizer.hash == tokenizer.hash
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == tokenizer.raw
    shards = range(made.content.shards("train"))
    tokens = np.concatenate([made.content.read("train", number) for number in shards])
    found = [tokenizer.decode(each.tolist()) for each in _cut(tokens, tokenizer.end_of_text)]
    assert sorted(found) == sorted(each.decode() for each in sources(texts))


def _cut(tokens, end):
    return np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]


def test_a_tokenizer_without_an_end_of_text_is_refused_before_anything_is_read(texts, tmp_path):
    raw = train_tokenizer(["some text, and some more text"], 260)
    nameless = JsonTokenizer(raw.replace(b"<|endoftext|>", b"<|other|>"))
    with pytest.raises(Usage, match=r"--tokenizer: nothing says .*name the token with --end-of"):
        preparation(texts, tmp_path / "out", tokenizer=nameless)


def test_a_text_that_has_the_end_of_text_is_left_out_and_named(texts, tmp_path):
    raw = train_tokenizer(["some text, and some more text"], 260)
    (texts / "odd.txt").write_text("XYZ")
    made = prepared(texts, tmp_path / "out", tokenizer=JsonTokenizer(raw, "X"))
    assert made.skipped == 1
    assert "odd.txt has the token that ends documents" in made.named[0]


# Adding


def test_added_documents_are_a_part_of_their_own_and_the_shards_before_stay(texts, tmp_path):
    first = prepared(texts, tmp_path / "out", held_out=0.1).content
    before, root = files(first.folder), first.root
    (texts / "more.txt").write_text("a new text")
    (texts / "again.txt").write_bytes((texts / "00.txt").read_bytes())
    made = prepared(texts, tmp_path / "out", held_out=0.1, adds=True)
    assert made.content.root != root
    assert len(made.content.index.increments) == 2
    assert made.duplicates == 101, "what is there already is not written again"
    assert sorted(documents(made.content) + documents(made.content, "held-out")) == sorted(
        [*{*sources(texts)}]
    )
    after = files(first.folder)
    assert all(after[name] == raw for name, raw in before.items() if name.name != "index.json")
    for number in range(first.shards("train")):
        assert made.content.place("train", number) == first.place("train", number)


def test_what_was_added_already_or_is_not_new_changes_nothing(texts, tmp_path):
    root = prepared(texts, tmp_path / "out").content.root
    said = []
    assert prepared(texts, tmp_path / "out", adds=True, said=said).content.root == root
    assert said == [f"{tmp_path}/out holds these data already"]
    made = prepared(texts / "00.txt", tmp_path / "out", adds=True, said=said)
    assert (made.content.root, made.duplicates) == (root, 1)
    assert said[-1] == "nothing in these files is new"
    assert not (tmp_path / "out.partial").exists()


def test_an_addition_that_is_killed_changes_nothing(texts, tmp_path, often, monkeypatch):
    root = prepared(texts, tmp_path / "out").content.root
    more = tmp_path / "more"
    more.mkdir()
    for number in range(30):
        (more / f"{number}.txt").write_text(f"a further text, number {number}")
    undisturbed = tmp_path / "undisturbed"
    shutil.copytree(tmp_path / "out", undisturbed)
    wanted = prepared(more, undisturbed, adds=True).content.root
    for share in (0.3, 0.95):
        with pytest.raises(Killed):
            prepared(more, tmp_path / "out", adds=True, progress=killed_at(share))
        assert prepared(texts, tmp_path / "out").content.root == root
    _killed_while_moving(monkeypatch, more, tmp_path / "out", root, texts)
    assert prepared(more, tmp_path / "out", adds=True).content.root == wanted


def _killed_while_moving(monkeypatch, more, target, root, texts):
    """Break off after the files were moved, before the index was."""
    replace = os.replace

    def ended(source, place):
        if str(place) == str(target / "index.json"):
            raise Killed
        replace(source, place)

    with monkeypatch.context() as patch:
        patch.setattr(prepare.os, "replace", ended)
        with pytest.raises(Killed):
            prepared(more, target, adds=True)
    assert prepared(texts, target).content.root == root


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"held_out": 0.3}, "--held-out: 0.005 of the data there is held out; use 0.005"),
        ({"tokenizer": "other"}, "--tokenizer: the data there have another tokenizer"),
    ],
)
def test_what_is_added_has_to_be_alike(texts, tmp_path, options, sentence):
    prepared(texts, tmp_path / "out")
    (texts / "more.txt").write_text("more")
    if "tokenizer" in options:
        options = {"tokenizer": JsonTokenizer(train_tokenizer(["some text, and more text"], 260))}
    with pytest.raises(Usage, match=sentence):
        prepared(texts, tmp_path / "out", adds=True, **options)


# What is in the way


def test_a_folder_that_is_there_is_not_written_over(texts, tmp_path):
    prepared(texts, tmp_path / "out")
    (texts / "more.txt").write_text("more")
    with pytest.raises(Failure, match="other prepared data; choose another name, or add to them"):
        prepared(texts, tmp_path / "out")
    with pytest.raises(Failure, match="there is nothing to add to; leave out --add"):
        prepared(texts, tmp_path / "none", adds=True)
    (tmp_path / "b.partial").mkdir()
    (tmp_path / "b.partial" / "mine").touch()
    with pytest.raises(Failure, match="was not begun by this command; move it away"):
        prepared(texts, tmp_path / "b")


def test_a_second_process_is_refused(texts, tmp_path):
    def progress(share):
        with pytest.raises(Failure, match="another process is at work there; wait for it"):
            prepared(texts, tmp_path / "out")

    prepared(texts, tmp_path / "out", progress=progress)


def test_texts_without_a_document_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    with pytest.raises(Failure, match=r"nothing to train on: .* no document is left, and .*a.txt"):
        prepared(tmp_path / "a.txt", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_is_said_and_the_work_goes_on_later(texts, tmp_path, often, monkeypatch):
    root = prepared(texts, tmp_path / "one").content.root

    def full(path, content):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(buckets, "_append", full)
        with pytest.raises(Failure, match="is full: what was done so far stays there; free some"):
            prepared(texts, tmp_path / "out")
    assert prepared(texts, tmp_path / "out").content.root == root


def test_the_room_that_is_needed_is_said_first(texts, tmp_path):
    said = []
    prepared(texts, tmp_path / "out", said=said)
    assert said[0].startswith("needs about 0.0 MB on the disk, twice what the data take; ")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"held_out": 0.6}, "--held-out: 0.6"), ({"field": "a..b"}, "--field: 'a..b' has an empty")],
)
def test_options_without_a_meaning_are_refused(texts, tmp_path, options, sentence):
    with pytest.raises(Usage, match=sentence):
        preparation(texts, tmp_path / "out", **options)
