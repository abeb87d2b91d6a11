"""The example that newcomers copy, as two processes; a peer's real links leave nothing behind."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from worlds.waiting import alive, completed, ended, line_of, output_of, until_real

from farflock.node.errors import RefusedByRun
from farflock.node.library.swarm_optimizer import SwarmOptimizer

pytestmark = pytest.mark.net

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plain_loop.py"
ROUND = re.compile(r"number=(\d+), status='(\w+)', peers=(\d)")
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONUNBUFFERED": "1",
}

FORGETFUL = """
import psutil, torch, farflock
model = torch.nn.Linear(2, 1)
optimizer = farflock.SwarmOptimizer(model, period=1)
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
for child in psutil.Process().children(recursive=True):
    print(child.pid)
"""


@contextlib.contextmanager
def example(nursery, warned, *arguments):
    """A process of the example, whose warnings go to a file."""
    with warned.open("a") as stream:
        process = nursery.popen(
            [sys.executable, str(EXAMPLE), *arguments],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=ENVIRONMENT,
        )
    try:
        yield process
    finally:
        process.kill()
        ended(process, "the example")
        process.stdout.close()


def await_end(pids):
    until_real(lambda: not any(map(alive, pids)), f"the end of the processes {pids}")


def test_two_processes_of_the_example_train_one_model(nursery, tmp_path):
    warned = tmp_path / "warned.txt"
    with example(nursery, warned) as founder:
        invite = line_of(founder, "the invite", warned.read_text).split()[-1]
        with example(nursery, warned, invite) as joiner:
            texts = [
                output_of(process, "the example", warned.read_text) for process in (founder, joiner)
            ]
            assert [founder.returncode, joiner.returncode] == [0, 0], warned.read_text()
    assert (
        warned.read_text().count("no folder is named, so nothing is kept for the next start") == 2
    )
    rounds = [
        [(int(n), status, int(peers)) for n, status, peers in ROUND.findall(text)] for text in texts
    ]
    together = [{number for number, _, peers in each if peers == 2} for each in rounds]
    assert together[0] & together[1]
    assert rounds[0][-1][0] == rounds[1][-1][0]
    hashes = {re.search(r"weights: (\w{64})", text)[1] for text in texts}
    assert len(hashes) == 1


def test_the_example_is_short():
    code = [line for line in EXAMPLE.read_text().split('"""')[2].splitlines() if line.strip()]
    assert len(code) <= 30


def test_a_real_peer_leaves_no_thread_process_or_file_and_refuses_a_model_that_is_not_the_run_s(
    tmp_path, monkeypatch
):
    threads, passing = set(threading.enumerate()), tmp_path / "passing"
    # an earlier test's resource tracker
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    passing.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(passing))
    model = nn.Linear(2, 1)
    with SwarmOptimizer(model, "diloco", period=1) as optimizer:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        children = [
            child.pid
            for child in psutil.Process().children(recursive=True)
            if child.pid not in before
        ]
        assert children
        assert optimizer.last_round == ("delta", 0, "alone", 1)
        with pytest.raises(
            RefusedByRun,
            match=r"model\.numbers: it is 4 here and 3 in the run, as parameter weight has",
        ):
            SwarmOptimizer(nn.Linear(3, 1), invite=optimizer.invite)
        with pytest.raises(
            RefusedByRun, match=r"method\.name: it is 'noloco' here and 'diloco' in the run"
        ):
            SwarmOptimizer(nn.Linear(2, 1), "noloco", optimizer.invite, folder=tmp_path / "mine")
        assert (tmp_path / "mine" / "identity.key").exists()
        assert len(list(passing.glob("farflock-*"))) == 1
    await_end(children)
    # asyncio's own thread that has waited for the directory's process is on its way out
    until_real(lambda: set(threading.enumerate()) <= threads, "the end of its threads")
    assert not list(passing.glob("farflock-*"))


@pytest.mark.long
def test_a_program_that_forgets_to_close_ends_all_the_same():
    done = completed(
        [sys.executable, "-c", FORGETFUL],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    children = [int(pid) for pid in done.stdout.split()]
    assert children
    await_end(children)
