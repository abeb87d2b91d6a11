"""What all tests share: golden files, rewritten only with `pytest --write-golden` and reviewed as a diff; log levels."""

import json
import logging
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption(
        "--write-golden", action="store_true", help="rewrite tests/golden/*.json with what the code does now"
    )


@pytest.fixture(autouse=True)
def own_log_level():
    """Commands set our logger's level as their process's own; the next test must not inherit it."""
    logger = logging.getLogger("farflock")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def golden(request):
    """A function (name, actual) -> what tests/golden/NAME.json says; with --write-golden it says `actual` from then on."""

    def expected(name, actual):
        path = GOLDEN / f"{name}.json"
        if request.config.getoption("--write-golden"):
            path.write_text(json.dumps(actual, indent=1) + "\n")
        return json.loads(path.read_text())

    return expected
