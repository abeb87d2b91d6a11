"""A program that two processes run is one peer: FSDP2 and DDP over gloo on the loopback
interface."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).parent / "shared_worker.py"
TIMEOUT_S = 100

pytestmark = pytest.mark.net


@pytest.fixture
def pair(nursery, tmp_path):
    """Run the program in two processes; return what each of them left."""

    def run(wrapper):
        workers = [
            nursery.popen(
                [sys.executable, str(WORKER), wrapper, str(tmp_path)],
                env=os.environ | {"RANK": rank, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            for rank in ("0", "1")
        ]
        try:
            for worker in workers:
                worker.wait(TIMEOUT_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait(10)
        left = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
        for each in left:
            assert "error" not in each, each["error"]
        return left

    return run


@pytest.fixture(scope="module")
def one():
    """What the same program leaves in one process."""
    spec = importlib.util.spec_from_file_location("shared_worker", WORKER)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program.trained("plain")


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_two_processes_train_as_one_does(pair, one, wrapper):
    leader, follower = pair(wrapper)
    means = (torch.tensor(leader["losses"]) + torch.tensor(follower["losses"])) / 2
    torch.testing.assert_close(means, torch.tensor(one["losses"]), rtol=1e-4, atol=1e-5)
    assert leader["weights"].keys() == one["weights"].keys()
    for name, x in one["weights"].items():
        torch.testing.assert_close(
            torch.tensor(leader["weights"][name]), torch.tensor(x), rtol=1e-3, atol=1e-5
        )
    assert follower["weights"] == {}
    assert leader["known"] == follower["known"] == one["known"]
    assert leader["known"]["round"][:2] == ["delta", 1]
    assert leader["swarm"]
    assert not follower["swarm"]
