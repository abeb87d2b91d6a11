"""An index says what there is and how to know it; anything else is refused in words."""

import contextlib
import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.prepared import prepared

from farflock.node.data import index as module
from farflock.node.data.index import (
    PIECE_BYTES,
    BadIndex,
    DataShard,
    ListedFile,
    listed,
    listed_stream,
    read_index,
    read_page,
    root_of,
    token_bytes,
)
from farflock.swarm.chunk_store import digest_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("prepared")
    prepared(made)
    return made


@pytest.fixture
def raw(folder):
    return (folder / "index.json").read_bytes()


def altered(raw, **changes):
    return msgspec.json.encode(msgspec.json.decode(raw) | changes)


def test_an_index_comes_back_as_it_was(raw):
    index = read_index(raw, "it", root_of(raw))
    assert index.encode() == raw
    assert list(index.sources) == ["text"]
    assert index.dtype == "<u2"


# of the folder that `prepared` makes, from before there were marks
ROOT = "e1dba6cd37516323ef21c73b09597f9dad3fd0457fe48069ad80c3d8b905f580"


def test_an_index_without_marks_has_the_bytes_that_it_always_had(raw):
    assert root_of(raw) == ROOT
    assert b"answers" not in raw
    assert not read_index(raw, "it").counts_answers


def test_an_index_of_answers_comes_back_as_it_was(raw):
    marked = altered(raw, answers=True, token_bytes=4)
    index = read_index(marked, "it")
    assert index.counts_answers
    assert index.dtype == "<u4"
    assert read_index(index.encode(), "it") == index
    assert b'"answers": true' in index.encode()


def test_every_file_of_a_folder_has_the_hashes_that_are_listed(folder, raw):
    index = read_index(raw, "it")
    source = index.sources["text"]
    page = source.pages[0]
    shards = read_page((folder / page.name).read_bytes(), page, index)
    assert sum(shard.tokens for shard in shards) == source.tokens
    for file in (page, *shards, *source.held_out):
        found = listed(folder / file.name)
        assert (found.sha256, found.size, found.pieces) == (file.sha256, file.size, file.pieces)


@given(st.integers(1, 5 * PIECE_BYTES // 2))
def test_pieces_cover_a_file_in_order(size):
    file = listed_stream(io.BytesIO(bytes(size)))
    sizes = [piece for _, piece in file.chunks()]
    assert sum(sizes) == size
    assert all(piece == PIECE_BYTES for piece in sizes[:-1])
    assert [digest for digest, _ in file.chunks()] == [digest_of(bytes(piece)) for piece in sizes]


def test_another_root_is_refused(raw):
    with pytest.raises(BadIndex, match=r"has the root .*…, and abab.*… was asked for; name the"):
        read_index(raw, "it", "ab" * 32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 2}, "has version 2, not 1; update farflock"),
        ({"vocabulary": 1}, "vocabulary"),
        ({"vocabulary": 70_000}, "70000 tokens do not take 2 bytes each"),
        ({"end_of_text": 256}, "the end of text is 256 of 256 tokens"),
        ({"answers": True}, "256 tokens do not take 2 bytes each"),
        ({"answers": False}, "answers is false, and is left out then"),
        ({"answers": None}, "does not describe prepared data"),
        (
            {"answers": True, "token_bytes": 4, "vocabulary": 2**31 + 1},
            "2147483649 tokens leave no bit for a mark",
        ),
        ({"sources": {}}, "does not describe prepared data"),
        ({"sources": {"../up": {}}}, "does not describe prepared data"),
        ({"more": 1}, "unknown field"),
        ({"tokenizer": {"sha256": "ab" * 32, "size": 9, "pieces": []}}, "does not describe"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(raw, changes, says):
    with pytest.raises(BadIndex, match=says):
        read_index(altered(raw, **changes), "it")


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(content):
    with pytest.raises(BadIndex):
        read_index(content, "it")


@given(st.data())
def test_a_mutated_index_is_refused_or_another_index(folder, data):
    raw = bytearray((folder / "index.json").read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadIndex):
        read_index(bytes(raw), "it")
    if bytes(raw) != (folder / "index.json").read_bytes():
        with pytest.raises(BadIndex):
            read_index(bytes(raw), "it", root_of((folder / "index.json").read_bytes()))


def test_an_index_above_a_chunk_is_refused_unread():
    with pytest.raises(BadIndex, match="and an index at most 4,194,304"):
        read_index(bytes(PIECE_BYTES + 1), "it")


def test_a_page_with_other_shards_than_the_index_says_is_refused(folder, raw):
    index = read_index(raw, "it")
    page = index.sources["text"].pages[0]
    content = (folder / page.name).read_bytes()
    for said in ({"shards": page.shards + 1}, {"tokens": page.tokens + 1}):
        with pytest.raises(BadIndex, match="does not list what the index says"):
            read_page(content, msgspec.structs.replace(page, **said), index)


def test_a_shard_whose_tokens_do_not_fill_it_is_refused(folder, raw):
    index = read_index(raw, "it")
    shards = read_page(
        (folder / index.sources["text"].pages[0].name).read_bytes(),
        index.sources["text"].pages[0],
        index,
    )
    false = msgspec.structs.replace(shards[0], tokens=shards[0].tokens - 1)
    with pytest.raises(BadIndex, match="tokens of 2 bytes; prepare the data again"):
        module.require_sizes((false,), index)


def test_a_file_has_as_many_pieces_as_its_size_needs():
    whole = msgspec.to_builtins(listed_stream(io.BytesIO(bytes(PIECE_BYTES + 1))))
    assert msgspec.convert(whole, ListedFile).size == PIECE_BYTES + 1
    for wrong in ({"size": PIECE_BYTES}, {"pieces": whole["pieces"][:1]}):
        with pytest.raises(msgspec.ValidationError, match="pieces"):
            msgspec.convert(whole | wrong, ListedFile)


@pytest.mark.parametrize(
    ("vocabulary", "size"), [(256, 2), (65_536, 2), (65_537, 4), (128_256, 4), (2**32, 4)]
)
def test_tokens_take_two_bytes_or_four(vocabulary, size):
    assert token_bytes(vocabulary) == size
    assert token_bytes(vocabulary, has_marks=True) == 4


def test_names_in_a_folder_come_from_hashes_alone(folder, raw):
    index = read_index(raw, "it")
    page = index.sources["text"].pages[0]
    assert page.name == f"pages/{page.sha256}.json"
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(
            {"sha256": "../" + "a" * 61, "size": 1, "pieces": ["a" * 64], "tokens": 1}
            | {"documents": 1},
            DataShard,
        )
