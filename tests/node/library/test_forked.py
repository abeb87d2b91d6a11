"""A forked child closes what is its parent's swarm's, and nothing else."""

import os
import signal
import socket
from pathlib import Path

import pytest

from farflock.node.library.forked import close_those_of, closed_in_forks

pytestmark = pytest.mark.net


@pytest.fixture
def sockets():
    """A listening socket, a connection to it in both ends, and a stranger."""
    listening, stranger = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    dialled = socket.create_connection(listening.getsockname())
    accepted, _ = listening.accept()
    held = {
        "listening": listening,
        "dialled": dialled,
        "accepted": accepted,
        "stranger": stranger,
    }
    yield held
    for each in held.values():
        each.close()


def test_a_socket_for_both_kinds_of_addresses_is_one_of_ours():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    both = {"family": socket.AF_INET6, "dualstack_ipv6": True}
    with socket.create_server(("", 0), **both) as listening:
        place = "127.0.0.1", listening.getsockname()[1]
        dialled = socket.create_connection(place)
        accepted, _ = listening.accept()
        close_those_of(Path("identity.key"), {place})
        assert not is_open(accepted.detach())
        assert not is_open(dialled.detach())


def is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def in_a_child(work):
    """What `work` returns in a forked child: a string."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.write(writes, work().encode())
        os.kill(os.getpid(), signal.SIGKILL)  # without the parent's clean-up
    os.close(writes)
    os.waitpid(child, 0)
    with open(reads) as pipe:
        return pipe.read()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_in_the_block_holds_no_socket_and_no_key_file(sockets, tmp_path):
    key = tmp_path / "identity.key"
    key.write_text("secret")
    host, port = sockets["listening"].getsockname()
    with key.open() as locked:
        numbers = {name: each.fileno() for name, each in sockets.items()} | {"key": locked.fileno()}

        def left():
            return " ".join(sorted(name for name in numbers if is_open(numbers[name])))

        with closed_in_forks(key, lambda: [f"/ip4/{host}/tcp/{port}"]):
            assert in_a_child(left) == "stranger"
        assert in_a_child(left) == "accepted dialled key listening stranger"
        assert left() == "accepted dialled key listening stranger"


def test_a_pipe_and_a_file_are_left_alone(tmp_path):
    reads, writes = os.pipe()
    with (tmp_path / "mine").open("w") as mine:
        close_those_of(tmp_path / "identity.key", {("127.0.0.1", 1)})
        assert all(is_open(number) for number in (reads, writes, mine.fileno()))
    os.close(reads)
    os.close(writes)
