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
from worlds.waiting import ended

WORKER = Path(__file__).parent / "shared_worker.py"

pytestmark = pytest.mark.net


@pytest.fixture
def start(nursery, tmp_path):
    """Start the program in two processes."""
    started = []

    def run(*words):
        for rank in ("0", "1"):
            where = {"RANK": rank, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            started.append(
                nursery.popen(
                    [sys.executable, str(WORKER), words[0], str(tmp_path), *words[1:]],
                    env=os.environ | where,
                    stdout=subprocess.DEVNULL,
                )
            )
        return started

    yield run
    for worker in started:
        worker.kill()
        ended(worker, "a worker")


@pytest.fixture
def left(tmp_path):
    """Return what each of two processes has left once they have ended."""

    def results(workers):
        for worker in workers:
            ended(worker, "a worker")
        found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
        for each in found:
            assert "error" not in each, each["error"]
        return found

    return results


@pytest.fixture(scope="module")
def program():
    """The program, for this process."""
    spec = importlib.util.spec_from_file_location("shared_worker", WORKER)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    return program


@pytest.mark.parametrize(
    ("wrapper", "method", "last"),
    [("fsdp", "ddp", ["grad", 7]), ("ddp", "diloco", ["delta", 1])],
)
def test_two_processes_train_as_one_does(start, left, program, wrapper, method, last):
    one = program.trained("plain", method)
    leader, follower = left(start(wrapper, method))
    means = (torch.tensor(leader["losses"]) + torch.tensor(follower["losses"])) / 2
    torch.testing.assert_close(means, torch.tensor(one["losses"]), rtol=1e-4, atol=1e-5)
    assert leader["weights"].keys() == one["weights"].keys()
    for name, x in one["weights"].items():
        torch.testing.assert_close(
            torch.tensor(leader["weights"][name]), torch.tensor(x), rtol=1e-3, atol=1e-5
        )
    assert follower["weights"] == {}
    assert leader["known"] == follower["known"] == one["known"]
    assert leader["known"]["kind"] == "SwarmOptimizer"
    assert leader["known"]["round"][:2] == last
    assert leader["swarm"]
    assert not follower["swarm"]
    for sentence, same, other in zip(
        one["refused"], leader["refused"], follower["refused"], strict=True
    ):
        assert sentence
        assert same == sentence
        assert sentence in other


def test_two_processes_join_the_run_of_one_and_agree_with_it_to_the_bit(start, left, program):
    workers = []

    def greet(optimizer):
        workers.extend(start("fsdp", optimizer.invite))

    founder = program.in_a_swarm("plain", greet=greet)
    leader, follower = left(workers)
    assert founder["known"]["members"] == leader["known"]["members"] == 2
    assert leader["known"]["peer"] == follower["known"]["peer"] != founder["known"]["peer"]
    assert founder["known"]["round"] == leader["known"]["round"]
    assert founder["known"]["round"][:2] == ["delta", 3]
    assert leader["weights"] == founder["weights"]
    assert "were changed outside of a step, farther than the last round" in leader["jump"]
    assert leader["jump"] in follower["jump"]
