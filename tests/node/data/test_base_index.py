"""The index of a base names a model's files and nothing else; anything else is refused in words."""

import contextlib
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds.folders.model_folder import write_model

from farflock.node.data.base_index import (
    MAX_BASE_FILE_BYTES,
    BaseFile,
    BaseIndex,
    index_of,
    read_base_index,
)
from farflock.node.data.index import PIECE_BYTES, BadIndex, listed, root_of
from farflock.node.model.hf_config import MAX_CONFIG_BYTES, BadModelFolder
from farflock.node.state.weights_file import INDEX_NAME

SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
BESIDE = {
    "generation_config.json": b"{}",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
}


@pytest.fixture
def folder(tmp_path):
    made = write_model(tmp_path / "model")
    (made / "README.md").write_text("not a part of the base")
    (made / "pytorch_model.bin").write_bytes(b"no more is this")
    return made


def entry(name="model.safetensors", size=1, **changes):
    pieces = ["b" * 64] * -(-size // PIECE_BYTES)
    return {"name": name, "sha256": "a" * 64, "size": size, "pieces": pieces} | changes


def index_with(*files):
    return msgspec.json.encode({"version": 1, "files": files})


def names(raw):
    return [file.name for file in read_base_index(raw, "it").files]


def test_an_index_has_the_files_of_the_model_with_their_hashes(folder):
    for name, content in BESIDE.items():
        (folder / name).write_bytes(content)
    raw = index_of(folder)
    index = read_base_index(raw, "it", root_of(raw))
    assert names(raw) == sorted(["config.json", INDEX_NAME, *SHARDS, *BESIDE])
    for file in index.files:
        found = listed(folder / file.name)
        assert (found.sha256, found.size, found.pieces) == (file.sha256, file.size, file.pieces)
    assert index.size == sum((folder / name).stat().st_size for name in names(raw))
    assert {file.name for file in index.beside} == {"config.json", INDEX_NAME, *BESIDE}
    assert index.encode() == raw


def test_a_model_in_one_file_has_no_index_of_weights(tmp_path):
    assert names(index_of(write_model(tmp_path / "one", shards=1))) == [
        "config.json",
        "model.safetensors",
    ]


def test_the_root_depends_on_the_content_alone(tmp_path):
    one, two, other = (
        write_model(tmp_path / f"{n}", seed=seed) for n, seed in enumerate((1, 1, 2))
    )
    assert index_of(one) == index_of(two) != index_of(other)


def test_files_are_read_once_unless_they_change(folder):
    seen = []
    note = lambda done, total: seen.append((done, total))  # noqa: E731
    raw = index_of(folder, note)
    total = read_base_index(raw, "it").size
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    seen.clear()
    assert index_of(folder, note) == raw
    assert not seen
    (folder / "generation_config.json").write_text("{}")
    assert index_of(folder, note) != raw
    assert seen


def test_a_reading_can_be_ended(folder):
    class Enough(Exception):
        pass

    def ended(done, total):
        raise Enough

    for _ in range(2):  # and nothing of it is kept
        with pytest.raises(Enough):
            index_of(folder, ended)
    assert index_of(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / SHARDS[1]).unlink(), "No such file.*; copy the whole folder"),
        (lambda folder: (folder / "config.json").unlink(), "config.json: No such file"),
        (lambda folder: (folder / SHARDS[1]).write_bytes(b""), "is no file of 1 to 1,099,511"),
        (lambda folder: os.truncate(folder / "config.json", MAX_CONFIG_BYTES + 1), "1 to 1,048,57"),
        (lambda folder: (folder / "tokenizer.json").mkdir(), "tokenizer.json is no file of 1 to"),
        (lambda folder: os.truncate(folder / SHARDS[1], 270 * 10**9), "which is about 263 GB; sav"),
        (
            lambda folder: (folder / INDEX_NAME).write_text("{"),
            "cannot be read: .*; save the model",
        ),
        (
            lambda folder: (folder / INDEX_NAME).write_text('{"weight_map": {"a": "../b.bin"}}'),
            r"names '../b.bin', which is no safetensors file of its own folder",
        ),
    ],
)
def test_a_folder_that_cannot_be_a_base_is_refused_in_words(folder, change, says):
    change(folder)
    with pytest.raises(BadModelFolder, match=says):
        index_of(folder)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "../model.safetensors",
        "a/model.safetensors",
        "/model.safetensors",
        ".model.safetensors",
        "model.safetensors\n",
        "model.safetensors\x00",
        "modèle.safetensors",
        "pytorch_model.bin",
        "index.json",
        "modeling.py",
        "a" * 189 + ".safetensors",
    ],
)
def test_no_file_has_another_name_than_those_of_a_model(name):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(entry(name), BaseFile)
    with pytest.raises(BadIndex, match="does not describe the files of a model"):
        read_base_index(index_with(entry("config.json"), entry(name), entry("x.safetensors")), "it")


def test_names_of_weights_may_be_long():
    assert msgspec.convert(entry("a" * 188 + ".safetensors"), BaseFile).size == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0},
        {"size": PIECE_BYTES + 1},
        {"size": MAX_BASE_FILE_BYTES + 1},
        {"size": 1.5},
        {"pieces": ["b" * 64] * 2},
        {"pieces": ["b" * 63]},
        {"sha256": "A" * 64},
        {"executable": True},
    ],
)
def test_files_of_other_sizes_or_hashes_are_refused(changes):
    assert msgspec.convert(entry(), BaseFile)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(entry() | changes, BaseFile)


def test_a_configuration_is_small():
    assert msgspec.convert(entry("config.json", MAX_CONFIG_BYTES), BaseFile)
    with pytest.raises(msgspec.ValidationError, match=r"a file 'config.json' of 1048577 bytes"):
        msgspec.convert(entry("config.json", MAX_CONFIG_BYTES + 1), BaseFile)


@pytest.mark.parametrize(
    "files",
    [
        ["config.json"],
        ["model.safetensors"],
        ["model.safetensors", "tokenizer.json"],
        ["config.json", "tokenizer.json"],
        ["config.json", "other.safetensors"],
        ["config.json", "a.safetensors", "model.safetensors"],
        ["model.safetensors", "config.json"],
        ["config.json", "config.json", "model.safetensors"],
        ["Model.safetensors", "config.json", "model.safetensors", INDEX_NAME],
        ["config.json", INDEX_NAME],
    ],
)
def test_files_that_are_no_model_are_refused(files):
    with pytest.raises(BadIndex, match=r"does not describe the files of a model .*with --base"):
        read_base_index(index_with(*map(entry, files)), "it")


def test_another_root_another_version_and_a_long_index_are_refused():
    raw = index_with(entry("config.json"), entry())
    assert read_base_index(raw, "it", root_of(raw)).version == 1
    with pytest.raises(BadIndex, match=r"has the root .*…, and abab.*… was asked for; name a"):
        read_base_index(raw, "it", "ab" * 32)
    later = msgspec.json.encode(msgspec.json.decode(raw) | {"version": 2})
    with pytest.raises(BadIndex, match="has version 2, not 1; update farflock"):
        read_base_index(later, "it")
    with pytest.raises(BadIndex, match="and an index at most 4,194,304"):
        read_base_index(bytes(PIECE_BYTES + 1), "it")


@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(content):
    with pytest.raises(BadIndex):
        read_base_index(content, "it")


HASH = st.binary(min_size=32, max_size=32).map(bytes.hex)


@st.composite
def files(draw, name):
    most = 3 * PIECE_BYTES if name.endswith(".safetensors") else MAX_CONFIG_BYTES
    size = draw(st.integers(1, most))
    pieces = tuple(draw(HASH) for _ in range(-(-size // PIECE_BYTES)))
    return BaseFile(name=name, sha256=draw(HASH), size=size, pieces=pieces)


@st.composite
def indexes(draw):
    count = draw(st.integers(1, 3))
    shards = [f"model-{n}.safetensors" for n in range(count)]
    beside = draw(st.sets(st.sampled_from(sorted(BESIDE))))
    return BaseIndex(
        files=tuple(
            draw(files(name)) for name in sorted({"config.json", INDEX_NAME, *shards, *beside})
        )
    )


@given(indexes())
def test_an_index_comes_back_as_it_was(index):
    assert read_base_index(index.encode(), "it", root_of(index.encode())) == index


@given(indexes(), st.data())
def test_a_mutated_index_is_refused_or_another_index(index, data):
    raw = bytearray(index.encode())
    place = data.draw(st.integers(0, len(raw) - 1))
    raw[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadIndex):
        found = read_base_index(bytes(raw), "it")
        assert found.size == sum(size for file in found.files for _, size in file.chunks())
    if bytes(raw) != index.encode():
        with pytest.raises(BadIndex):
            read_base_index(bytes(raw), "it", root_of(index.encode()))
