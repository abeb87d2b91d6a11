"""The tree says where things are: small rooms with a description, no cycles, tests in place."""

import ast
from pathlib import Path

import pytest
from tidy import measure

ROOT = Path(__file__).parents[2]
HOUSES = ("node", "swarm", "optimizers", "compression", "experiments")
# about the whole, not one room
NO_ROOMS = {
    "tests/docs",
    "tests/net",
    "tests/sim",
    "tests/tidy",
    "tests/worlds",
}
SUBJECTS = {
    "at_size",
    "laws",
    "programs",
    "spec",
    "swarm",
}  # of a room's tests: what holds for all of its modules
MIN_LINES = 3

MODULES = {path: measure.parsed(path) for house in HOUSES for path in (ROOT / house).rglob("*.py")}
ROOMS = sorted({path.parent for path in MODULES})


def name(path):
    return path.relative_to(ROOT).as_posix()


def imported(tree):
    """Modules that a tree imports, at any time, as parts of their dotted names below `farflock`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("farflock."):
            for alias in node.names:
                yield (*node.module.split(".")[1:], alias.name)
        elif isinstance(node, ast.Import):
            yield from (
                tuple(alias.name.split(".")[1:])
                for alias in node.names
                if alias.name.startswith("farflock.")
            )


def module_of(parts):
    """The file that such parts name, as far as they name one."""
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        if path.with_suffix(".py") in MODULES:
            return path.with_suffix(".py")
    return None


def room_of(path):
    """The folder; a module at the root of a house, such as a seam, is a room by itself."""
    return path if path.parent in [ROOT / house for house in HOUSES] else path.parent


def circles(edges):
    """Rooms that import themselves through others."""
    reached = {room: set(targets) for room, targets in edges.items()}
    for via in edges:
        for targets in reached.values():
            if via in targets:
                targets |= reached[via]
    return [room for room, targets in reached.items() if room in targets]


@pytest.mark.parametrize(
    "folder", [room for room in ROOMS if room != ROOT / "compression"], ids=name
)
def test_each_room_says_what_lives_there_what_it_may_import_and_where_to_start(folder):
    said = ast.get_docstring(MODULES[folder / "__init__.py"]) or ""
    assert len(said.splitlines()) >= MIN_LINES
    assert "Start reading at" in said
    assert "mport" in said or "Knows no" in said


def test_no_room_imports_in_a_circle_lazily_or_not():
    edges = {}
    for path, tree in MODULES.items():
        targets = {
            room_of(found) for parts in imported(tree) if (found := module_of(parts)) is not None
        }
        edges.setdefault(room_of(path), set()).update(targets - {room_of(path)})
    assert not [name(room) for room in circles(edges)]


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_the_tests_are_where_the_code_is():
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")} - {ROOT / "tests"}
    rooms = {
        folder.parent
        if folder.name in SUBJECTS and not (ROOT / folder.relative_to(ROOT / "tests")).is_dir()
        else folder
        for folder in folders
    }
    assert not [
        room
        for room in rooms
        if name(room) not in NO_ROOMS and not (ROOT / room.relative_to(ROOT / "tests")).is_dir()
    ]


def test_the_protocol_has_no_input_or_output():
    forbidden = {"asyncio", "socket", "threading", "time", "os", "logging"}
    for path in (ROOT / "swarm" / "protocol").glob("[!_]*.py"):
        names = {
            alias.name
            for node in ast.walk(MODULES[path])
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        assert not names & forbidden, name(path)
