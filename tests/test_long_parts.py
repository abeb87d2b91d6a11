"""The parts of the long tests: each long test is in one, and none has hours."""

import json
from pathlib import Path
from types import SimpleNamespace

import judge
import long_parts
import parts
import pytest
from long_parts import LONG, MAX_LIMIT_S, LongPart, what_is_wrong

ROOT = Path(__file__).parents[1]


@pytest.fixture
def two_parts(monkeypatch):
    """A table with a part of random examples, and two of long tests that share a file."""
    files = LongPart("a", ("tests/a/", "tests/test_b.py::test_x"))
    table = [LongPart("random", ("tests/",), "hypothesis"), files, LongPart("b", ("tests/test_b",))]
    monkeypatch.setattr(long_parts, "LONG", {f"long-{n}": part for n, part in enumerate(table, 1)})
    return table


@pytest.mark.parametrize("name", [name for part in LONG.values() for name in part.tests])
def test_what_a_part_names_is_there(name):
    file, _, test = name.partition("::")
    assert list(ROOT.glob(f"{file}*"))
    assert not test or f"def {test.partition('[')[0]}" in (ROOT / file).read_text()


def test_the_page_about_tests_tells_of_each_part():
    page = (ROOT / "docs" / "testing.md").read_text()
    rows = [f"\n| {n} | {part.what} |" for n, part in enumerate(LONG.values(), 1)]
    assert not [row for row in rows if row not in page]


@pytest.mark.usefixtures("two_parts")
@pytest.mark.parametrize(
    ("test", "limits_s", "fault"),
    [
        ("tests/a/test_x.py::test_y[1]", [], None),
        ("tests/a/test_x.py::test_y[1]", [MAX_LIMIT_S], None),
        ("tests/a/test_x.py::test_y[1]", [60, MAX_LIMIT_S + 1], "may take 1201 s"),
        ("tests/c/test_x.py::test_y", [], "exactly one part"),
        ("tests/test_b.py::test_x", [], "exactly one part"),
        ("tests/test_b.py::test_y", [], None),
    ],
)
def test_a_long_test_in_no_part_or_two_or_with_a_longer_limit_is_refused(test, limits_s, fault):
    found = what_is_wrong(test, limits_s)
    assert found is None if fault is None else fault in found


def test_a_file_with_such_a_test_cannot_be_collected_and_is_red(request, tmp_path):
    """This test plays it: once it is marked as long, it is in no part."""
    options = {"--report": tmp_path / "report"}
    plugin = parts.Parts(SimpleNamespace(getoption=options.get))
    request.node.add_marker("long")
    report = pytest.CollectReport("tests/test_x.py", "passed", None, [request.node])
    collecting = plugin.pytest_make_collect_report()
    next(collecting)
    with pytest.raises(StopIteration):
        collecting.send(report)
    assert (report.outcome, report.result) == ("failed", [])
    assert "exactly one part" in report.longrepr
    plugin.pytest_collectreport(report)
    outcomes = judge.Outcomes()
    outcomes.read(options["--report"])
    assert outcomes.failed == {"tests/test_x.py": False}


@pytest.mark.parametrize(
    ("path", "may"),
    [
        ("tests", True),
        ("tests/a", True),
        ("tests/a/deep", True),
        ("tests/test_b.py", True),
        ("tests/b", False),
        ("tests/test_c.py", False),
    ],
)
def test_a_part_collects_only_where_its_tests_are(two_parts, path, may):
    assert two_parts[1].may_have(path) is may


def test_all_parts_run_with_more_time_and_random_examples_and_so_do_second_chances(
    monkeypatch, tmp_path, capsys
):
    started, again, test = [], [], "tests/sim/test_seeds.py::test_x"
    entry = {"test": test, "seconds": 1.0, "outcome": "failed", "is_real": True}

    def worker_stub(words, output):
        started.append(words)
        fails = f"--division={list(LONG)[-1]}" in words
        if fails:
            (tmp_path / f"{list(LONG)[-1]}.jsonl").write_text(json.dumps(entry))
        code = judge.SOME_FAILED if fails else judge.ALL_PASSED
        return SimpleNamespace(wait=lambda limit_s=None: code, kill=lambda: None)

    def pytest_stub(*words, limit_s):
        again.append((words, limit_s))
        return judge.ALL_PASSED

    monkeypatch.setattr(judge, "REPORTS", tmp_path)
    monkeypatch.setattr(judge, "worker", worker_stub)
    monkeypatch.setattr(judge, "pytest", pytest_stub)
    assert judge.main(["long"]) == judge.GREEN
    assert f"unstable: {test}" in capsys.readouterr().out
    assert [words[1:3] + words[-1:] for words in started] == [
        (f"--division={name}", f"-m={part.marks}", f"--part={number}/2")
        for name, part in LONG.items()
        for number in (1, 2)
    ]
    ((words, left_s),) = again
    assert all(set(judge.LONG_OPTIONS) <= set(each) for each in (*started, words))
    assert words[-1] == test
    assert judge.SECOND_CHANCE_S < left_s <= MAX_LIMIT_S
