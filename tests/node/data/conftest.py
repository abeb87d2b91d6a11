"""State of preparations that is saved often."""

import pytest

from farflock.node.data import sorting


@pytest.fixture
def often(monkeypatch):
    """State that is saved after each batch of a few documents."""
    monkeypatch.setattr(sorting, "SAVE_EVERY_S", 0.5)
    monkeypatch.setattr(sorting, "BATCH_PASSAGES", 5)
