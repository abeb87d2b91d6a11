"""A run of real processes for each test."""

import pytest
from worlds.node_processes import Run


@pytest.fixture(autouse=True, scope="session")
def shared_home(tmp_path_factory):
    """The folder in which nodes find what another one has prepared, apart from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FARFLOCK_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture
def run(nursery, tmp_path):
    """The processes of one run; they end with the test."""
    made = Run(nursery.popen, tmp_path)
    yield made
    made.end()
