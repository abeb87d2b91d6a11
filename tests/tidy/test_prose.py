"""The rules for docstrings and names that a machine can check."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
from tidy import measure

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("node", "swarm", "optimizers", "compression", "experiments")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OPENERS = {"What", "Who", "Whether", "How", "When", "Which"}
# "to who lacks it"
FREE_WHO = re.compile(r"(?:^|\. |\b(?:to|of|for|by|from|as|than|with|at) )[Ww]ho\b")
# A bound is MIN or MAX, a deadline TIMEOUT. A local variable may be the `most` of something.
BOUND = re.compile(r"(?:^|_)(?:least|most|patience)(?:_|$)", re.IGNORECASE)


def docstrings():
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(measure.parsed(path)):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text:
                yield f"{path.relative_to(ROOT)}: {text.splitlines()[0]}", text


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not [place for place, text in docstrings() if re.match(r"\w*", text)[0] in OPENERS]


def test_no_docstring_calls_a_peer_who():
    assert not [place for place, text in docstrings() if FREE_WHO.search(text)]


def lasting_names(tree):
    """Yield the names that a reader of another module may meet: all but local variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                for target in ast.walk(statement) if is_assignment(statement) else ():
                    if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                        yield target.id


def is_assignment(statement):
    return isinstance(statement, ast.Assign | ast.AnnAssign)


@pytest.mark.parametrize(
    "source",
    [
        "MOST_BYTES = 1",
        "_LEAST: int = 1",
        "def most_bytes(): ...",
        "def f(least): ...",
        "class A:\n    patience_s: float",
        "self.patience = 1",
    ],
)
def test_a_bound_of_another_name_is_found(source):
    assert any(BOUND.search(name) for name in lasting_names(ast.parse(source)))


def test_a_local_variable_may_be_the_most_of_something():
    assert not any(map(BOUND.search, lasting_names(ast.parse("def f():\n    most = 1"))))


def test_bounds_are_called_min_and_max_and_deadlines_timeout():
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
        for name in lasting_names(measure.parsed(path))
        if BOUND.search(name)
    ]
    assert not found


MAX_WIDTH = 100  # ruff holds the Python files to it
WRAPPED = ("*.toml", "*.c", "*.h", "*.yml", "*.cff", "Makefile", ".ci/run")


@pytest.mark.net
def test_no_line_of_a_text_file_is_wider_than_a_hundred_columns():
    listed = subprocess.run(
        ["git", "ls-files", *WRAPPED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = [
        (name, number, line)
        for name in listed.stdout.split()
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
    ]
    assert len(lines) > 1000
    assert not [f"{name}:{number}" for name, number, line in lines if len(line) > MAX_WIDTH]
