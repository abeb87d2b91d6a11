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
MAY_IMPORT = {
    "compression": set(),
    "swarm": set(),
    "optimizers": {"compression"},
    "node": {"compression", "optimizers", "swarm"},
}


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
