"""A run's text becomes the same tokens on every node, by the tokenizer that its manifest names."""

import numpy as np
import pytest

from farflock.node.assembly.text import text_of
from farflock.node.model.corpus import load_corpus
from farflock.node.run.manifest import resolve
from farflock.node.tokens.tokenizer_training import train_tokenizer


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))
    (tmp_path / "own.txt").write_text(load_corpus("shakespeare").train[:20_000])
    return {"corpus": str(tmp_path / "own.txt")}


def test_bytes_are_the_default(corpus):
    text = text_of(resolve({"data": corpus}).data)
    assert bytes(text.train().tolist()) == text.corpus.train.encode()
    assert bytes(text.held_out().tolist()) == text.corpus.held_out.encode()


def test_a_tokenizer_of_its_own_makes_fewer_tokens_of_the_same_text(corpus, tmp_path):
    (tmp_path / "tok.json").write_bytes(
        train_tokenizer([load_corpus("shakespeare").train[:20_000]], 500)
    )
    manifest = resolve({"data": corpus | {"tokenizer": str(tmp_path / "tok.json")}})
    text = text_of(manifest.data)
    tokens = text.loaded().tokens
    assert tokens.dtype == np.uint16
    assert len(tokens) < 0.6 * len(text.corpus.train)
    assert text.tokenizer.decode(tokens.tolist()) == text.corpus.train
    assert manifest.model.vocab_size == 500
