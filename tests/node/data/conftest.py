"""Texts to prepare, and small shards, files and batches, so that few texts make many."""

import pytest

from farflock.node.data import folder, index, shard_writer, sorting


@pytest.fixture
def small(monkeypatch):
    """Shards of 1 kB in files of 4 kB, which nobody waits for."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    for module in (index, shard_writer):
        monkeypatch.setattr(module, "MAX_SHARD_BYTES", 1000)
    for module in (folder, shard_writer):
        monkeypatch.setattr(module, "MAX_TOKEN_FILE_BYTES", 4000)


@pytest.fixture
def often(monkeypatch):
    """State that is saved after each batch of a few documents."""
    monkeypatch.setattr(sorting, "SAVE_EVERY_S", 0.5)
    monkeypatch.setattr(sorting, "BATCH_PARTS", 5)


@pytest.fixture
def texts(tmp_path):
    """A folder of texts: 60 files, each of a few words, and lines of JSON."""
    place = tmp_path / "texts"
    place.mkdir()
    for number in range(60):
        words = " ".join(f"word{number * step}" for step in range(1, 12))
        (place / f"{number:02}.txt").write_text(f"text {number}: {words}\n")
    lines = (f'{{"text": "line {number} of many"}}\n' for number in range(40))
    (place / "lines.jsonl").write_text("".join(lines))
    return place
