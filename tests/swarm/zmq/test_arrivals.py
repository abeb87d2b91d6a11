"""The machine's byte counter: what it counts, and that it is silent where there is none."""

import os
import socket
import sys

import pytest

from farflock.swarm.zmq import arrivals
from farflock.swarm.zmq.arrivals import Arrivals, received

TABLE = b"""Inter-|   Receive                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets
    lo: 120952583326 12026925    0    0    0     0          0         0 77 12026925
  eth0:3027272376   95057    0    0    0     0          0         0  6251866   58452
"""


def test_the_first_counters_of_all_interfaces_are_added():
    assert received(TABLE) == 120_952_583_326 + 3_027_272_376


@pytest.mark.parametrize("table", [b"", b"\n\n", TABLE + b"eth1\n", TABLE + b"eth1: many\n"])
def test_anything_but_a_table_counts_as_nothing(table):
    assert received(table) == 0


@pytest.mark.net
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's counters")
def test_bytes_over_loopback_are_counted_since_the_beginning():
    counter = Arrivals()
    left, right = socket.create_server(("127.0.0.1", 0)), socket.socket()
    try:
        right.connect(left.getsockname())
        before = counter.since()
        right.sendall(bytes(100_000))
        assert counter.since() >= before + 100_000
        counter.begin()
        assert counter.since() < 100_000_000
    finally:
        left.close()
        right.close()
        counter.close()
    assert counter.since() is None


def test_a_system_without_counters_says_nothing(monkeypatch):
    monkeypatch.setattr(arrivals, "COUNTERS", os.devnull)
    counter = Arrivals()
    assert counter.since() is None
    counter.close()
