"""The law of `Replica` on a module that two processes share, and the rules of a sharded one alone.

FSDP2 over gloo on the loopback interface.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import node_replica_law as law
from worlds.waiting import ended

HERE = Path(__file__).parent
COUNT = 2

pytestmark = pytest.mark.net


RULES = [rule.__name__ for rule in (*law.LAW, *law.SGD_LAW)]
CASES = [
    "shards_are_really_apart",
    "a_method_trains_as_on_a_plain_replica",
    "state_travels_in_blocks",
    "ddp_trains_as_on_a_plain_replica",
    "noloco_trains_as_on_a_plain_replica",
    "an_unsharded_module_is_refused",
]


@pytest.fixture(scope="module")
def folder(nursery, tmp_path_factory):
    """The folder in which two processes have left what became of each case."""
    folder = tmp_path_factory.mktemp("sharded")
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "sharded_worker.py")]
    workers = []
    for rank in range(COUNT):
        errors = (folder / f"errors-{rank}").open("w")
        arguments = [*command, str(rank), str(COUNT), str(folder)]
        workers.append(
            nursery.popen(arguments, env=environment, stdout=errors, stderr=subprocess.STDOUT)
        )
        errors.close()
    try:
        for worker in workers:
            ended(worker, "a worker")
    finally:
        for worker in workers:
            worker.kill()
            ended(worker, "a worker")
    for rank, worker in enumerate(workers):
        assert worker.returncode == 0, (folder / f"errors-{rank}").read_text()[-4000:]
    return folder


@pytest.mark.parametrize("name", RULES)
def test_law(folder, name):
    assert json.loads((folder / "results.json").read_text())[name] is None


@pytest.mark.parametrize("name", CASES)
def test_case(folder, name):
    assert json.loads((folder / "results.json").read_text())[name] is None


def test_every_case_that_ran_is_looked_at(folder):
    assert set(json.loads((folder / "results.json").read_text())) == {
        *RULES,
        *CASES,
    }


def test_only_the_leader_gets_full_tensors(folder):
    first, second = (
        json.loads((folder / f"names-{rank}.json").read_text()) for rank in range(COUNT)
    )
    assert len(first) == 8
    assert second == []
