"""Run parts of the tests as continuous integration does, give failures a second chance, and judge.

    python tests/judge.py pure real ci-more
    python tests/judge.py long-2

Each part is one run of pytest over a fixed list. After all parts each test that failed runs once
more, alone. A test that fails twice is red. A real test that passes then is `unstable`: a machine
was slow or a port was taken, which says nothing of the commit. A pure test that passes then is `not
deterministic`; that is red with STRICT=1, so that its author mends it. More than MAX_FAILURES
failures are red at once. `long` is all parts of the long tests, each with a verdict of its own.
Exit: 0 green, 1 red, 2 a part could not be run.
"""

import collections
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from long_parts import LONG, MAX_LIMIT_S
from parts import LATE

ROOT = Path(__file__).parents[1]
EVERYDAY = "not ci_more and not long and not gpu"
PARTS = {
    "pure": f"not net and {EVERYDAY}",
    "real": f"net and {EVERYDAY}",
    "ci-more": "ci_more and not long and not gpu",
}
PARTS_OF_LONG = {f"long-{number}": number for number in LONG}
# The long tests search at random, and may be slower.
LONG_OPTIONS = (
    "--hypothesis-profile=long",
    f"--timeout={MAX_LIMIT_S}",
    f"-o=faulthandler_timeout={2 * MAX_LIMIT_S}",
)
# Fixed, so that the same tests follow each other wherever they run. It is the number of cores that
# we plan for; real tests wait much, and more of them at once would only slow each other.
WORKERS = 2
MAX_FAILURES = 20
SECOND_CHANCE_S = 600.0
LATE_AFTER_S = 50 * 60.0  # from the beginning of the gate; then what is left of ci-more is skipped
SLOWEST = 50
GREEN, RED, BROKEN = 0, 1, 2
VERDICTS = {GREEN: "green", RED: "red"}
ALL_PASSED, SOME_FAILED, NONE_CHOSEN = 0, 1, 5  # exit codes of pytest


@dataclass
class Outcomes:
    """What the reports of pytest say of each test."""

    seconds: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    failed: dict[str, bool] = field(default_factory=dict)  # {test: is it a real one}
    skipped: dict[str, str] = field(default_factory=dict)  # {test: why}

    def read(self, report):
        """Add what a file of reports holds; each line is as `parts.Parts` writes it."""
        for entry in map(json.loads, report.read_text().splitlines()):
            test = entry["test"]
            self.seconds[test] += entry["seconds"]
            if entry["outcome"] == "failed":
                self.failed[test] = entry["is_real"]
            elif entry["outcome"] == "skipped":
                self.skipped[test] = entry["why"]

    @property
    def late(self):
        return [test for test, why in self.skipped.items() if LATE in why]

    @property
    def passed(self):
        return len(self.seconds) - len(self.failed) - len(self.skipped)


def pytest(*words):
    """Run pytest; return its exit code."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words], cwd=ROOT, stdin=subprocess.DEVNULL
    ).returncode


def options_of(name):
    """Return the words that each run of pytest over tests of a part has."""
    return LONG_OPTIONS if name in PARTS_OF_LONG else ()


def choice_of(name):
    """Return the words that tell pytest which tests are in a part."""
    if name in PARTS:
        return ["tests", f"-m={PARTS[name]}"]
    part = LONG[PARTS_OF_LONG[name]]
    return [*part.files, f"-m={part.marks}", f"--long={PARTS_OF_LONG[name]}"]


def run_part(name, outcomes, began_s):
    """Run one part; return its minutes, or exit where it could not be run or failed too often."""
    part_began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        print(f"{name}:", flush=True)
        code = pytest(
            *choice_of(name),
            *options_of(name),
            f"--numprocesses={WORKERS}",
            "--dist=each",
            f"--report={report}",
            f"--late-after={began_s + LATE_AFTER_S}",
        )
        if report.exists():
            outcomes.read(report)
    if code not in (ALL_PASSED, SOME_FAILED, NONE_CHOSEN):
        print(f"red: pytest ended with {code}, so not all of {name} has run")
        sys.exit(BROKEN)
    if len(outcomes.failed) > MAX_FAILURES:
        print(f"red: {len(outcomes.failed)} failed; more than {MAX_FAILURES} get no second chance")
        sys.exit(RED)
    return (time.monotonic() - part_began_s) / 60


def second_chances(failed, limit_s=SECOND_CHANCE_S, run=pytest, clock=time.monotonic):
    """Run each failed test once more, alone; return the tests that pass."""
    ends_s, passed = clock() + limit_s, []
    for test in failed:
        if clock() >= ends_s:
            print(f"no time was left for a second chance of {test}")
        elif run(test) == 0:
            passed.append(test)
    return passed


def verdict(failed, passed, is_strict):
    """Return (lines that say what each failure is, True if it is green)."""
    lines, is_green = [], True
    for test, is_real in failed.items():
        if test not in passed:
            lines.append(f"red: {test}")
            is_green = False
        elif is_real:
            lines.append(f"unstable: {test}")
        else:
            lines.append(f"not deterministic: {test}")
            is_green = is_green and not is_strict
    return lines, is_green


def print_slowest(outcomes):
    print(f"the {SLOWEST} slowest:")
    slowest = sorted(outcomes.seconds.items(), key=lambda item: -item[1])[:SLOWEST]
    for test, seconds in slowest:
        print(f"{seconds:7.1f} s  {test}")


def print_skipped(outcomes):
    reasons = collections.Counter(why for why in outcomes.skipped.values() if LATE not in why)
    for why, count in sorted(reasons.items()):
        print(f"skipped {count}: {why}")
    if outcomes.late:
        minutes = LATE_AFTER_S / 60
        print(f"ci-more: {len(outcomes.late)} tests were left out after {minutes:.0f} minutes")


def run_long():
    """Judge each part of the long tests by itself, one after the other; return the worst code."""
    codes = {
        name: subprocess.run([sys.executable, __file__, name], cwd=ROOT).returncode
        for name in PARTS_OF_LONG
    }
    for name, code in codes.items():
        print(f"{name} ({LONG[PARTS_OF_LONG[name]].what}): {VERDICTS.get(code, 'not run')}")
    return max(codes.values())


def main(names):
    """Run the named parts and return the exit code."""
    if names == ["long"]:
        return run_long()
    if unknown := [name for name in names if name not in (*PARTS, *PARTS_OF_LONG)]:
        there = ", ".join((*PARTS, *PARTS_OF_LONG))
        print(f"no part is called {', '.join(unknown)}; there are {there}, and long for all long-")
        return BROKEN
    began_s = float(os.environ.get("GATE_BEGAN_S") or time.time())
    outcomes, minutes, options = Outcomes(), {}, {}
    for name in names:
        minutes[name] = run_part(name, outcomes, began_s)
        options = dict.fromkeys(outcomes.failed, options_of(name)) | options
    passed = second_chances(outcomes.failed, run=lambda test: pytest(test, *options[test]))
    print_slowest(outcomes)
    print_skipped(outcomes)
    lines, is_green = verdict(outcomes.failed, passed, os.environ.get("STRICT") == "1")
    print("\n".join(lines))
    unstable = sum(outcomes.failed[test] for test in passed)
    print(
        f"{outcomes.passed + len(passed)} passed, {len(outcomes.failed) - len(passed)} failed, "
        f"{unstable} unstable, {len(outcomes.skipped)} skipped; "
        + ", ".join(f"{name} {took:.1f} min" for name, took in minutes.items())
        + f"; load {os.getloadavg()[0]:.1f}"
    )
    return GREEN if is_green else RED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
