"""docs/moved.md leads from the modules and names of earlier reports to those of today."""

import ast
import re
from pathlib import Path

from tidy import measure

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "moved.md").read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|$", PAGE, re.M)
MODULES = [now for _, now in ROWS if now.endswith(".py")]
NAMES = [now for _, now in ROWS if not now.endswith(".py")]


def defined(path):
    """The names that a module defines at its top."""
    found = set()
    for node in measure.parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        for target in [*getattr(node, "targets", []), getattr(node, "target", None)]:
            found.add(getattr(target, "id", ""))
    return found


def test_every_row_is_read():
    assert len(ROWS) == sum(line.startswith("| `") for line in PAGE.splitlines()) > 300


def test_a_module_is_where_the_page_says():
    assert not [module for module in MODULES if not (ROOT / module).is_file()]


def test_a_name_is_where_the_page_says():
    paths = {
        name: (ROOT.joinpath(*name.split(".")[:-1]).with_suffix(".py"), name.rpartition(".")[2])
        for name in NAMES
    }
    assert not [
        name
        for name, (path, word) in paths.items()
        if not path.is_file() or word not in defined(path)
    ]


def test_nothing_stands_twice_on_the_left():
    left = [then for then, _ in ROWS]
    assert len(left) == len(set(left))
