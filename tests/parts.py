"""Parts of the tests: each worker runs the same files after the same files, on any machine.

With `-n N --dist each`, worker K runs part K of N, which depends on the names of the files alone.
Without workers, `--part K/N` chooses one. `--until TEST` ends a part with that test: so a failure
can be repeated after exactly the tests that ran before it.

With `--long NUMBER` only that part of the long tests runs, and its tests are dealt in turn: a file
may hold half of them.
"""

import json
import time
from pathlib import Path

import pytest
from long_parts import LONG, fault_of

TESTS = Path(__file__).parent
LATE = "the gate's time is up"


def add_options(parser):
    group = parser.getgroup("parts")
    group.addoption("--part", metavar="K/N", help="run part K of N of the test files")
    group.addoption("--long", metavar="NUMBER", type=int, help="run this part of the long tests")
    group.addoption("--until", metavar="TEST", help="of the part, leave out what follows TEST")
    group.addoption("--report", metavar="FILE", help="append each test's outcome, a JSON line each")
    group.addoption(
        "--late-after",
        metavar="SECONDS",
        type=float,
        help="skip the tests of `ci_more` that have not begun at this time (of time.time)",
    )


def divided(count, tests=TESTS):
    """Return {file: number of its part}: the files in the order of their names, dealt in turn."""
    return {path: i % count + 1 for i, path in enumerate(sorted(tests.rglob("test_*.py")))}


class Parts:
    """The plugin behind the options above."""

    def __init__(self, config):
        self.config, self.number, self.count = config, None, 1
        self.is_worker = hasattr(config, "workerinput")
        if self.is_worker and config.workerinput["is_part"]:
            self.count = int(config.workerinput["workercount"])
            self.number = int(config.workerinput["workerid"].removeprefix("gw")) + 1
        elif asked := config.getoption("--part"):
            self.number, self.count = map(int, asked.split("/"))
        self.long = LONG.get(config.getoption("--long"))
        self.files = divided(self.count)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Tell a worker whether it has a part; it is not told how tests are divided."""
        node.workerinput["is_part"] = self.config.getoption("dist") == "each"

    def pytest_ignore_collect(self, collection_path):
        """Leave out the files of other parts."""
        if self.number is not None and self.long is None and collection_path in self.files:
            return self.files[collection_path] != self.number or None
        return None

    def pytest_itemcollected(self, item):
        """Refuse a long test that is in no part, or may take too long for one."""
        if item.get_closest_marker("long"):
            limits_s = [mark.args[0] for mark in item.iter_markers("timeout")]
            if fault := fault_of(item.nodeid, limits_s):
                raise pytest.UsageError(fault)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self.long is not None:
            chosen = [item for item in items if self.long.has(item.nodeid)]
            items[:] = chosen if self.number is None else chosen[self.number - 1 :: self.count]
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
            marks, long = self.config.getoption("-m"), self.config.getoption("--long")
            report.sections.append(
                (
                    "to repeat it after the same tests",
                    f"pytest --part {self.number}/{self.count} -m '{marks}' "
                    + (f"--long {long} --hypothesis-profile long " if long else "")
                    + f"--until '{item.nodeid}'",
                )
            )
        return report

    def pytest_runtest_logreport(self, report):
        path = self.config.getoption("--report")
        if path is None or self.is_worker:
            return
        entry = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": report.duration,
            "is_real": "net" in report.keywords,
            "why": report.longrepr[2] if report.skipped and report.longrepr else "",
        }
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")
