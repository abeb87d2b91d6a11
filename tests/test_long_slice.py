"""The slice of the long tests: a tenth of them, the same for one commit, another for the next."""

import subprocess
import sys
from pathlib import Path

import pytest
from long_slice import LONGEST_S, SHARE, is_in_slice, select

ROOT = Path(__file__).parents[1]
IDS = [f"tests/test_a.py::test_it[{number}]" for number in range(2000)]


def drawn(seed):
    return {test for test in IDS if is_in_slice(seed, test)}


def test_a_slice_has_about_its_share_and_depends_on_the_commit_alone():
    one, other = drawn("1220de5"), drawn("6b24255")
    assert one == drawn("1220de5") != other
    assert abs(len(one) / len(IDS) - SHARE) < 0.03
    assert len(one & other) < len(one) / 2


def test_every_test_is_drawn_within_a_hundred_commits():
    assert set().union(*(drawn(str(seed)) for seed in range(100))) == set(IDS)


class Item:
    """A test with marks, as pytest collects it."""

    def __init__(self, nodeid, *marks):
        self.nodeid, self.marks = nodeid, {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name):
        return self.marks.get(name)


def test_a_test_of_more_than_an_hour_is_drawn_for_no_commit_and_a_short_one_always_runs():
    long, hour = pytest.mark.long, pytest.mark.timeout(LONGEST_S)
    hours = pytest.mark.timeout(LONGEST_S + 1)
    for seed in map(str, range(100)):
        kept, dropped = select(
            seed,
            [*(Item(test, long, hours) for test in IDS[:50]), Item("short", hours)],
        )
        assert [item.nodeid for item in kept] == ["short"]
        assert len(dropped) == 50
    assert any(select(str(seed), [Item(IDS[0], long, hour)])[0] for seed in range(100))


@pytest.mark.ci_more
def test_pytest_drops_the_rest_of_the_long_tests_and_keeps_the_others():
    def collected(*options):
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options]
        where = "tests/optimizers/swarm/test_law.py"
        done = subprocess.run([*command, where], cwd=ROOT, capture_output=True, text=True)
        return {line for line in done.stdout.splitlines() if "::" in line}

    daily, whole = collected("-m", "not long"), collected()
    sliced = collected("--long-slice", "1220de5")
    assert daily < sliced < whole
    assert len(sliced - daily) < 0.2 * len(whole - daily)
