"""A run's text becomes the same tokens on every node, by the tokenizer that its manifest names."""

import numpy as np
import pytest
from worlds.prepared import prepared

from farflock.node.assembly import text as text_module
from farflock.node.assembly.text import text_of
from farflock.node.data.shard_order import SampleStream
from farflock.node.errors import RefusedByRun
from farflock.node.model.corpus import load_corpus
from farflock.node.model.data import Batches
from farflock.node.run.manifest import resolve
from farflock.node.tokens.tokenizer_training import train_tokenizer


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "own.txt").write_text(load_corpus("shakespeare").train[:20_000])
    return {"corpus": str(tmp_path / "own.txt")}


def trained(text):
    """All shards that are trained on."""
    (source,) = text.train().sources
    return np.concatenate([source.read(number) for number in range(len(source.sizes))])


def test_bytes_are_the_default(corpus):
    text, plain = text_of(resolve({"data": corpus}).data), load_corpus(corpus["corpus"])
    assert bytes(trained(text).tolist()) == plain.train.encode() + b"\xff"
    assert bytes(text.held_out().tolist()) == plain.held_out.encode()


def test_a_tokenizer_of_its_own_makes_fewer_tokens_of_the_same_text(corpus, tmp_path):
    (tmp_path / "tok.json").write_bytes(
        train_tokenizer([load_corpus("shakespeare").train[:20_000]], 500)
    )
    manifest = resolve({"data": corpus | {"tokenizer": str(tmp_path / "tok.json")}})
    text = text_of(manifest.data)
    tokens, plain = trained(text), load_corpus(corpus["corpus"]).train
    assert tokens.dtype == np.uint16
    assert len(tokens) < 0.6 * len(plain)
    assert text.tokenizer.decode(tokens.tolist()) == plain
    assert manifest.model.vocab_size == 500


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Two folders of prepared data, each of one long text and a few others."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    found = []
    for name, shout in (("calm", str.lower), ("loud", str.upper)):
        place = tmp_path / name
        place.mkdir()
        for number in range(40):
            words = shout(f"text {number} of {name} ") * 30
            (place / f"{number}.txt").write_text(words)
        prepared(place, tmp_path / f"{name}-prepared", held_out=0.2)
        found.append(tmp_path / f"{name}-prepared")
    return found


def described(folders, **data):
    return resolve({"model": {"preset": "tiny"}, "data": data}, prepared=folders).data


def test_prepared_data_are_read_in_place_with_the_share_of_each(folders):
    roots = [text_module.PreparedFolder(folder).root for folder in folders]
    data = described(folders, mix=dict(zip(roots, (3.0, 1.0), strict=True)))
    text = text_of(data, folders[::-1])
    x, _ = Batches(text.train(), SampleStream(1, "alice"), 1000, 8).batch(0)
    loud = sum(bytes(row.tolist()).isupper() for row in x)
    calm = sum(bytes(row.tolist()).islower() for row in x)
    assert (calm, loud) == (750, 250)


def test_held_out_tokens_are_of_all_folders_and_bounded(folders, monkeypatch):
    text = text_of(described(folders), folders)
    whole = bytes(text.held_out().tolist())
    assert b"of calm" in whole
    assert b"OF LOUD" in whole
    monkeypatch.setattr(text_module, "MAX_HELD_OUT_TOKENS", 100)
    assert len(text.held_out()) == 100


def test_data_that_are_not_here_are_refused_with_their_root(folders):
    data = described(folders)
    with pytest.raises(RefusedByRun, match=r"no folder here has the root .*; copy .* --data"):
        text_of(data, folders[:1])
