"""Parts of the tests: each worker runs the same files after the same files, on any machine.

With `--part K/N` pytest is worker K of N. The files are divided by the committed seconds of
`--division`, a table of seconds.toml, so that the workers end together; a file that has no test of
that division is not imported. Where the division is a part of the long tests, only that part runs,
and single tests are divided: one file may hold all of them. `--until TEST` ends a worker's tests
with that one: so a failure can be repeated after exactly the tests that ran before it.
"""

import collections
import functools
import json
import re
import time
import tomllib
from pathlib import Path

import pytest
from long_parts import LONG, what_is_wrong

TESTS = Path(__file__).parent
SECONDS = TESTS / "seconds.toml"
MIN_S = 1.0  # what takes less stands in no table
LATE = "the gate's time is up"
# What the text of a file holds that has tests of a kind, by mark. Most files have none of them, and
# importing a file takes far longer than reading it.
NAMED = {mark: f"mark.{mark}" for mark in ("net", "ci_more")}
MARK_OF = {"real": "net", "ci-more": "ci_more"}  # by division
NEVER_PURE = re.compile(r"^pytestmark = [^#\n]*\bmark\.(net|ci_more|long|gpu)\b", re.MULTILINE)


def add_options(parser):
    group = parser.getgroup("parts")
    group.addoption("--part", metavar="K/N", help="be worker K of N")
    group.addoption("--division", metavar="TABLE", help="divide by this table of seconds.toml")
    group.addoption("--until", metavar="TEST", help="leave out what follows TEST")
    group.addoption("--report", metavar="FILE", help="append each test's outcome, a JSON line each")
    group.addoption(
        "--late-after",
        metavar="SECONDS",
        type=float,
        help="skip the tests of `ci_more` that have not begun at this time (of time.time)",
    )


def divided(count, names, seconds):
    """Return {key: number of its part}.

    `names` says under which name `seconds` knows a key, {key: name}; keys of one name share its
    seconds. Longest first, each key goes to the part that has the least so far.
    """
    sizes = collections.Counter(names.values())
    weights = {
        key: seconds[name] / sizes[name] if name in seconds else MIN_S / 2
        for key, name in names.items()
    }
    chosen, sums = {}, dict.fromkeys(range(1, count + 1), 0.0)
    for key, weight in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        chosen[key] = min(sums, key=sums.get)
        sums[chosen[key]] += weight
    return chosen


def files(tests=TESTS):
    """Return {path of a file of tests: its name in seconds.toml}."""
    return {path: path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}


def may_have(text, division):
    """Return whether a file of this text may have tests of the division."""
    if division in MARK_OF:
        return NAMED[MARK_OF[division]] in text
    return division != "pure" or not NEVER_PURE.search(text)


@functools.cache
def text_of(path):
    return path.read_text()


def recorded(division):
    """Return the seconds of a table, {name: seconds}; nothing where none has that name."""
    return tomllib.loads(SECONDS.read_text()).get(division, {})


def record(division, seconds):
    """Write a table, each file (of long tests: each function) in one line, from {test: seconds};
    keep the other tables."""
    name_of = function_of if division in LONG else file_of
    tables = tomllib.loads(SECONDS.read_text())
    tables[division] = collections.Counter()
    for test, took_s in seconds.items():
        tables[division][name_of(test)] += took_s
    SECONDS.write_text("\n".join(map(table, sorted(tables.items()))))


def file_of(test):
    """Return the path in tests/ of a test's file."""
    return test.partition("::")[0].removeprefix("tests/")


def function_of(test):
    """Return the path in tests/ of a test's file, and the name of its function."""
    return test.partition("[")[0].removeprefix("tests/")


def table(named):
    """Return a table of seconds.toml, of what is worth a line."""
    division, seconds = named
    lines = [
        f'"{name}" = {round(took_s)}\n'
        for name, took_s in sorted(seconds.items())
        if took_s >= MIN_S
    ]
    return f"[{division}]\n" + "".join(lines)


def fault_of(item):
    """Return what would leave a test out of its part, or None."""
    for mark, name in NAMED.items():
        if item.get_closest_marker(mark) and name not in text_of(item.path):
            return f"{item.nodeid}: write out `{name}` in its file, or its part does not find it"
    if not item.get_closest_marker("long"):
        return None
    return what_is_wrong(item.nodeid, [mark.args[0] for mark in item.iter_markers("timeout")])


class Parts:
    """The plugin behind the options above."""

    def __init__(self, config):
        self.config, self.number, self.count = config, None, 1
        if asked := config.getoption("--part"):
            self.number, self.count = map(int, asked.split("/"))
        self.division = config.getoption("--division")
        path = config.getoption("--report")
        self.report = None if path is None else open(path, "a", buffering=1)  # noqa: SIM115
        self.long = LONG.get(self.division)
        self.all = files()
        names = {
            path: name
            for path, name in self.all.items()
            if self.long is None and may_have(text_of(path), self.division)
        }
        self.files = divided(self.count, names, recorded(self.division))

    def pytest_ignore_collect(self, collection_path):
        """Leave out the files of other parts."""
        if self.long is not None:
            path = collection_path.relative_to(TESTS.parent).as_posix()
            return not self.long.may_have(path) or None
        if self.number is not None and collection_path in self.all:
            return self.files.get(collection_path) != self.number or None
        return None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self):
        """Let collecting fail where a long test is in no part, or may take too long for one."""
        report = yield
        items = [each for each in report.result if isinstance(each, pytest.Item)]
        if faults := [fault for item in items if (fault := fault_of(item)) is not None]:
            report.outcome, report.longrepr, report.result = "failed", "\n".join(faults), []
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.long is not None:
            names = {i.nodeid: function_of(i.nodeid) for i in items if self.long.has(i.nodeid)}
            chosen = divided(self.count, names, recorded(self.division))
            items[:] = [item for item in items if chosen.get(item.nodeid) == (self.number or 1)]
        if (last := self.config.getoption("--until")) is not None:
            names = [item.nodeid for item in items]
            del items[names.index(last) + 1 :]

    def pytest_runtest_setup(self, item):
        limit_s = self.config.getoption("--late-after")
        if limit_s is not None and item.get_closest_marker("ci_more") and time.time() > limit_s:
            pytest.skip(LATE)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        if report.failed and self.number is not None:
            marks = self.config.getoption("-m")
            profile = "--hypothesis-profile long " if self.long else ""
            report.sections.append(
                (
                    "to repeat it after the same tests",
                    f"pytest --part {self.number}/{self.count} --division {self.division} "
                    f"{profile}-m '{marks}' --until '{item.nodeid}'",
                )
            )
        return report

    def pytest_runtest_logreport(self, report):
        why = report.longrepr[2] if report.skipped and report.longrepr else ""
        self._note(report, report.when, report.duration, "net" in report.keywords, why)

    def pytest_collectreport(self, report):
        """Count what cannot be collected as a failed test: all of its tests are missing."""
        if report.failed:
            self._note(report, "collect", 0.0, is_real=False)

    def _note(self, report, when, seconds, is_real, why=""):
        if self.report is None:
            return
        entry = {
            "test": report.nodeid,
            "when": when,
            "outcome": report.outcome,
            "seconds": seconds,
            "is_real": is_real,
            "why": why,
        }
        self.report.write(json.dumps(entry) + "\n")

    def pytest_unconfigure(self):
        if self.report is not None:
            self.report.close()
