"""Imports beside what a user waits for: they are over with the block, and hide no error."""

import sys

import pytest

from farflock.node.cli.importing import importing

SOURCE = "import threading\nwhere = threading.current_thread().name\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that nobody has imported: its name."""
    name = f"imported_beside_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_modules_are_there_after_the_block_and_another_thread_has_imported_them(module):
    with importing(module):
        pass
    assert sys.modules[module].where == "imports"


def test_an_error_of_the_block_comes_out_once_they_are_there(module):
    with pytest.raises(KeyError, match="of the block"), importing(module):
        raise KeyError("of the block")
    assert module in sys.modules


def test_a_module_that_cannot_be_imported_says_so_where_it_is_used(module, tmp_path):
    (tmp_path / f"{module}.py").write_text("raise ImportError('half of it is missing')")
    with importing(module):
        pass
    assert module not in sys.modules
    with pytest.raises(ImportError, match="half of it"):
        __import__(module)
