"""`farflock leave` ends a node of ours, and never another program, whatever a file says."""

import subprocess
import sys

import msgspec
import pytest

from farflock.node.process.status import Status

WAITING = """
import contextlib, signal, sys, time
from pathlib import Path
from farflock.node.state.node_lock import only_node_in
from farflock.node.state.paths import RunFolder

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with only_node_in(RunFolder(Path(sys.argv[1]))) if sys.argv[1:] else contextlib.nullcontext():
    sys.stdout.write("x")
    sys.stdout.flush()
    while True:  # signal.pause() would miss a signal that comes just before it
        time.sleep(0.1)
"""


def status_of(pid):
    nothing = {
        "members": (),
        "partners": (),
        "waits": (),
        "dropped": {},
        "loss": None,
        "is_member": True,
    }
    numbers = dict.fromkeys(
        ("step", "tokens", "total_tokens", "view", "sent_bytes", "received_bytes", "unsure_rounds"),
        0,
    )
    return msgspec.json.encode(Status(pid=pid, run="r", peer="p", invite="i", **numbers, **nothing))


@pytest.fixture
def process():
    """A function that starts the node of a folder, or another program; SIGTERM ends it."""
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
    node = process(str(tmp_path))
    code, out, _ = farflock("leave", "--folder", tmp_path, "--json")
    assert (code, out) == (0, '{"left":true}\n')
    assert node.poll() is not None


@pytest.mark.parametrize("words", [("farflock.node.cli.main",), ("vim-farflock-notes.txt",)])
def test_a_program_that_a_status_names_is_left_alone(farflock, process, tmp_path, words):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *words])
    (tmp_path / "status.json").write_bytes(status_of(other.pid))
    (tmp_path / "node.lock").write_text(f"{other.pid}\n")
    try:
        code, _, err = farflock("leave", "--folder", tmp_path)
        assert code == 1
        assert "no node is running in" in err
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_program_that_has_the_number_in_a_held_lock_is_left_alone(farflock, process, tmp_path):
    node, other = process(str(tmp_path)), process()
    (tmp_path / "node.lock").write_text(f"{other.pid}\n")
    code, _, err = farflock("leave", "--folder", tmp_path)
    assert code == 1
    assert "its process cannot be seen from here" in err
    assert (node.poll(), other.poll()) == (None, None)


def test_a_node_that_is_gone_already_is_a_failure_with_a_remedy(farflock, process, tmp_path):
    node = process(str(tmp_path))
    node.kill()
    node.wait()
    (tmp_path / "status.json").write_bytes(status_of(node.pid))
    code, _, err = farflock("leave", "--folder", tmp_path)
    assert code == 1
    assert "--folder" in err


def test_in_a_folder_without_a_node_there_is_nothing_to_leave(farflock, tmp_path):
    assert farflock("leave", "--folder", tmp_path)[0] == 1
    assert farflock("leave", "--folder", tmp_path / "none")[0] == 1
