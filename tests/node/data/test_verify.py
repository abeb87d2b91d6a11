"""A folder is whole only if each of its files is the one that the index lists."""

import json

import pytest
from worlds.prepared import documents_of, prepared

from farflock.node.data.index import BadIndex
from farflock.node.data.prepare import chat_preparation
from farflock.node.data.verify import FolderContent, held_out_tokens
from farflock.node.tokens.tokenizer import ByteTokenizer


@pytest.fixture
def folder(tmp_path):
    prepared(tmp_path / "data", {"web": documents_of(50), "code": documents_of(20)}, shards=2)
    return tmp_path / "data"


def test_a_whole_folder_is_described(folder):
    content, shares = FolderContent(folder), []
    assert {name: len(shards) for name, shards in content.shards.items()} == {"web": 2, "code": 2}
    assert content.verify(shares.append) == 8
    assert shares == sorted(shares)
    assert shares[-1] == 1
    files = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    held_out = [
        path for path in files if path.stem == content.index.sources["web"].held_out[0].sha256
    ]
    twice = sum(files[path] for path in held_out)  # both sources hold out the same text here
    assert content.bytes == sum(files.values()) + twice
    assert 2 * held_out_tokens(content.index.sources["web"]) == twice


@pytest.mark.parametrize("kind", ["shards", "pages"])
@pytest.mark.parametrize("damage", ["changed", "shorter", "gone"])
def test_each_damage_is_found(folder, kind, damage):
    path = sorted((folder / kind).iterdir())[0]
    raw = bytearray(path.read_bytes())
    raw[5] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(raw if damage == "changed" else raw[:-2])
    what = "cannot be read .No such file" if damage == "gone" else "is not the file that the index"
    with pytest.raises(BadIndex, match=f"{path.name} {what}.*; copy it again, or prepare"):
        FolderContent(folder).verify(lambda share: None)


@pytest.fixture
def marked(tmp_path):
    """A folder of prompts and completions, with nothing held out."""
    pairs = [{"prompt": f"What is {n}? ", "completion": "It is."} for n in range(50)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    named, target = [str(tmp_path / "a.jsonl")], tmp_path / "marked"
    _, preparation = chat_preparation(named, ByteTokenizer(), None, target, held_out=0.0)
    preparation.run(
        threads=1, clock=lambda: 0.0, progress=lambda share: None, say=lambda text: None
    )
    return target


def test_the_tokens_that_count_are_those_without_a_mark(folder, marked):
    assert FolderContent(marked).answer_tokens() == 50 * len("It is.") + 50  # ends of text
    plain = FolderContent(folder)
    total = sum(shard.tokens for each in plain.shards.values() for shard in each)
    assert plain.answer_tokens() == total


@pytest.mark.parametrize("damage", ["shorter", "gone"])
def test_tokens_of_a_damaged_shard_are_not_counted(marked, damage):
    (path,) = (marked / "shards").iterdir()
    raw = path.read_bytes()
    path.unlink()
    if damage == "shorter":
        path.write_bytes(raw[:-4])
    with pytest.raises(BadIndex, match=f"{path.name} .*; copy it again, or prepare the data again"):
        FolderContent(marked).answer_tokens()


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(
        BadIndex, match=r"index.json cannot be read .*; name a folder that `farflock"
    ):
        FolderContent(tmp_path)
