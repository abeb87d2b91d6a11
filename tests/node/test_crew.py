"""Processes for work are forks of one that has imported its module, and of nobody who has opened anything."""

import json
import multiprocessing
import sys

import pytest

from farflock.node.crew import warm

MODULE = "farflock.node.chaos"
PROGRAM = f"""
import concurrent.futures, json, os, sys
from farflock.node.crew import warm

def seen():
    return os.getppid(), "{MODULE}" in sys.modules

if __name__ == "__main__":
    found = []
    for _ in range(2):
        with concurrent.futures.ProcessPoolExecutor(1, warm("{MODULE}")) as pool:
            found.append(pool.submit(seen).result(60))
    print(json.dumps([os.getpid(), "{MODULE}" in sys.modules, *found]))
"""


@pytest.mark.net
@pytest.mark.timeout(100)
def test_workers_are_forks_of_one_process_that_has_imported_the_module(nursery, tmp_path):
    """In a program of its own: this process may have such a server already, with another module."""
    (tmp_path / "program.py").write_text(PROGRAM)
    done = nursery.run([sys.executable, str(tmp_path / "program.py")], capture_output=True, text=True, timeout=90)
    mine, here, first, second = json.loads(done.stdout)
    assert first == second
    parent, imported = first
    assert parent != mine
    assert imported
    assert not here


def test_where_there_are_no_forks_processes_start_from_scratch(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert warm(MODULE).get_start_method() == "spawn"
