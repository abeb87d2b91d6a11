"""A manifest for the tests of commands."""

import pytest
from worlds.prepared import prepared


@pytest.fixture
def manifest(tmp_path):
    """A founder's file."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "plays"\ntotal_tokens = 4096\n[model]\npreset = "tiny"\n[train]\nseq = 32\n'
    )
    return path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of prepared data."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(60):
        (texts / f"{number}.txt").write_text(f"text {number} of many, " * 20)
    return prepared(texts, tmp_path / "prepared", held_out=0.2).content.folder
