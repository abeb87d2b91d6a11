"""A manifest for the tests of commands."""

import pytest


@pytest.fixture
def manifest(tmp_path):
    """A founder's file."""
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "plays"\ntotal_tokens = 4096\n[model]\npreset = "tiny"\n[train]\nseq = 32\n'
    )
    return path
