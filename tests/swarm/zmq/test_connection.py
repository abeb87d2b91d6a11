"""A watched connection: what a stranger may send and how long it may wait, and what excuses it."""

import socket
import sys

import pytest

from farflock.swarm.zmq.connection import (
    SILENT_S,
    STRANGER_S,
    STRANGER_WIRE_BYTES,
    UNREAD_BYTES,
    Connection,
)
from farflock.swarm.zmq.outbox import CONTROL

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs the kernel's byte counter"
)


class Wire:
    """A TCP connection on loopback, whose bytes are taken as libzmq takes them: unread by us."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.sender = socket.create_connection(server.getsockname())
            self.taker, _ = server.accept()
        self.connection = Connection(self.taker.fileno(), CONTROL, 0.0)

    def take(self, count):
        self.sender.sendall(bytes(count))
        while count:
            count -= len(self.taker.recv(count))

    def close(self):
        for each in (self.sender, self.taker, self.connection):
            each.close()


@pytest.fixture
def wire():
    made = Wire()
    yield made
    made.close()


def test_a_stranger_that_sends_too_much_is_cut_off_once_its_first_frame_could_have_been_read(wire):
    wire.take(STRANGER_WIRE_BYTES + 1)
    assert wire.connection.fault(0.1, True) is None, "the record may be among what just came"
    assert wire.connection.fault(0.2, True) == "stranger: too many bytes"


def test_a_stranger_that_sends_as_much_as_a_record_needs_stays_until_its_time_is_over(wire):
    wire.take(STRANGER_WIRE_BYTES)
    assert wire.connection.fault(0.1, True) is None
    assert wire.connection.fault(STRANGER_S, True) is None
    assert wire.connection.fault(STRANGER_S + 0.1, True) == "stranger: no record in time"


def test_bytes_and_time_that_passed_while_this_node_did_not_read_are_excused(wire):
    wire.take(3 * STRANGER_WIRE_BYTES)
    late_s = 2 * STRANGER_S
    wire.connection.excuse(late_s)
    for now_s in (late_s, late_s + 0.1, late_s + STRANGER_S):
        assert wire.connection.fault(now_s, True) is None


def test_what_a_stranger_sends_and_waits_after_that_counts_again(wire):
    wire.take(3 * STRANGER_WIRE_BYTES)
    wire.connection.excuse(10.0)
    wire.take(STRANGER_WIRE_BYTES + 1)
    assert wire.connection.fault(10.1, True) is None
    assert wire.connection.fault(10.2, True) == "stranger: too many bytes"
    assert wire.connection.fault(10.2 + STRANGER_S, True) == "stranger: no record in time"


def test_no_excuse_lets_a_stranger_fill_the_memory(wire):
    for _ in range(UNREAD_BYTES[CONTROL] // 2**20 + 1):
        wire.take(2**20)
        wire.connection.excuse(10.0)
    assert wire.connection.fault(10.0, False) == "stranger: too many bytes"


def test_a_proven_partner_is_only_held_to_silence_and_its_backlog(wire):
    wire.connection.owner = "peer"
    wire.take(3 * STRANGER_WIRE_BYTES)
    for now_s in (0.1, 0.2, STRANGER_S + 1):
        assert wire.connection.fault(now_s, True) is None
    assert wire.connection.fault(SILENT_S + 0.1, True) == "silent"
    wire.connection.excuse(SILENT_S)
    assert wire.connection.fault(SILENT_S + 0.1, True) is None
