"""Parts of the tests: each worker runs the same files after the same files, on any machine.

With `-n N --dist each`, worker K runs part K of N, which depends on the names of the files alone.
Without workers, `--part K/N` chooses one. `--until TEST` ends a part with that test: so a failure
can be repeated after exactly the tests that ran before it.
"""

import json
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LATE = "the gate's time is up"


def add_options(parser):
    group = parser.getgroup("parts")
    group.addoption("--part", metavar="K/N", help="run part K of N of the test files")
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
        self.files = divided(self.count)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node):
        """Tell a worker whether it has a part; it is not told how tests are divided."""
        node.workerinput["is_part"] = self.config.getoption("dist") == "each"

    def pytest_ignore_collect(self, collection_path):
        """Leave out the files of other parts."""
        if self.number is not None and collection_path in self.files:
            return self.files[collection_path] != self.number or None
        return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
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
            report.sections.append(
                (
                    "to repeat it after the same tests",
                    f"pytest --part {self.number}/{self.count} -m '{marks}' "
                    f"--until '{item.nodeid}'",
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
