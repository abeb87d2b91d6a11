"""A tokenizer is kept once, under its hash, and only whole."""

import os

import pytest

from farflock.node.state.paths import home
from farflock.node.state.tokenizer_cache import cached_tokenizer, keep_tokenizer
from farflock.swarm.chunk_store import digest_of

RAW = b"a tokenizer's file"
NAME = digest_of(RAW).hex()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.setenv("FARFLOCK_HOME", str(tmp_path / "home"))


def files():
    return sorted(path.name for path in (home() / "tokenizers").iterdir())


def test_what_is_kept_is_found_by_its_hash():
    assert cached_tokenizer(NAME) is None
    keep_tokenizer(RAW)
    keep_tokenizer(RAW)
    assert cached_tokenizer(NAME) == RAW
    assert files() == [f"{NAME}.json"]


def test_a_damaged_file_counts_as_absent_and_is_replaced():
    keep_tokenizer(RAW)
    (home() / "tokenizers" / f"{NAME}.json").write_bytes(RAW[:-1])
    assert cached_tokenizer(NAME) is None
    keep_tokenizer(RAW)
    assert cached_tokenizer(NAME) == RAW


def test_a_full_disk_leaves_nothing(monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        keep_tokenizer(RAW)
    assert files() == []
