"""A manifest names a tokenizer by its content, and one that does not fit is refused at once."""

import msgspec
import pytest
from worlds.prepared import prepared

from farflock.node.errors import RefusedByRun, Usage
from farflock.node.run import data_section
from farflock.node.run.data_section import tokenizer_of
from farflock.node.run.manifest import load, parse, resolve
from farflock.node.state.paths import home
from farflock.node.tokens.json_tokenizer import JsonTokenizer
from farflock.node.tokens.tokenizer_training import train_tokenizer
from farflock.swarm.messages import MAX_CHUNK_BYTES

RAW = train_tokenizer(["To be, or not to be, that is the question: whether it is nobler\n"], 280)
HASH = JsonTokenizer(RAW).hash


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))


@pytest.fixture
def tok(tmp_path):
    path = tmp_path / "tok.json"
    path.write_bytes(RAW)
    return path


def founded(tok, **more):
    model = {"preset": "tiny"} | more
    return resolve({"model": model, "data": {"tokenizer": str(tok)}})


def test_the_file_becomes_its_hash_its_size_and_its_number_of_tokens(tok):
    manifest = founded(tok)
    data = manifest.data
    assert (data.tokenizer, data.tokenizer_bytes, data.vocabulary) == (HASH, len(RAW), 280)
    assert data.tokenizer_chunks == (HASH,)
    assert data.chunks() == ((bytes.fromhex(HASH), len(RAW)),)
    assert manifest.model.vocab_size == 280
    assert str(tok) not in manifest.canonical().decode()


def test_the_founder_and_whoever_has_the_file_tokenize_alike_without_its_path(tok):
    manifest = founded(tok)
    tok.unlink()
    assert parse(manifest.canonical()) == manifest
    assert tokenizer_of(manifest.data).raw == RAW


def test_a_resolved_manifest_resolves_to_itself(tok, tmp_path):
    manifest = founded(tok)
    tok.unlink()
    (tmp_path / "run.toml").write_bytes(manifest.canonical())
    assert load(tmp_path / "run.toml") == manifest


def test_a_large_file_has_a_name_for_each_chunk_which_fit_into_a_manifest(tok):
    names = tuple(f"{number:064x}" for number in range(data_section.MAX_TOKENIZER_CHUNKS))
    size = len(names) * MAX_CHUNK_BYTES - 5
    manifest = founded(tok)
    data = msgspec.structs.replace(manifest.data, tokenizer_chunks=names, tokenizer_bytes=size)
    large = msgspec.structs.replace(manifest, data=data)
    chunks = parse(large.canonical()).data.chunks()
    assert [digest.hex() for digest, _ in chunks] == list(names)
    assert [size for _, size in chunks[-2:]] == [MAX_CHUNK_BYTES, MAX_CHUNK_BYTES - 5]
    assert sum(size for _, size in chunks) == size


def test_a_model_may_have_more_tokens_but_not_fewer(tok):
    assert founded(tok, vocab_size=512).model.vocab_size == 512
    with pytest.raises(Usage, match=r"model.vocab_size: 279: the tokenizer .* has 280 tokens; set"):
        founded(tok, vocab_size=279)


@pytest.mark.parametrize("content", [None, b"{}"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Usage, match=r"data.tokenizer: .*other.json.*; name"):
        founded(path)


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": "bytes"},
        {"vocabulary": None},
        {"tokenizer_bytes": None},
        {"tokenizer_chunks": ()},
        {"tokenizer_chunks": (HASH, HASH)},
        {"tokenizer_bytes": MAX_CHUNK_BYTES + 1},
        {"vocabulary": 2**33},
        {"tokenizer": "/etc/passwd"},
        {"tokenizer_chunks": ("../x",)},
        {"vocabulary": 281},
    ],
)
def test_a_manifest_that_describes_a_tokenizer_badly_is_refused(tok, change):
    manifest = founded(tok)
    data = msgspec.structs.replace(manifest.data, **change)
    with pytest.raises(RefusedByRun, match="cannot take part"):
        parse(msgspec.structs.replace(manifest, data=data).canonical())


def test_a_tokenizer_that_is_not_here_or_has_other_tokens_is_refused(tok):
    data = founded(tok).data
    with pytest.raises(RefusedByRun, match="has 280 tokens instead of 300; tell the run's founder"):
        tokenizer_of(msgspec.structs.replace(data, vocabulary=300))
    (home() / "tokenizers" / f"{HASH}.json").write_bytes(RAW[:-1])
    with pytest.raises(RefusedByRun, match="no file here has the BLAKE3 hash"):
        tokenizer_of(data)


@pytest.fixture
def folder(tmp_path, monkeypatch, tok):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    (tmp_path / "texts").mkdir()
    for number in range(9):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} " * 20)
    return tmp_path / "texts"


def filled(folders, **data):
    return resolve({"model": {"preset": "tiny"}, "data": data}, prepared=folders)


def test_prepared_data_are_named_by_their_root_and_nothing_else(folder, tmp_path):
    content = prepared(folder, tmp_path / "out").content
    manifest = filled([content.folder])
    data = manifest.data
    assert (data.root, data.corpus, data.sha256) == (content.root, None, None)
    assert data.weights == {content.root: 1.0}
    assert parse(manifest.canonical()) == manifest
    assert str(tmp_path) not in manifest.canonical().decode()


def test_prepared_data_bring_their_tokenizer_and_the_model_its_size(folder, tmp_path):
    tokenizer = JsonTokenizer(RAW)
    content = prepared(folder, tmp_path / "out", tokenizer=tokenizer).content
    manifest = filled([content.folder])
    assert (manifest.data.tokenizer, manifest.data.tokenizer_bytes) == (HASH, len(RAW))
    assert manifest.model.vocab_size == manifest.data.vocabulary == 280
    assert tokenizer_of(manifest.data).raw == RAW


def test_several_folders_are_drawn_from_by_their_tokens_or_by_the_mix(folder, tmp_path):
    some = prepared(folder / "1.txt", tmp_path / "some", held_out=0.0).content
    more = prepared(folder, tmp_path / "more", held_out=0.0).content
    places = [some.folder, more.folder]
    tokens = [each.index.totals("train").tokens for each in (some, more)]
    assert list(filled(places).data.weights.items()) == [
        (some.root, tokens[0]),
        (more.root, tokens[1]),
    ]
    given = {more.root: 0.25, some.root: 0.75}
    manifest = filled(places, mix=given)
    assert manifest.data.weights == given
    assert parse(manifest.canonical()) == manifest


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"root": "0" * 64, "corpus": "shakespeare"}, "it names corpus and root; name one of"),
        ({"root": "0" * 64, "mix": {"1" * 64: 1.0}}, "it names root and mix"),
        ({"root": "prepared"}, "data.root"),
        ({"root": "0" * 64, "sha256": "0" * 64}, "it goes with a corpus"),
        ({"mix": {}}, "data.mix"),
        ({"mix": {"1" * 64: 0}}, "data.mix"),
        ({"urls": ["https://a.example/x"]}, "a corpus lies at no URL"),
        ({"root": "0" * 64, "urls": ["http://a.example/x"]}, "data.urls"),
        ({"root": "0" * 64, "urls": ["file:///etc"]}, "data.urls"),
        ({"root": "0" * 64, "urls": ["https://me:word@a.example/x"]}, "data.urls"),
        ({"root": "0" * 64, "urls": ["https://a.example/x?y"]}, "data.urls"),
        ({"root": "0" * 64, "urls": []}, "data.urls"),
        ({"mix": {"1" * 64: 1e12, "2" * 64: 1e-3}}, "less than a millionth"),
        ({"mix": {f"{n:064}": 1.0 for n in range(15)}}, "data.mix"),
    ],
    ids=range(14),
)
def test_impossible_data_are_refused_before_anything_starts(data, sentence):
    with pytest.raises(Usage, match=sentence):
        resolve({"model": {"preset": "tiny"}, "data": data})


def test_addresses_of_copies_are_in_the_manifest_only_if_there_are_any(folder, tmp_path):
    content = prepared(folder, tmp_path / "one").content
    assert b"urls" not in filled([content.folder]).canonical()
    urls = ["https://a.example/some/folder", "http://127.0.0.1:8000/"]
    manifest = filled([content.folder], urls=urls)
    assert list(parse(manifest.canonical()).data.urls) == urls


def test_folders_of_two_tokenizers_do_not_go_together(folder, tmp_path):
    one = prepared(folder, tmp_path / "one").content
    other = prepared(folder, tmp_path / "two", tokenizer=JsonTokenizer(RAW)).content
    with pytest.raises(Usage, match="has another tokenizer than"):
        filled([one.folder, other.folder])
