"""The rules of docstrings that a test can hold: how they begin, and that no peer is a person."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("node", "swarm", "optimizers", "compression", "experiments")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
OPENERS = {"What", "Who", "Whether", "How", "When", "Which"}
FREE_WHO = re.compile(
    r"(?:^|\. |\b(?:to|of|for|by|from|as|than|with|at) )[Ww]ho\b"
)  # "to who lacks it"


def docstrings():
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text:
                yield f"{path.relative_to(ROOT)}: {text.splitlines()[0]}", text


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert not [place for place, text in docstrings() if re.match(r"\w*", text)[0] in OPENERS]


def test_no_docstring_calls_a_peer_who():
    assert not [place for place, text in docstrings() if FREE_WHO.search(text)]
