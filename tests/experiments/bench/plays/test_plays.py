"""Each fault of a swarm is done, measured and undone, so that the next one finds it whole."""

import json
import signal
from types import SimpleNamespace

import pytest

from farflock.experiments.bench.faults import PLAYS
from farflock.experiments.bench.plays import lines, machines, returns
from farflock.experiments.bench.workers.hosted_swarm import (
    NEVER,
    HostedNode,
    HostedSwarm,
    Setting,
)
from farflock.experiments.bench.workers.netns import Host


class Node(HostedNode):
    """A node that does nothing, and notes what is done to it."""

    def __init__(self, number, folder):
        super().__init__(Host(f"10.78.0.{number + 1}"), folder / f"node-{number}", Setting())
        self.files.mkdir()
        (self.files / "status.json").write_text(json.dumps({"peer": self.name, "invite": "x"}))
        self.done, self.is_stopped, self.runs = [], False, True

    def start(self, *words):
        self.runs = True
        self.done.append(words[0])

    def code(self, limit_s):
        return machines.COPY_CODE if signal.SIGTERM not in self.done else 0

    def checkpoints(self):
        return {"step-9"} if signal.SIGTERM in self.done else set()

    def sockets(self):
        return [SimpleNamespace(unlink=lambda: self.done.append("unlink"))]

    def signal(self, number, *, helpers=False):
        self.done.append(number)
        self.is_stopped = number == signal.SIGSTOP

    def kill(self):
        self.done.append("kill")
        self.runs = False

    def move(self, address):
        self.done.append("move")
        self.address = address


class Swarm(HostedSwarm):
    """Nodes on a network that only knows who does not hear whom."""

    def __init__(self, play, folder):
        count = play.setting.nodes + play.setting.spares
        nodes = [Node(number, folder) for number in range(count)]
        self.deaf, self.parted, self.asked = set(), 0, 0
        super().__init__(nodes[: play.setting.nodes], folder, nodes[play.setting.nodes :])
        for spare in self.spares:
            (spare.files / "status.json").unlink()
            spare.files.rmdir()

    def deafen(self, deaf, to):
        self.deaf |= {(one.name, other.name) for one in deaf for other in to}
        self.parted = max(self.parted, len(self.deaf))

    def hear(self, deaf, to):
        self.deaf -= {(one.name, other.name) for one in deaf for other in to}

    def seconds(self, nodes, enough, limit_s):
        self.asked += 1
        return float(self.asked)

    def longest_gap(self, nodes, for_s):
        self.asked += 1
        return float(self.asked)


@pytest.fixture(autouse=True)
def time(monkeypatch):
    """A clock that nobody waits for."""
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None)
    for module in (lines, machines, returns):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(machines, "DISK_BYTES", machines.BLOCK_BYTES)


@pytest.mark.parametrize("play", PLAYS, ids=[play.name for play in PLAYS])
def test_a_fault_is_undone_and_its_first_number_has_its_name(play, tmp_path):
    swarm = Swarm(play, tmp_path)
    addresses = [node.address for node in swarm.nodes]
    files = {node.name: sorted(node.folder.rglob("*")) for node in swarm.nodes}
    found = play.strike(swarm)
    assert next(iter(found)) == play.name
    assert set(play.before) <= set(found)
    assert NEVER not in found.values()
    assert swarm.deaf == set()
    assert [node.address for node in swarm.nodes] == addresses
    assert not any(node.is_stopped for node in swarm.nodes)
    assert all(node.runs for node in swarm.nodes)
    assert {node.name: sorted(node.folder.rglob("*")) for node in swarm.nodes} == files
    assert all(node.brake.read_text() == "0.1" for node in swarm.nodes)
    assert not any(spare.files.exists() for spare in swarm.spares)
    was_done = any(node.done for node in (*swarm.nodes, *swarm.spares))
    assert was_done or swarm.parted or play.name in ("clock", "disk", "e10")


def test_a_copy_that_does_not_end_by_itself_is_never(tmp_path, monkeypatch):
    (play,) = (play for play in PLAYS if play.name == "e23")
    swarm = Swarm(play, tmp_path)
    monkeypatch.setattr(Node, "code", lambda node, limit_s: 0)
    assert play.strike(swarm)["e23"] == NEVER
