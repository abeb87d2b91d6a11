"""The gate as a whole, over tests that were planted: what it calls red, and what it lets pass."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from worlds.waiting import LIMIT_S, completed

pytestmark = [pytest.mark.net, pytest.mark.ci_more]

ROOT = Path(__file__).parents[1]
HELPERS = [path.name for path in sorted(ROOT.glob("tests/[!t]*.py"))]
COPIED = (*HELPERS, "seconds.toml", "worlds")
# Fails in every other process that runs it.
EVERY_OTHER_TIME = """
from pathlib import Path

MARK = Path(__file__).with_suffix(".mark")

def fails_every_other_time():
    if MARK.exists():
        MARK.unlink()
    else:
        MARK.touch()
        raise AssertionError("the first time")
"""
PURE = f"""{EVERY_OTHER_TIME}
def test_a(): fails_every_other_time()
"""
REAL = f"""{EVERY_OTHER_TIME}
import pytest
@pytest.mark.net
def test_a(): fails_every_other_time()
"""
SLEEPS = """
import time
def helper(): time.sleep(0.01)
def test_a(): helper()
"""
NEVER = """
import pytest, subprocess, sys
from worlds import waiting
waiting.LIMIT_S = 0.1

@pytest.mark.net
def test_a(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("the last line")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        tell = lambda: waiting.told("the node", process, log)
        waiting.until_real(lambda: False, "a miracle", tell)
"""
SLEEPS_AT_ITS_END = """
import pytest, time

@pytest.fixture
def tired():
    yield
    time.sleep(0.01)

def test_a(tired): pass
"""
PASSES = "def test_b(): pass\n"
# The judge, whose runs of pytest are forks: another program stands in for Python.
JUDGE = """
import runpy, sys
sys.path[0] = "tests"
sys.executable, *sys.argv[1:] = sys.argv[1:]
runpy.run_path("tests/judge.py", run_name="__main__")
"""


@pytest.fixture
def judged(nursery, tmp_path):
    """A function that judges a tree of these tests; return the exit code and what was said."""
    (tmp_path / "tests").mkdir()
    for name in COPIED:
        source = ROOT / "tests" / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    python = nursery.stand_in(tmp_path / "python")

    def judge(*texts, parts=("pure", "real"), strict=False):
        for number, text in enumerate((*texts, PASSES)):
            (tmp_path / "tests" / f"test_planted_{number}.py").write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "STRICT": "1" if strict else ""}
        environment.pop("PYTEST_XDIST_WORKER", None)
        done = completed(
            [sys.executable, "-c", JUDGE, python, *parts],
            limit_s=2 * LIMIT_S,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    return judge


def test_what_passes_the_second_time_is_told_and_is_red_for_the_author_of_a_pure_test(judged):
    code, said = judged(PURE, parts=("pure",), strict=True)
    assert code == 1, said
    assert "not deterministic: tests/test_planted_0.py::test_a" in said
    assert "--part 1/2 --division pure -m 'not net" in said
    assert "AssertionError: the first time" in said
    code, said = judged(REAL, parts=("real",), strict=True)
    assert code == 0, said
    assert "unstable: tests/test_planted_0.py::test_a" in said
    assert "AssertionError: the first time" in said
    assert said.splitlines()[-1].startswith("1 passed, 0 failed, 1 unstable, 0 skipped; real ")


def test_what_fails_twice_is_red_and_says_what_was_touched_or_waited_for(judged):
    code, said = judged(SLEEPS, NEVER, SLEEPS_AT_ITS_END)
    assert code == 1, said
    assert "a pure test touched time.sleep" in said
    assert "red: tests/test_planted_0.py::test_a" in said
    assert "a miracle did not come within" in said
    assert "the node (process" in said
    assert "the last line" in said
    assert "red: tests/test_planted_1.py::test_a" in said
    # alone, so that it is the last of its session
    assert "red: tests/test_planted_2.py::test_a" in said


def test_many_failures_are_red_at_once(judged):
    code, said = judged("".join(f"def test_{n}(): assert False\n" for n in range(21)))
    assert code == 1, said
    assert "red: 21 failed; more than 20 get no second chance" in said
    assert "real:" not in said
