"""Run parts of the tests as continuous integration does, give failures a second chance, and judge.

    python tests/judge.py [--record] pure real ci-more
    python tests/judge.py long-2

Each part is a fixed list, divided among workers; each of these is a run of pytest. After all parts
each test that failed runs once more, alone. A test that fails twice is red. A real test that passes
then is `unstable`: a machine was slow or a port was taken, which says nothing of the commit. A pure
test that passes then is `not deterministic`; that is red with STRICT=1, so that its author mends
it. More than MAX_FAILURES failures are red at once. `long` stands for all parts of the long tests.
Exit: 0 green, 1 red, 2 a part could not be run.

With --record the seconds of each file, or function of long tests, are written to
tests/seconds.toml, by which a part is divided among workers. On an idle machine that is worth a
commit once a division has become uneven.
"""

import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from long_parts import LONG, MAX_LIMIT_S
from parts import LATE, record

from farflock.experiments.measure.parent import end_with_parent

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "build" / "reports"  # the last outcome of each test, by part
EVERYDAY = "not ci_more and not long and not gpu"
GATE = {
    "pure": f"not net and {EVERYDAY}",
    "real": f"net and {EVERYDAY}",
    "ci-more": "ci_more and not long and not gpu",
}
PARTS = GATE | {name: part.marks for name, part in LONG.items()}
# Fixed, so that the same tests follow each other wherever they run. Two is the number of cores that
# we plan for; what is in ci-more waits half of its time. With four workers it took as long.
WORKERS = dict.fromkeys(PARTS, 2) | {"ci-more": 3}
# Beside a part of the long tests: random examples, and more time.
LONG_OPTIONS = (
    "--hypothesis-profile=long",
    f"--timeout={MAX_LIMIT_S}",
    f"--override-ini=faulthandler_timeout={2 * MAX_LIMIT_S}",
)
MAX_FAILURES = 20
SECOND_CHANCE_S = 600.0
CLEAN_UP_S = 10.0  # for a run that is broken off
PYTEST = (sys.executable, "-m", "pytest", "-q")
LATE_AFTER_S = 50 * 60.0  # from the beginning of the gate; then what is left of ci-more is skipped
SLOWEST = 50
GREEN, RED, BROKEN = 0, 1, 2
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


def limited(command, limit_s):
    """Run a command in a process group of its own; return its exit code, or None if the limit
    ended it and all that it had started."""
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, process_group=0)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)  # fixtures may clean up
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(CLEAN_UP_S)
        return None
    finally:  # a Ctrl-C reaches this process alone
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pytest(*words, limit_s):
    """Run pytest; return its exit code, or None if the limit ended it."""
    return limited([*PYTEST, *words], limit_s)


def worker(words, output):
    """Start pytest, to end with this process; `output` of None is this process's own."""
    return subprocess.Popen(
        [*PYTEST, *words],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        preexec_fn=end_with_parent,
    )


def workers(part, count, words):
    """Run the workers of a part; return their exit codes.

    What the first prints is shown as it comes, what the others print after all have ended.
    """
    with contextlib.ExitStack() as stack:
        running, outputs = [], []
        for number in range(1, count + 1):
            path = REPORTS / f"{part}-{number}.txt"
            outputs.append(stack.enter_context(path.open("w+")) if number > 1 else None)
            running.append(worker((*words, f"--part={number}/{count}"), outputs[-1]))
            stack.callback(end, running[-1])
        codes = [process.wait() for process in running]
        for output in filter(None, outputs):
            output.seek(0)
            shutil.copyfileobj(output, sys.stdout)
    return codes


def end(process):
    """Wait for a process that has heard of the end, and kill it if it does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(CLEAN_UP_S)
    process.kill()


def run_part(name, outcomes, began_s, options=()):
    """Run one part; return its minutes, or exit where it could not be run or failed too often."""
    part_began_s = time.monotonic()
    report = REPORTS / f"{name}.jsonl"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text("")
    print(f"{name}:", flush=True)
    words = (
        "tests",
        f"--division={name}",
        f"-m={PARTS[name]}",
        f"--report={report}",
        f"--late-after={began_s + LATE_AFTER_S}",
        "--continue-on-collection-errors",
        *options,
    )
    codes = workers(name, WORKERS[name], words)
    outcomes.read(report)
    if broken := set(codes) - {ALL_PASSED, SOME_FAILED, NONE_CHOSEN}:
        print(f"red: pytest ended with {min(broken)}, so not all of {name} has run")
        sys.exit(BROKEN)
    if len(outcomes.failed) > MAX_FAILURES:
        print(f"red: {len(outcomes.failed)} failed; more than {MAX_FAILURES} get no second chance")
        sys.exit(RED)
    return (time.monotonic() - part_began_s) / 60


def second_chances(failed, limit_s=SECOND_CHANCE_S, run=pytest, clock=time.monotonic):
    """Run each failed test once more, alone; return the tests that pass.

    `limit_s` is for all of them. The test that is under way then is ended, and stays failed.
    """
    ends_s, passed = clock() + limit_s, []
    for test in failed:
        left_s = ends_s - clock()
        code = run(test, limit_s=left_s) if left_s > 0 else None
        if code is None:
            print(f"no time was left for a second chance of {test}")
        elif code == ALL_PASSED:
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


def main(words):
    """Run the named parts and return the exit code."""
    names = [word for word in words if word != "--record"]
    names = list(LONG) if names == ["long"] else names
    if unknown := set(names) - PARTS.keys():
        print(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
        return BROKEN
    options, second_chance_s = (), SECOND_CHANCE_S
    if LONG.keys() & names:
        options, second_chance_s = LONG_OPTIONS, MAX_LIMIT_S
    began_s = float(os.environ.get("GATE_BEGAN_S") or time.time())
    outcomes, minutes = Outcomes(), {}
    for name in names:
        before = set(outcomes.seconds)
        minutes[name] = run_part(name, outcomes, began_s, options)
        if "--record" in words:
            new = outcomes.seconds.keys() - before
            record(name, {test: outcomes.seconds[test] for test in new})
    passed = second_chances(outcomes.failed, second_chance_s, partial(pytest, *options))
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
