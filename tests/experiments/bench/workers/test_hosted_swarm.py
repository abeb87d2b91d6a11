"""Nodes on hosts of their own: their rounds are timed as they are seen; lines can fall silent."""

import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from worlds.waiting import completed, line_of

from farflock.experiments.bench.workers import hosted_node, hosted_swarm
from farflock.experiments.bench.workers.hosted_node import PAGE_BYTES, paced, stepped
from farflock.experiments.bench.workers.hosted_swarm import (
    NEVER,
    HostedNode,
    HostedSwarm,
    Setting,
)
from farflock.experiments.bench.workers.netns import Host, NoHosts, hosts


def line(number, *participants):
    return json.dumps({"round": number, "participants": participants}) + "\n"


class Folder:
    """The folders of nodes, and rounds that they write at times of the test's own clock."""

    def __init__(self, tmp_path, monkeypatch, count=2):
        self.now_s, self.coming = 100.0, []
        nodes = [
            HostedNode(Host(), tmp_path / f"node-{number}", Setting()) for number in range(count)
        ]
        for node in nodes:
            (node.folder / "node").mkdir()
            (node.folder / "node/status.json").write_text(json.dumps({"peer": node.name}))
        self.swarm = HostedSwarm(nodes, tmp_path)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self.sleep)
        monkeypatch.setattr(hosted_swarm, "time", clock)

    def at(self, seconds, number, text):
        self.coming.append((100.0 + seconds, number, text))

    def sleep(self, seconds):
        self.now_s += seconds
        for entry in [entry for entry in self.coming if entry[0] <= self.now_s]:
            self.coming.remove(entry)
            with (self.swarm.nodes[entry[1]].folder / "node/receipts.jsonl").open("a") as file:
                file.write(entry[2])


@pytest.fixture
def world(tmp_path, monkeypatch):
    return Folder(tmp_path, monkeypatch)


def test_progress_is_the_second_round_of_each_node(world):
    world.at(-1.0, 0, line(1))
    world.sleep(0.0)
    for seconds, number in ((1.0, 0), (2.0, 0), (3.0, 1), (5.0, 1)):
        world.at(seconds, number, line(2))
    assert world.swarm.progress(world.swarm.nodes, 9.0) == pytest.approx(5.0, abs=0.1)
    assert world.swarm.progress(world.swarm.nodes, 9.0) == NEVER


def test_a_member_counts_once_every_node_has_a_round_with_its_work(world):
    world.at(1.0, 0, line(3, "node-0", "node-1"))
    world.at(2.0, 1, line(3, "node-0"))
    world.at(4.0, 1, line(4, "node-0", "node-1"))
    assert world.swarm.whole(9.0) == pytest.approx(4.0, abs=0.1)


def test_half_a_line_waits_for_its_other_half_and_what_is_no_receipt_is_no_round(world):
    whole, node = line(7, "node-0"), world.swarm.founder
    world.at(1.0, 0, "not JSON\n" + whole[:9])
    world.sleep(1.0)
    node.look()
    assert node.rounds == []
    world.at(2.0, 0, whole[9:])
    world.sleep(1.0)
    node.look()
    assert [(each.number, each.participants) for each in node.rounds] == [(7, ("node-0",))]


def test_the_longest_time_without_a_round_counts_until_the_end(world):
    for seconds in (1.0, 2.0, 5.0, 6.0):
        world.at(seconds, 0, line(1))
        world.at(seconds, 1, line(1))
    world.at(7.5, 1, line(2))
    assert world.swarm.longest_gap(world.swarm.nodes, 8.0) == pytest.approx(3.0, abs=0.1)
    assert world.swarm.longest_gap(world.swarm.nodes, 8.0) == NEVER


def test_a_clock_is_off_by_what_its_file_says_while_there_is_one(tmp_path):
    now_s = stepped(lambda: 1000.0, tmp_path / "clock.txt")
    assert now_s() == 1000.0
    (tmp_path / "clock.txt").write_text("-4.5")
    assert now_s() == 995.5


def test_a_slow_disk_takes_a_part_at_once_while_its_file_says_so(tmp_path, monkeypatch):
    taken, slept = [], []
    monkeypatch.setattr(hosted_node, "time", SimpleNamespace(sleep=slept.append))
    write = paced(lambda descriptor, data: taken.append(len(data)) or len(data), tmp_path / "disk")
    assert write(1, bytes(100_000)) == 100_000
    assert slept == []
    (tmp_path / "disk").write_text("65536")
    assert write(1, bytes(100_000)) == 4 * PAGE_BYTES
    assert write(1, bytes(100)) == 100
    assert slept == [4 * PAGE_BYTES / 65536, 100 / 65536]
    assert taken == [100_000, 4 * PAGE_BYTES, 100]


HEARD = (
    "import socket\n"
    "s = socket.socket(type=socket.SOCK_DGRAM); s.bind(('', 7)); print('up', flush=True)\n"
    "while True: print(s.recv(9).decode(), flush=True)\n"
)
SAY = "import socket, sys; socket.socket(type=2).sendto(sys.argv[2].encode(), (sys.argv[1], 7))"


@pytest.mark.net
def test_a_deafened_host_hears_nothing_of_another_one_until_it_hears_again(tmp_path):
    with contextlib.ExitStack() as stack:
        try:
            places = stack.enter_context(hosts(2, 1e8))
        except NoHosts as why:
            pytest.skip(str(why))
        a, b = (HostedNode(place, tmp_path / place.address, Setting()) for place in places)
        swarm = HostedSwarm([a, b], tmp_path)
        listener = subprocess.Popen(
            [*b.host.prefix, sys.executable, "-c", HEARD], stdout=subprocess.PIPE
        )
        stack.callback(listener.wait)
        stack.callback(listener.kill)
        assert line_of(listener, "the listener") == b"up\n"

        def say(word):
            completed([*a.host.prefix, sys.executable, "-c", SAY, b.host.address, word], check=True)

        say("before")
        assert line_of(listener, "the first word") == b"before\n"
        swarm.deafen([b], [a])
        say("lost")
        swarm.hear([b], [a])
        say("after")
        assert line_of(listener, "the last word") == b"after\n"
