"""A run of real processes for each test."""

import pytest
from worlds.node_processes import Run


@pytest.fixture
def run(nursery, tmp_path):
    """The processes of one run; they end with the test."""
    made = Run(nursery.popen, tmp_path)
    yield made
    made.end()
