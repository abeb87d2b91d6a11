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


def started(nursery, folder, *words):
    """Start the program in two processes."""
    workers = []
    for rank in ("0", "1"):
        where = {"RANK": rank, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(WORKER), words[0], str(folder), *words[1:]]
        workers.append(nursery.popen(command, env=os.environ | where, stdout=subprocess.DEVNULL))
    return workers


def results(workers, folder):
    """Return what each of two processes has left once they have ended."""
    for worker in workers:
        ended(worker, "a worker")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]
    for each in found:
        assert "error" not in each, each["error"]
    return found


@pytest.fixture
def start(nursery, tmp_path):
    """Start the program in two processes."""
    workers = []

    def run(*words):
        workers.extend(started(nursery, tmp_path, *words))
        return workers

    yield run
    for worker in workers:
        worker.kill()
        ended(worker, "a worker")


@pytest.fixture
def left(tmp_path):
    """Return what each of two processes has left once they have ended."""
    return lambda workers: results(workers, tmp_path)


@pytest.fixture(scope="module", params=["fsdp", "ddp"])
def parts(request, nursery, tmp_path_factory):
    """What each process leaves of all parts of the program."""
    folder = tmp_path_factory.mktemp(request.param)
    return results(started(nursery, folder, request.param, "parts"), folder)


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


def test_two_processes_skip_a_scaler_s_step_and_evaluate_as_one_does(parts, program):
    one = program.scaled_steps("plain")
    leader, follower = (each["scaled_steps"] for each in parts)
    assert leader["scales"] == follower["scales"] == one["scales"]
    assert one["scales"][-1] == 2.0**9  # a step was skipped
    assert leader["tokens"] == follower["tokens"] == program.STEPS
    means = (torch.tensor(leader["losses"]) + torch.tensor(follower["losses"])) / 2
    torch.testing.assert_close(means, torch.tensor(one["losses"]), rtol=1e-4, atol=1e-5)
    for name, x in one["weights"].items():
        torch.testing.assert_close(
            torch.tensor(leader["weights"][name]), torch.tensor(x), rtol=1e-3, atol=1e-5
        )
    assert leader["inside"] == follower["inside"] == pytest.approx(one["inside"], rel=1e-3)
    assert leader["after"] == follower["after"] == pytest.approx(one["after"], rel=1e-3)
    assert leader["inside"] != leader["after"]
    assert leader["same"]
    assert follower["same"]
    assert "until evaluating() is over" in leader["no_step"]
    assert leader["no_step"] in follower["no_step"]


def test_buffers_of_two_processes_are_averaged_and_end_equal(parts):
    leader, follower = (each["averaged"] for each in parts)
    assert leader["round"] == "alone"
    assert leader["before"] != follower["before"]
    mean = (torch.tensor(leader["before"]) + torch.tensor(follower["before"])) / 2
    torch.testing.assert_close(torch.tensor(leader["after"]), mean)
    assert leader["after"] == follower["after"]


def test_a_parameter_that_one_process_alone_adds_is_refused_in_all(parts):
    leader, follower = (each["meddled"] for each in parts)
    sentence = "rank 1: parameter more.weight: it was added after the optimizer was made"
    assert sentence in leader["said"][0]
    assert leader["said"][0] in follower["said"][0]
