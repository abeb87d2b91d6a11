"""What a prepared folder has is what its index says, or it is refused."""

import msgspec
import numpy as np
import pytest
from worlds.prepared import prepared

from farflock.node.data.folder import PreparedFolder
from farflock.node.data.index import ENTRY, BadIndex, read_index, read_page, root_of
from farflock.swarm.chunk_store import digest_of

NARROW = np.dtype("<u2")


@pytest.fixture
def content(small, texts, tmp_path):
    return prepared(texts, tmp_path / "out", held_out=0.1).content


def shards(content):
    return [(split, n) for split in ("train", "held-out") for n in range(content.shards(split))]


def test_every_shard_lies_where_the_folder_says_and_is_a_chunk(content):
    assert content.shards("train") > 8
    files = {content.place("train", number).path for number in range(content.shards("train"))}
    assert len(files) > 2
    for split, number in shards(content):
        place = content.place(split, number)
        assert place.size <= 1000
        assert len(content.read(split, number)) == place.size // 2


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_runs_of_tokens_are_read_across_shards_and_no_other_shard_is(content, split, monkeypatch):
    whole = np.concatenate([content.read(split, n) for n in range(content.shards(split))])
    read, numbers = PreparedFolder.read, []

    def noted(self, split, number):
        numbers.append(number)
        return read(self, split, number)

    monkeypatch.setattr(PreparedFolder, "read", noted)
    length = len(content.read(split, 0)) + 100
    starts = np.array([0, 50, len(whole) - length])
    found = content.rows(split, starts, length)
    assert np.array_equal(found, [whole[start : start + length] for start in starts])
    numbers.clear()
    content.rows(split, np.array([len(whole) - 3]), 3)
    assert numbers == [content.shards(split) - 1]


def test_the_root_names_the_folder(content):
    assert content.root == root_of((content.folder / "index.json").read_bytes())
    assert PreparedFolder(content.folder, content.root).index == content.index
    with pytest.raises(BadIndex, match="was asked for; name the folder of that data"):
        PreparedFolder(content.folder, "0" * 64)


def test_a_damaged_shard_is_named_and_the_others_are_read(content):
    place = content.place("train", 3)
    with place.path.open("r+b") as file:
        file.seek(place.offset + 5)
        file.write(b"?")
    with pytest.raises(BadIndex, match=rf"{place.path} is damaged at byte {place.offset:,}; copy"):
        content.read("train", 3)
    content.read("train", 2)


@pytest.mark.parametrize("change", ["cut", "longer", "gone"])
def test_a_file_of_another_length_is_refused_before_anything_is_read(content, change):
    path = content.place("train", 0).path
    raw = path.read_bytes()
    path.unlink()
    if change != "gone":
        path.write_bytes(raw[:-2] if change == "cut" else raw * 2)
    with pytest.raises(BadIndex, match=r"has [0-9,]+ bytes, and the index says [0-9,]+; copy"):
        PreparedFolder(content.folder)


def test_a_page_that_is_missing_or_damaged_is_refused(content):
    (name,) = content.index.increments[0].train.pages
    path = content.folder / "pages" / name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(BadIndex, match="is damaged; copy it again"):
        PreparedFolder(content.folder)
    path.unlink()
    with pytest.raises(BadIndex, match="cannot be read"):
        PreparedFolder(content.folder)


def rewritten(content, page=None, **lies):
    """The folder with an index that lies about its shards to train on."""
    (increment,) = content.index.increments
    train = msgspec.structs.replace(increment.train, **lies)
    if page is not None:
        name = digest_of(page).hex()
        (content.folder / "pages" / name).write_bytes(page)
        train = msgspec.structs.replace(train, pages=(name,))
    increments = (msgspec.structs.replace(increment, train=train),)
    index = msgspec.structs.replace(content.index, increments=increments)
    (content.folder / "index.json").write_bytes(index.encode())
    return content.folder


@pytest.mark.parametrize("name", ["tokens", "documents"])
def test_an_index_that_lies_about_counts_is_refused(content, name):
    said = getattr(content.index.increments[0].train, name)
    with pytest.raises(BadIndex, match=f"the index says {said + 1:,} {name}, and its pages list"):
        PreparedFolder(rewritten(content, **{name: said + 1}))


def test_a_page_that_lies_about_documents_is_found_when_the_shard_is_read(content):
    (name,) = content.index.increments[0].train.pages
    entries = np.frombuffer((content.folder / "pages" / name).read_bytes(), dtype=ENTRY).copy()
    entries["documents"][0] += 1
    documents = int(entries["documents"].sum())
    other = PreparedFolder(rewritten(content, entries.tobytes(), documents=documents))
    with pytest.raises(BadIndex, match=r"is not [0-9]+ documents of 256 tokens; prepare"):
        other.read("train", 0)


@pytest.mark.parametrize(
    ("tokens", "documents"), [(0, 0), (1, 0), (1, 2), (501, 1), (2**32 - 1, 2**32 - 1)]
)
def test_a_page_with_what_no_shard_can_be_is_refused(small, tokens, documents):
    page = np.array([(bytes(32), tokens, documents)], dtype=ENTRY).tobytes()
    with pytest.raises(BadIndex, match="what no shard can be"):
        read_page(page, digest_of(page).hex(), 1, NARROW)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "does not describe prepared data"),
        (b"[]", "does not describe prepared data"),
        (b"\xff", "does not describe prepared data"),
        (b"[" * 100_000, "does not describe prepared data"),
        (b'{"version": 2}', "has version 2, not 1; update farflock"),
        (b'{"version": 1}', "does not describe prepared data"),
        (b" " * (4 * 2**20 + 1), "an index at most"),
    ],
    ids=range(7),
)
def test_what_is_no_index_is_refused_in_one_sentence(raw, sentence):
    with pytest.raises(BadIndex, match=sentence) as caught:
        read_index(raw, "here")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"end_of_text": 256},
        {"vocabulary": 1},
        {"parts": []},
        {"held_out": 0.9},
        {"more": 1},
        {"parts": [{"train": {"shards": 3, "pages": []}, "held_out": {}}]},
        {"parts": [{"train": {"shards": 1, "pages": ["../x"]}, "held_out": {}}]},
    ],
    ids=range(7),
)
def test_an_index_that_contradicts_itself_is_refused(change):
    increment = {"train": {"shards": 1, "pages": ["0" * 64]}, "held_out": {}}
    good = {
        "version": 1,
        "vocabulary": 256,
        "end_of_text": 255,
        "held_out": 0.0,
        "parts": [increment],
    }
    assert read_index(msgspec.json.encode(good), "here").totals("train").shards == 1
    with pytest.raises(BadIndex, match="does not describe prepared data"):
        read_index(msgspec.json.encode(good | change), "here")


def test_a_folder_that_is_none_is_refused_with_the_command_that_makes_one(tmp_path):
    with pytest.raises(BadIndex, match=r"cannot be read \(.*\); name a folder that `farflock data"):
        PreparedFolder(tmp_path)
