"""`farflock leave` ends a node of ours, and never another program that now has its number."""

import subprocess
import sys

import msgspec
import pytest
from worlds.peers import node_status

pytestmark = pytest.mark.net

WAITING = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
sys.stdout.write("x")
sys.stdout.flush()
while True:  # signal.pause() would miss a signal that comes just before it
    time.sleep(0.1)
"""


def status_of(pid):
    return msgspec.json.encode(node_status(pid=pid))


@pytest.fixture
def process():
    """A function that starts a process with these words in its command line; SIGTERM ends it."""
    started = []

    def start(*words):
        started.append(
            subprocess.Popen([sys.executable, "-c", WAITING, *words], stdout=subprocess.PIPE)
        )
        assert started[-1].stdout.read(1) == b"x"
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def test_a_node_of_ours_is_asked_to_end_and_waited_for(farflock, process, tmp_path):
    node = process("farflock.node.cli.main")
    (tmp_path / "status.json").write_bytes(status_of(node.pid))
    code, out, _ = farflock("leave", "--folder", tmp_path, "--json")
    assert (code, out) == (0, '{"left":true}\n')
    assert node.poll() is not None


def test_another_program_with_that_number_is_left_alone(farflock, process, tmp_path):
    other = process("something else")
    (tmp_path / "status.json").write_bytes(status_of(other.pid))
    code, _, err = farflock("leave", "--folder", tmp_path)
    assert code == 1
    assert "no node is running in" in err
    assert other.poll() is None


def test_a_node_that_is_gone_already_is_a_failure_with_a_remedy(farflock, process, tmp_path):
    node = process("farflock.node.cli.main")
    node.kill()
    node.wait()
    (tmp_path / "status.json").write_bytes(status_of(node.pid))
    code, _, err = farflock("leave", "--folder", tmp_path)
    assert code == 1
    assert "--folder" in err


def test_without_a_status_there_is_nothing_to_leave(farflock, tmp_path):
    assert farflock("leave", "--folder", tmp_path)[0] == 1
