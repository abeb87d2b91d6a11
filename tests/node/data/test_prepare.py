"""Prepared data have each document once, and an equal root for equal sources and options."""

import errno
import io
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farflock.node.data import documents, prepare, shuffle, sorting
from farflock.node.data.documents import BadDocuments, ReadingOptions
from farflock.node.data.prepare import Preparation
from farflock.node.data.shuffle import DocumentDraws
from farflock.node.data.sorting import SortingOptions, SourcePlan
from farflock.node.data.sources import find_files
from farflock.node.data.verify import FolderContent, held_out_tokens
from farflock.node.errors import Failure, Usage
from farflock.node.tokens.tokenizer import ByteTokenizer

SMALL = {"shard_bytes": 4096, "held_out": 0.02}
TEXTS = [f"document {n} " * (1 + n * 7 % 40) for n in range(300)]


def write_lines(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def source(tmp_path):
    for place in range(3):
        write_lines(tmp_path / "in" / f"{place}.jsonl", TEXTS[place::3])
    return tmp_path / "in"


def preparation(named, target, *, seed=1, skip=False, tokenizer=None, **options):
    tokenizer = tokenizer or ByteTokenizer()
    named = [named] if isinstance(named, os.PathLike | str) else named
    reading = ReadingOptions(
        skip=skip, vocabulary=tokenizer.vocab_size, end_of_text=tokenizer.end_of_text
    )
    given_options = SortingOptions(seed=seed, reading=reading, **{**SMALL, **options})
    files = find_files([str(each) for each in named]).files
    return Preparation(files, tokenizer, given_options, target)


def run(work, *, threads=1, progress=lambda share: None, say=lambda text: None, force=False):
    ticks = itertools.count(step=60.0)  # each batch is saved
    return work.run(
        threads=threads, clock=lambda: next(ticks), progress=progress, say=say, force=force
    )


def made(named, target, **options):
    return run(preparation(named, target, **options))


def read(folder, shards, width=2):
    """The documents in shards, as lists of tokens; one that was cut counts as one."""
    arrays = [np.fromfile(folder / shard.name, f"<u{width}") for shard in shards]
    tokens = np.concatenate([*arrays, np.zeros(0, f"<u{width}")])
    parts = np.split(tokens, np.flatnonzero(tokens == 255) + 1)
    return [part.tolist() for part in parts if len(part)]


def trained_and_held_out(folder, name="text"):
    content = FolderContent(folder)
    content.verify(lambda share: None)
    held_out = content.index.sources[name].held_out
    return read(folder, content.shards[name]), read(folder, held_out)


def encoded(texts):
    return [[*text.encode(), 255] for text in texts]


def twin(texts, seed, options=SMALL, name="text"):
    """The slow twin of the whole: everything in memory, sorted by the draws."""
    draws = DocumentDraws(seed, name)
    size = 2 * sum(len(json.dumps({"text": text})) + 1 for text in texts)
    share = min(options["held_out"], 0.9 * options["shard_bytes"] / size)
    count = -(-size // options["shard_bytes"])
    keyed = [(*draws.of(number), text) for number, text in enumerate(texts)]
    held_out = [key for key in keyed if key[0] < int(share * 2**64)]
    train = [key for key in keyed if key not in held_out]
    return (
        encoded([key[3] for key in sorted(train, key=lambda key: (key[1] % count, key[2]))]),
        encoded([key[3] for key in sorted(held_out, key=lambda key: key[2])]),
    )


def test_each_document_is_there_once_in_the_drawn_order(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    result = made(path, tmp_path / "out")
    assert trained_and_held_out(tmp_path / "out") == twin(TEXTS, 1)
    (kept,) = result.index.sources.values()
    trained, held_out = twin(TEXTS, 1)
    assert (kept.documents, kept.tokens) == (len(trained), sum(map(len, trained)))
    assert held_out_tokens(kept) == sum(map(len, held_out)) > 256
    assert not (tmp_path / "out.partial").exists()


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=400), min_size=1),
    st.integers(0, 2**63),
    st.integers(16, 400),
)
def test_whatever_the_texts_none_is_lost(tmp_path_factory, texts, seed, part):
    folder = tmp_path_factory.mktemp("any")
    path = write_lines(folder / "a.jsonl", texts)
    texts = [text for text in texts if text]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PART_CHARS", part)
        patch.setattr(shuffle, "LOADED_BYTES", 1000)
        if not texts:
            with pytest.raises(Failure, match="there is nothing to train on"):
                made(path, folder / "out", seed=seed)
            return
        made(path, folder / "out", seed=seed)
    trained, held_out = trained_and_held_out(folder / "out")
    assert held_out
    if trained[-1][-1] != 255:  # the held-out part took the end of it
        trained, held_out = trained[:-1], [trained[-1] + held_out[0], *held_out[1:]]
    assert sorted(trained + held_out) == sorted(encoded(texts))


@pytest.mark.parametrize("held_out", [0.02, 0.5])
def test_a_single_document_is_trained_on_though_it_was_drawn_to_be_held_out(tmp_path, held_out):
    name, texts = "text", ["0123456789" * 20]
    seeds = range(400)
    size = 2 * len(json.dumps({"text": texts[0]}))
    share = min(held_out, 0.9 * SMALL["shard_bytes"] / size)
    seed = next(s for s in seeds if DocumentDraws(s, name).of(0)[0] < int(share * 2**64))
    path = write_lines(tmp_path / "a.jsonl", texts)
    made(path, tmp_path / "out", seed=seed, held_out=held_out)
    (whole,), (tail,) = trained_and_held_out(tmp_path / "out")
    assert whole + tail == encoded(texts)[0]


def test_the_root_depends_on_neither_threads_nor_place(source, tmp_path, monkeypatch):
    roots = {made(source, tmp_path / "one").root}
    monkeypatch.setattr(sorting, "BATCH_PARTS", 7)
    roots.add(run(preparation(source, tmp_path / "two"), threads=2).root)
    source.rename(tmp_path / "moved")
    roots.add(made(tmp_path / "moved", tmp_path / "three").root)
    assert len(roots) == 1


def test_seed_name_and_share_each_change_the_root(source, tmp_path):
    roots = [
        made(source, tmp_path / "0").root,
        made(source, tmp_path / "1", seed=2).root,
        made(f"web={source}", tmp_path / "2").root,
        made(source, tmp_path / "3", held_out=0.0).root,
        made(source, tmp_path / "4", shard_bytes=8192).root,
    ]
    assert len(set(roots)) == 5


def test_a_source_has_the_same_shards_whatever_stands_beside_it(source, tmp_path):
    write_lines(tmp_path / "more.jsonl", TEXTS[:50])
    alone = made(f"web={source}", tmp_path / "one").index.sources
    both = made([f"code={tmp_path / 'more.jsonl'}", f"web={source}"], tmp_path / "two")
    assert both.index.sources["web"] == alone["web"]
    assert list(both.index.sources) == ["code", "web"]


class Stopped(Exception):
    """What stands for a machine that stops."""


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_broken_off_anywhere_it_goes_on_to_the_same_root(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("broken")
    for place in range(3):
        write_lines(folder / "in" / f"{place}.jsonl", TEXTS[place:150:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "BATCH_PARTS", 9)
        patch.setattr(documents, "PART_CHARS", 100)
        steps = []
        expected = run(preparation(folder / "in", folder / "whole"), progress=steps.append).root
        breaks = data.draw(st.lists(st.integers(0, len(steps) - 1), max_size=3))
        for place in breaks:
            left = itertools.count()

            def stop(share, left=left, place=place):
                if next(left) == place:
                    raise Stopped

            try:
                result = run(preparation(folder / "in", folder / "out"), progress=stop)
            except Stopped:
                continue
            break
        else:
            result = run(preparation(folder / "in", folder / "out"))
    assert result.root == expected
    assert FolderContent(folder / "out").verify(lambda share: None) > 2


def broken_off(source, target, **options):
    def stop(share):
        raise Stopped

    with pytest.raises(Stopped):
        run(preparation(source, target, **options), progress=stop)


def test_what_was_read_is_not_tokenized_again(source, tmp_path, monkeypatch):
    class Counting(ByteTokenizer):
        texts = 0

        def encode_batch(self, texts):
            Counting.texts += len(texts)
            return super().encode_batch(texts)

    monkeypatch.setattr(sorting, "BATCH_PARTS", 10)

    def stop(share):
        if share > 0.5:
            raise Stopped

    with pytest.raises(Stopped):
        run(preparation(source, tmp_path / "out", tokenizer=Counting()), progress=stop)
    Counting.texts, said = 0, []
    run(preparation(source, tmp_path / "out", tokenizer=Counting()), say=said.append)
    assert 0 < Counting.texts < 180
    assert said[0] == f"going on with {tmp_path / 'out.partial'}"


def test_other_options_or_changed_sources_do_not_go_on(source, tmp_path):
    broken_off(source, tmp_path / "out")
    with pytest.raises(
        Failure, match=r"out.partial: it was begun with other options, or its sourc"
    ):
        made(source, tmp_path / "out", seed=2)
    with (source / "1.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(Failure, match="have changed since; give the same options, or start over"):
        made(source, tmp_path / "out")
    forced = run(preparation(source, tmp_path / "out"), force=True)
    assert forced.root == made(source, tmp_path / "other").root


def test_a_damaged_bucket_is_refused_and_force_starts_over(source, tmp_path):
    def stop(share):
        if share > 0.89:
            raise Stopped

    with pytest.raises(Stopped):
        run(preparation(source, tmp_path / "out"), progress=stop)
    buckets = sorted((tmp_path / "out.partial" / "buckets").glob("*.tokens"))
    state = json.loads((tmp_path / "out.partial" / "state.json").read_text())
    state["buckets"] = {path.stem: [path.stat().st_size + 2, 0] for path in buckets}
    (tmp_path / "out.partial" / "state.json").write_text(json.dumps(state))
    with pytest.raises(Failure, match="a part of it is missing; start over with --force"):
        made(source, tmp_path / "out")
    forced = run(preparation(source, tmp_path / "out"), force=True)
    assert forced.root == made(source, tmp_path / "other").root


def test_a_finished_folder_is_left_as_it_is(source, tmp_path):
    first, said = made(source, tmp_path / "out"), []
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = run(preparation(source, tmp_path / "out"), say=said.append)
    assert (again.root, said) == (first.root, [f"{tmp_path / 'out'} holds these data already"])
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    with pytest.raises(Failure, match="prepared from other sources or with other options; choose"):
        made(source, tmp_path / "out", seed=2)
    replaced = run(preparation(source, tmp_path / "out", seed=2), force=True)
    assert FolderContent(tmp_path / "out").root == replaced.root != first.root
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_other_peoples_files_are_never_replaced(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("x")
    (tmp_path / "two.partial").mkdir()
    (tmp_path / "two.partial" / "thesis.txt").write_text("x")
    with pytest.raises(Failure, match="it is there, and is not prepared data; choose another name"):
        run(preparation(source, tmp_path / "out"), force=True)
    with pytest.raises(Failure, match="was not begun by this command; move it away"):
        run(preparation(source, tmp_path / "two"), force=True)


def test_a_line_that_was_corrected_needs_no_force(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    whole = path.read_text()
    path.write_text("{\n" + whole)
    with pytest.raises(BadDocuments, match="line 1: it is not JSON"):
        made(path, tmp_path / "out")
    path.write_text(whole)
    assert made(path, tmp_path / "out").root == made(path, tmp_path / "other").root


def test_an_empty_folder_may_be_there(source, tmp_path):
    (tmp_path / "out").mkdir()
    assert made(source, tmp_path / "out").root == made(source, tmp_path / "other").root


def test_two_do_not_work_in_one_folder(source, tmp_path):
    pytest.importorskip("fcntl", reason="other systems cannot tell")

    def second(share):
        with pytest.raises(Failure, match="another process is at work there"):
            made(source, tmp_path / "out")

    run(preparation(source, tmp_path / "out"), progress=second)


class FullDisk:
    """A disk with so much room that files are opened on; a write takes what fits."""

    def __init__(self, room):
        self.room, self._open = room, Path.open

    def open(self, path, mode="r", *more, **options):
        file = self._open(path, mode, *more, **options)
        return file if "r" in mode else Writing(file, self)


class Writing:
    """A file that is written on a disk that may become full."""

    def __init__(self, file, disk):
        self._file, self._disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *given):
        self._file.close()

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, content):
        raw = bytes(content)
        taken = self._file.write(raw[: self._disk.room])
        self._disk.room -= taken
        if taken == 0 or (taken < len(raw) and isinstance(self._file, io.BufferedWriter)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return taken


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 350_000))
@example(0)
@example(60)
@example(164_844)
def test_a_full_disk_is_one_sentence_and_the_work_goes_on_later(tmp_path_factory, room):
    folder = tmp_path_factory.mktemp("full")
    path = write_lines(folder / "a.jsonl", TEXTS[:150])
    expected = made(path, folder / "whole").root
    least = sum(shard.stat().st_size for shard in (folder / "whole").rglob("*.bin"))
    disk = FullDisk(room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorting, "BATCH_PARTS", 20)
        patch.setattr(Path, "open", lambda *given, **more: disk.open(*given, **more))
        try:
            made(path, folder / "out")
            # Tokens are written to buckets and then to shards; saved states take the more, the
            # longer it takes.
            assert room > 2 * least
        except Failure as error:
            assert str(error).startswith(f"the disk of {folder / 'out.partial'} is full: ")
            assert not (folder / "out").exists()
    assert made(path, folder / "out").root == expected
    assert FolderContent(folder / "out").verify(lambda share: None) > 2


def test_a_file_that_is_written_meanwhile_is_refused(source, tmp_path):
    work = preparation(source, tmp_path / "out")
    with (source / "2.jsonl").open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(BadDocuments, match="was changed while it was read; wait until nobody"):
        run(work)


def test_skipped_documents_are_counted(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    path.write_text(path.read_text() + "{\n[]\n")
    with pytest.raises(BadDocuments, match="line 301: it is not JSON"):
        made(path, tmp_path / "out")
    assert made(path, tmp_path / "two", skip=True).skipped == {"text": 2}


def test_the_end_of_the_only_document_is_held_out(tmp_path):
    text = "".join(f"line {n}\n" for n in range(3000))
    (tmp_path / "a.txt").write_text(text)
    said = []
    run(preparation(tmp_path / "a.txt", tmp_path / "out"), say=said.append)
    trained, held_out = trained_and_held_out(tmp_path / "out")
    assert bytes([*itertools.chain(*trained)]) + bytes(held_out[0][:-1]) == text.encode()
    assert len(held_out) == 1
    assert len(held_out[0]) >= 256
    assert "text: few documents were drawn to be held out, so the end of the others is too" in said


def test_nothing_is_held_out_if_that_is_asked(source, tmp_path):
    made(source, tmp_path / "out", held_out=0.0)
    assert trained_and_held_out(tmp_path / "out")[1] == []


def test_no_more_than_about_a_shard_is_held_out(tmp_path):
    write_lines(tmp_path / "a.jsonl", TEXTS * 4)
    (kept,) = made(tmp_path / "a.jsonl", tmp_path / "out", held_out=0.5).index.sources.values()
    assert 256 < held_out_tokens(kept) <= 4096 // 2 + max(map(len, TEXTS)) + 1


def test_the_plays_are_held_out_whole(tmp_path):
    from farflock.node.model.corpus import load_corpus

    made("shakespeare", tmp_path / "out", shard_bytes=65536)
    trained, held_out = trained_and_held_out(tmp_path / "out")
    corpus = load_corpus("shakespeare")
    assert sum(map(len, held_out)) == len(corpus.held_out.encode()) + len(held_out)
    assert sum(map(len, trained)) == len(corpus.train.encode()) + len(trained)
    assert len(held_out) == len(corpus.held_out_titles)


def test_a_tokenizer_goes_along_and_tokens_of_others_stay_as_they_are(tmp_path):
    pytest.importorskip("tokenizers", reason="it reads tokenizer.json")
    from farflock.node.tokens.json_tokenizer import JsonTokenizer
    from farflock.node.tokens.tokenizer_training import train_tokenizer

    tokenizer = JsonTokenizer(train_tokenizer(TEXTS, 300))
    texts = [tokenizer.encode(text).tolist() for text in TEXTS]
    end = tokenizer.end_of_text
    flat = [token for text in texts for token in (*text, end)]
    np.array(flat, dtype="<u2").tofile(tmp_path / "train.bin")
    write_lines(tmp_path / "a.jsonl", TEXTS)
    for name in ("train.bin", "a.jsonl"):
        result = made(tmp_path / name, tmp_path / f"out-{name}", tokenizer=tokenizer, held_out=0.0)
        assert result.index.tokenizer.sha256 == tokenizer.sha256
        assert (result.folder / "tokenizer.json").read_bytes() == tokenizer.raw
        content = FolderContent(result.folder)
        tokens = np.concatenate(
            [np.fromfile(result.folder / shard.name, "<u2") for shard in content.shards["text"]]
        )
        found = [part.tolist() for part in np.split(tokens, np.flatnonzero(tokens == end) + 1)]
        assert sorted(found[:-1]) == sorted([*text, end] for text in texts)


def test_a_plan_suits_the_size(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    (file,) = find_files([str(path)]).files
    options = SortingOptions(seed=0, held_out=0.1, shard_bytes=4096, reading=ReadingOptions())
    plan = SourcePlan.of([file], ByteTokenizer(), options)
    assert plan.buckets == -(-2 * file.size // 4096)
    assert plan.held_below == int(0.9 * 4096 / (2 * file.size) * 2**64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"held_out": 0.6}, "--held-out: 0.6 is no share to hold out; use 0 to 0.5"),
        ({"shard_bytes": 5}, "--shard-bytes: 5 is out of range; use 4,096 to 268,435,456"),
    ],
)
def test_impossible_options_are_refused(source, tmp_path, change, sentence):
    with pytest.raises(Usage, match=sentence):
        preparation(source, tmp_path / "out", **change)


def test_the_room_that_it_takes_is_told(source, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(
        prepare.shutil, "disk_usage", lambda path: type("", (), {"free": 1000, "total": 1})
    )
    run(preparation(source, tmp_path / "out"), say=said.append)
    assert said[0].endswith("MB on the disk; 0.0 MB are free, which may not be enough")


MEASURED = """
import resource, sys
from farflock.node.cli.main import cli

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak_mb()
cli.main(sys.argv[1:], standalone_mode=False)
sys.stderr.write(f"\\npeak {peak_mb() - before:.0f}")
"""


@pytest.mark.ci_more
@pytest.mark.timeout(600)
def test_memory_does_not_grow_with_the_sources(tmp_path):
    source = tmp_path / "in"
    chance = random.Random(5)
    words = [f"w{chance.getrandbits(24):x}" for _ in range(5000)]
    for place in range(6):
        texts = (" ".join(chance.choices(words, k=chance.randrange(10, 3000))) for _ in range(4600))
        write_lines(source / f"{place}.jsonl", texts)
    assert sum(path.stat().st_size for path in source.iterdir()) > 290_000_000
    command = ["data", "prepare", source, "--tokenizer", "bytes", "-o", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, command)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stderr.rpartition("peak ")[2]) < 512
