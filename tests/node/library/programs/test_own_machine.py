"""Keywords of `SwarmOptimizer` that say where and how its own machine takes part."""

import contextlib
import math
import socket
import time

import pytest
from torch import nn

from farflock.node.library.door import NetworkEntryPoint
from farflock.node.library.swarm_optimizer import SwarmOptimizer
from farflock.node.process import network
from farflock.node.process.host import OwnPlace, Shares
from farflock.node.process.network import SHARES_FILE
from farflock.node.run.invite import parse
from farflock.swarm.addresses import LinkAddress

OUTSIDE = "203.0.113.7"


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({}, OwnPlace()),
        (
            {"advertise": f"{OUTSIDE}:4002", "up": "8mbit", "down": "all"},
            OwnPlace(advertise=(LinkAddress(OUTSIDE, 4002, 4003),), shares=Shares(1e6, 0.0)),
        ),
        (
            {"host": "::", "port": 4012, "dht_port": 4001, "advertise": ["[2001:db8::7]:30412"]},
            OwnPlace("::", 4012, 4001, advertise=(LinkAddress("2001:db8::7", 30412, 30413),)),
        ),
        ({"client_mode": True, "up": None}, OwnPlace(client_mode=True)),
    ],
)
def test_keywords_say_what_a_node_s_options_say(own, place):
    assert NetworkEntryPoint.of(None, own) == NetworkEntryPoint(None, place, None, 600.0)


def free_port():
    """A port that is free with the next one."""
    while True:
        with (
            contextlib.suppress(OSError, OverflowError),
            socket.socket() as one,
            socket.socket() as other,
        ):
            one.bind(("0.0.0.0", 0))
            port = one.getsockname()[1]
            other.bind(("0.0.0.0", port + 1))
            return port


@pytest.mark.net
def test_a_founder_invites_to_its_advertised_address_and_its_folder_remembers_its_shares(
    tmp_path, monkeypatch
):
    opened, open_world = [], network.open_world

    def watched(folder, listening, *others):
        opened.append(listening)
        return open_world(folder, listening, *others)

    monkeypatch.setattr(network, "open_world", watched)
    port = free_port()
    own = {"advertise": f"{OUTSIDE}:{port}", "up": "8mbit", "folder": tmp_path}
    with SwarmOptimizer(nn.Linear(2, 1), **own) as optimizer:
        members = parse(optimizer.invite, time.time()).members
    assert (OUTSIDE, port, port + 1) in [(each.host, each.control, each.bulk) for each in members]
    assert (tmp_path / SHARES_FILE).exists()
    with SwarmOptimizer(nn.Linear(2, 1), folder=tmp_path):
        pass
    assert [said.up_bytes_per_s for said in opened] == [1e6, 1e6]
    assert [said.down_bytes_per_s for said in opened] == [math.inf, math.inf]
    assert [(said.hosts, said.port) for said in opened] == [
        (("0.0.0.0",), port),
        (("127.0.0.1",), 0),
    ]
