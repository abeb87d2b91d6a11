"""Two processes train one model as one peer: gloo on the loopback interface, as under torchrun."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from worlds.waiting import ended

WORKER = Path(__file__).parent / "shared_worker.py"

pytestmark = pytest.mark.net


def free_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return held.getsockname()[1]


@pytest.fixture
def pair(nursery, tmp_path):
    """Run a case in two processes; return what each of them left, the leader's first."""

    def run(case):
        known = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RUN_ID": "pair",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        workers = [
            nursery.popen(
                [sys.executable, str(WORKER), case, str(tmp_path)],
                env=os.environ | known | {"RANK": rank, "LOCAL_RANK": rank},
                stdout=subprocess.DEVNULL,
            )
            for rank in ("0", "1")
        ]
        try:
            for worker in workers:
                ended(worker, "a worker")
        finally:
            for worker in workers:
                worker.kill()
                ended(worker, "a worker")
        return [(tmp_path / name).read_text() for name in ("result.txt", "follower.txt")]

    return run


def test_two_processes_train_as_one_does(pair):
    assert pair("all_is_well") == ["", ""]


def test_they_do_so_with_ddp_and_in_bf16(pair):
    assert pair("so_it_is_on_other_terms") == ["", ""]


def test_they_do_so_a_sequence_at_a_time_with_layers_computed_again_and_losses_in_chunks(pair):
    case = "layers_are_computed_again_and_losses_in_chunks_a_sequence_at_a_time"
    assert pair(case) == ["", ""]


def test_they_begin_with_the_weights_of_a_folder(pair):
    assert pair("each_rank_reads_its_rows_of_a_folder") == ["", ""]


@pytest.mark.long
def test_they_do_so_with_compiled_layers(pair):
    assert pair("layers_are_compiled") == ["", ""]


def test_a_follower_that_fails_ends_the_peer_which_says_why(pair):
    leader, follower = pair("a_follower_fails")
    assert leader.startswith("rank 1 of this peer has ended")
    assert "MemoryError: a planted shortage of memory" in leader
    assert "a planted shortage" in follower


def test_a_follower_ends_when_its_leader_is_killed(pair):
    leader, follower = pair("the_leader_dies")
    assert leader == ""
    assert "this process follows rank 0 of its peer: which has ended" in follower
