"""One node to a folder, and a pid that counts only while its process keeps the lock."""

import fcntl
import os
import stat
import subprocess
import sys
import threading

import pytest

from farflock.node.errors import Failure
from farflock.node.state.node_lock import node_in, only_node_in
from farflock.node.state.paths import RunFolder

HOLDING = """
import sys
from pathlib import Path
from farflock.node.state.node_lock import only_node_in
from farflock.node.state.paths import RunFolder

with only_node_in(RunFolder(Path(sys.argv[1]))):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "node")


@pytest.fixture
def other(folder):
    """A node of that folder in a process of its own."""
    command = [sys.executable, "-c", HOLDING, str(folder.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"held\n"
        yield process
        process.kill()


def test_a_node_is_found_while_it_runs_and_its_lock_is_its_owners_alone(folder):
    assert node_in(folder.path) is None
    with only_node_in(folder):
        assert node_in(folder.path).pid == os.getpid()
        assert stat.S_IMODE(folder.lock.stat().st_mode) == 0o600
    assert node_in(folder.path) is None
    with only_node_in(folder):
        assert node_in(folder.path).pid == os.getpid()


def test_a_second_node_is_refused_in_words_and_changes_nothing(folder, other):
    refused = f"another node runs in .*: it is process {other.pid}; stop that one with"
    with pytest.raises(Failure, match=refused), only_node_in(folder):
        pytest.fail("it began")
    assert node_in(folder.path).pid == other.pid


def test_a_killed_node_leaves_no_lock(folder, other):
    other.kill()
    other.wait()
    assert folder.lock.read_text() == f"{other.pid}\n"
    assert node_in(folder.path) is None
    with only_node_in(folder):
        assert node_in(folder.path).pid == os.getpid()


@pytest.mark.parametrize("content", ["", "x\n", "another", "-1\n", f"{10**19}\n"])
def test_a_pid_that_is_not_the_holders_is_nobodys(folder, other, content):
    folder.lock.write_text(f"{os.getppid()}\n" if content == "another" else content)
    assert node_in(folder.path).pid is None
    with pytest.raises(Failure, match="another node runs"), only_node_in(folder):
        pytest.fail("it began")


def test_one_that_only_looks_does_not_keep_a_node_from_starting(folder, other):
    looking = os.open(folder.lock, os.O_RDONLY)
    other.kill()
    other.wait()
    fcntl.flock(looking, fcntl.LOCK_SH)
    ends = threading.Timer(0.08, os.close, [looking])
    ends.start()
    with only_node_in(folder):
        assert node_in(folder.path).pid == os.getpid()
    ends.join()


def test_a_link_in_place_of_the_lock_is_not_followed(folder, tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("mine")
    folder.make()
    folder.lock.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"), only_node_in(folder):
        pytest.fail("it began")
    assert victim.read_text() == "mine"
