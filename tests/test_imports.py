"""The allowed imports, and the modules that must not be imported early.

import-linter checks the directions too (`make imports`); here are the rules that it cannot
express, and their proof in a fresh interpreter.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from worlds.waiting import completed

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "hivemind", "rich", "matplotlib", "zmq", "cryptography", "tokenizers")
SOME_SYSTEMS = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}  # that have them
NEEDS_EXTRA = {"harness.py", "tensorboard_events.py", "trainer_callback.py", "wandb_run.py"}
MAY_IMPORT = {
    "compression": set(),
    "swarm": set(),
    "optimizers": {"compression"},
    "node": {"compression", "optimizers", "swarm"},
}

MODULES = [
    path for folder in (*MAY_IMPORT, "experiments") for path in (ROOT / folder).rglob("*.py")
]


def modules_after(statement):
    """Top-level modules that a fresh interpreter has imported after a statement."""
    code = (
        f"import sys\n{statement}\n"
        "sys.stdout.write(' '.join({name.partition('.')[0] for name in sys.modules}))"
    )
    command = [sys.executable, "-c", code]
    done = completed(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def ours(path):
    """Folders of this house that a file imports from, whenever it does."""
    nodes = ast.walk(ast.parse(path.read_text()))
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[1] for name in names if name.startswith("farflock.")}


def at_import(tree):
    """The modules that importing a module imports, which may stand below `if` or `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from at_import(node)


def test_no_module_needs_linux_to_be_imported():
    named = re.compile(rf"\b(import|from) ({'|'.join(sorted(SOME_SYSTEMS))})\b")
    texts = {path: text for path in MODULES if named.search(text := path.read_text())}
    assert len(texts) >= 5  # they import one late
    assert not [
        path for path, text in texts.items() if set(at_import(ast.parse(text))) & SOME_SYSTEMS
    ]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import fcntl", True),
        ("try:\n    from termios import FIONREAD\nexcept ImportError:\n    pass", True),
        ("class A:\n    import resource", True),
        ("def f():\n    import fcntl", False),
    ],
)
def test_an_import_of_what_only_some_systems_have_is_found(source, found):
    assert bool(set(at_import(ast.parse(source))) & SOME_SYSTEMS) == found


@pytest.mark.ci_more
@pytest.mark.net
def test_everything_is_imported_where_linux_modules_are_absent_for_us():
    """For others they are there: the standard library's own modules need them on Linux."""
    names = [
        ".".join(("farflock", *path.relative_to(ROOT).with_suffix("").parts))
        for path in MODULES
        if path.name not in {"__init__.py", "__main__.py"} and not NEEDS_EXTRA & set(path.parts)
    ]
    code = (
        "import builtins, importlib, sys\n"
        "whole = builtins.__import__\n"
        "def without(name, names=None, *rest):\n"
        "    who = str((names or {}).get('__name__'))\n"
        f"    if name in {SOME_SYSTEMS} and who.startswith('farflock'):\n"
        "        raise ModuleNotFoundError(f'{who} imports {name}', name=name)\n"
        "    return whole(name, names, *rest)\n"
        "builtins.__import__ = without\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "sys.stdout.write(str(len(sys.argv)))"
    )
    done = completed([sys.executable, "-c", code, *names], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, str(len(names) + 1)), done.stderr


@pytest.mark.net
@pytest.mark.parametrize(
    "statement",
    [
        "import farflock",
        "import farflock.testing",
        "import farflock.node.cli.main",
        "import farflock.node.cli.output",
    ],
)
def test_the_front_door_and_the_command_line_import_nothing_heavy(statement):
    assert not modules_after(statement) & set(HEAVY)


@pytest.mark.net
def test_swarm_knows_no_tensor_in_a_fresh_interpreter():
    statement = (
        "import farflock.swarm.peer.peer, farflock.swarm.zmq.links, farflock.swarm.sim.network"
    )
    assert not modules_after(statement) & {"torch", "numpy", "hivemind"}


@pytest.mark.net
def test_a_run_is_shown_without_torch_and_its_directory_waits_until_it_is_asked():
    imported = modules_after("import farflock.node.process.inspect_run")
    assert not imported & {"torch", "numpy", "hivemind"}


@pytest.mark.net
def test_compression_and_optimizers_stand_without_the_swarm():
    every = "from farflock.optimizers.catalog import METHODS; list(METHODS.values())"
    imported = modules_after(f"import farflock.compression.catalog; {every}")
    assert not imported & {"hivemind", "zmq", "click"}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_the_folders_import_in_one_direction(folder):
    wrong = {
        path.name: bad
        for path in (ROOT / folder).rglob("*.py")
        if (bad := ours(path) - MAY_IMPORT[folder] - {folder})
    }
    assert not wrong


def test_only_the_directory_and_its_daemon_know_hivemind():
    knows = {
        path.relative_to(ROOT).as_posix()
        for folder in MAY_IMPORT
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"^\s*(from|import) hivemind", path.read_text(), re.M)
    }
    assert knows == {"swarm/dht/kademlia.py", "swarm/dht/daemon.py"}


def test_the_front_door_names_only_what_is_there():
    import farflock
    import farflock.testing

    assert re.match(r"\d+[.+]", farflock.__version__)
    for door in (farflock, farflock.testing):
        assert all(hasattr(door, name) for name in door.__all__)
        assert set(door.__all__) <= set(dir(door))
        with pytest.raises(AttributeError, match="has no attribute 'check_everything'"):
            _ = door.check_everything


def test_the_bare_folder_names_are_imported_nowhere():
    bare = re.compile(r"^\s*(from|import) (node|swarm|optimizers|compression|experiments)\b", re.M)
    everything = [
        path
        for folder in (*MAY_IMPORT, "experiments", "tests")
        for path in (ROOT / folder).rglob("*.py")
    ]
    assert not [str(path) for path in everything if bare.search(path.read_text())]
