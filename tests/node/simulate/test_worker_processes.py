"""Worker processes are forks of one that has imported its module and has opened nothing."""

import json
import multiprocessing
import signal
import sys

import pytest
from worlds.waiting import alive, completed, until_real

from farflock.node.simulate.worker_processes import warm

MODULE = "farflock.node.simulate.chaos"
PROGRAM = f"""
import concurrent.futures, json, os, sys
from farflock.node.simulate.worker_processes import warm

def seen():
    return os.getppid(), "{MODULE}" in sys.modules

if __name__ == "__main__":
    found = []
    for _ in range(2):
        with concurrent.futures.ProcessPoolExecutor(1, warm("{MODULE}")) as pool:
            found.append(pool.submit(seen).result())
    print(json.dumps([os.getpid(), "{MODULE}" in sys.modules, *found]))
"""


@pytest.mark.net
def test_workers_are_forks_of_one_process_that_has_imported_the_module(nursery, tmp_path):
    """In a program of its own: this process may have such a server already, with another module."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = completed(command, nursery.run, capture_output=True, text=True)
    mine, here, first, second = json.loads(done.stdout)
    assert first == second
    parent, imported = first
    assert parent != mine
    assert imported
    assert not here


ORPHANS = f"""
import concurrent.futures, os, signal, sys, time
from farflock.node.simulate.worker_processes import end_with_parent, warm

if __name__ == "__main__":
    pool = concurrent.futures.ProcessPoolExecutor(2, warm("{MODULE}"), end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


HANGING = f"""
import multiprocessing, time
from {MODULE} import run_seeds

def run(seed, name):
    time.sleep(1e6 if seed else 0)
    return seed

if __name__ == "__main__":
    running = run_seeds(0, 4, 2, run=run)
    print(next(running), flush=True)
    running.close()
    print(len(multiprocessing.active_children()), flush=True)
"""


@pytest.mark.net
def test_seeds_that_hang_end_with_whoever_wants_their_reports(nursery, tmp_path):
    (tmp_path / "program.py").write_text(HANGING)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = completed(command, nursery.run, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "0"])


@pytest.mark.net
def test_workers_end_with_a_parent_that_is_killed(nursery, tmp_path):
    (tmp_path / "program.py").write_text(ORPHANS)
    command = [sys.executable, str(tmp_path / "program.py")]
    done = completed(command, nursery.run, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL
    until_real(lambda: not alive(int(done.stdout)), "the end of the worker")


def test_where_there_are_no_forks_processes_start_from_scratch(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: ["spawn"])
    assert warm(MODULE).get_start_method() == "spawn"
