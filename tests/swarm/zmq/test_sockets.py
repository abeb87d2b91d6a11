"""One port at several hosts, which no other program has at any of them."""

import errno

import pytest
import zmq

from farflock.swarm.zmq.sockets import ANY_PORT_ATTEMPTS, bound_port


class Socket:
    """A socket whose system gives the next free port, and has some ports taken at some hosts."""

    def __init__(self, *taken):
        self.taken, self.bound, self.next_port = set(taken), [], 5000

    def bind(self, endpoint):
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if port == "0":
            self.next_port += 1
            port = str(self.next_port)
        if f"{host}:{port}" in self.taken:
            raise zmq.ZMQError(errno.EADDRINUSE)
        if host == "192.0.2.9":
            raise zmq.ZMQError(errno.EADDRNOTAVAIL)
        self.bound.append(f"tcp://{host}:{port}")

    def unbind(self, endpoint):
        self.bound.remove(endpoint)

    def getsockopt_string(self, option):
        return self.bound[-1]


def test_any_port_is_one_that_is_free_at_all_hosts():
    socket = Socket("[::1]:5001", "[::1]:5002")
    assert bound_port(socket, ["127.0.0.1", "::1"], 0) == 5003
    assert socket.bound == ["tcp://127.0.0.1:5003", "tcp://[::1]:5003"]


def test_without_such_a_port_it_ends_and_a_port_that_was_named_is_not_replaced():
    everywhere = (f"[::1]:{5001 + number}" for number in range(ANY_PORT_ATTEMPTS))
    with pytest.raises(OSError, match="choose another port"):
        bound_port(Socket(*everywhere), ["127.0.0.1", "::1"], 0)
    socket = Socket("[::1]:4002")
    with pytest.raises(OSError, match=r"cannot listen on tcp://\[::1\]:4002"):
        bound_port(socket, ["127.0.0.1", "::1"], 4002)


def test_a_host_that_is_not_there_is_not_tried_again():
    socket = Socket()
    with pytest.raises(OSError, match=r"192\.0\.2\.9"):
        bound_port(socket, ["192.0.2.9", "127.0.0.1"], 0)
    assert socket.next_port == 5001
