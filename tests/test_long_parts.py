"""The parts of the long tests: each long test is in one, and none has hours."""

import itertools
from pathlib import Path

import long_parts
import pytest
from long_parts import LONG, MAX_LIMIT_S, RANDOM, LongPart, fault_of

ROOT = Path(__file__).parents[1]
NAMES = [name for part in LONG.values() if part is not RANDOM for name in part.tests]


@pytest.fixture
def two_parts(monkeypatch):
    monkeypatch.setattr(
        long_parts, "LONG", {1: RANDOM, 2: LongPart("a", ("tests/a",)), 3: LongPart("b", ("b",))}
    )


def test_no_long_test_is_in_two_parts():
    assert not [pair for pair in itertools.permutations(NAMES, 2) if pair[0].startswith(pair[1])]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_part_names_is_there(name):
    file, _, test = name.partition("::")
    assert (ROOT / file).exists()
    assert not test or f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


def test_the_parts_count_from_one_and_the_page_about_tests_tells_of_each():
    assert list(LONG) == list(range(1, 1 + len(LONG)))
    page = (ROOT / "docs" / "testing.md").read_text()
    missing = [n for n, part in LONG.items() if f"\n| {n} | {part.what} |" not in page]
    assert not missing


@pytest.mark.usefixtures("two_parts")
@pytest.mark.parametrize(
    ("test", "limits_s", "fault"),
    [
        ("tests/a/test_x.py::test_y[1]", [], None),
        ("tests/a/test_x.py::test_y[1]", [MAX_LIMIT_S], None),
        ("tests/a/test_x.py::test_y[1]", [60, MAX_LIMIT_S + 1], "may take 1201 s"),
        ("tests/c/test_x.py::test_y", [], "exactly one part"),
    ],
)
def test_a_long_test_that_is_in_no_part_or_may_take_too_long_is_refused(test, limits_s, fault):
    assert (fault_of(test, limits_s) or "fine").find(fault or "fine") >= 0
