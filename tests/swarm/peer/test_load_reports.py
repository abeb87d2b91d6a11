"""Servers' reports of their load: a snapshot is complete or does not exist, and covers one
period."""

from types import SimpleNamespace

import pytest

from farflock.swarm.messages import Load
from farflock.swarm.peer.load_reports import REPEAT_S, LoadReports
from farflock.swarm.protocol.rebalance import next_move
from farflock.swarm.protocol.views import Member, View

VIEW = View(
    1, bytes(32), 0, (Member("a", 1, 0), Member("b", 2, 0), Member("c", 3, 1), Member("t", 4, -2))
)
NEEDS = (100, 100)


def load(number=7, queue=1.0, rate=2.0, memory=1000, resident_s=500.0):
    return Load(number, queue, rate, memory, resident_s)


class Port:
    def __init__(self, me="a"):
        self.me, self.view, self.gone_peers, self.sent, self.dropped, self.now_s = (
            me,
            VIEW,
            set(),
            [],
            [],
            0.0,
        )

    @property
    def views(self):
        return SimpleNamespace(newest=self.view)

    def gone(self, view, peer):
        return peer in self.gone_peers

    def now(self):
        return self.now_s

    def send(self, peer, message):
        self.sent.append((peer, message))

    def drop(self, why):
        self.dropped.append(why)


@pytest.fixture
def port():
    return Port()


def test_a_snapshot_needs_every_server_and_no_other_peer(port):
    loads = LoadReports(port)
    loads.say(load())
    assert loads.snapshot(7, NEEDS) is None
    loads.receive("b", 2, load(queue=4.0))
    assert loads.snapshot(7, NEEDS) is None
    loads.receive("c", 3, load(queue=9.0))
    snapshot = loads.snapshot(7, NEEDS)
    assert [[server.peer for server in stage] for stage in snapshot.stages] == [["a", "b"], ["c"]]
    assert snapshot.stages[1][0].queue == 9.0


def test_numbers_of_another_period_are_no_numbers(port):
    loads = LoadReports(port)
    loads.say(load())
    loads.receive("b", 2, load(6))
    loads.receive("c", 3, load())
    assert loads.snapshot(7, NEEDS) is None
    loads.receive("b", 2, load(7))
    assert loads.snapshot(7, NEEDS) is not None
    loads.receive("b", 2, load(6))
    assert loads.snapshot(7, NEEDS) is not None, "an older one that comes late takes nothing back"


def test_a_peer_that_is_gone_is_not_waited_for_and_serves_nothing(port):
    loads = LoadReports(port)
    loads.say(load())
    loads.receive("b", 2, load())
    port.gone_peers = {"c"}
    snapshot = loads.snapshot(7, NEEDS)
    assert snapshot.stages[1] == ()
    assert next_move(snapshot).target == 1


def test_full_replicas_that_live_are_counted_and_tell_nothing(port):
    port.view = View(
        2,
        bytes(32),
        0,
        (Member("a", 1, 0), Member("r", 2, -1), Member("s", 3, -1), Member("c", 4, 1)),
    )
    loads = LoadReports(port)
    loads.say(load())
    loads.receive("c", 4, load())
    assert loads.snapshot(7, NEEDS).replicas == 2
    port.gone_peers = {"r"}
    assert loads.snapshot(7, NEEDS).replicas == 1


def test_all_peers_that_hear_the_same_compute_the_same_move():
    moves = set()
    for me, _life in (("a", 1), ("b", 2), ("c", 3)):
        port = Port(me)
        loads = LoadReports(port)
        numbers = {"a": load(queue=0.0), "b": load(queue=1.0), "c": load(queue=90.0)}
        for peer, number in numbers.items():
            if peer == me:
                loads.say(number)
            else:
                loads.receive(peer, {"a": 1, "b": 2, "c": 3}[peer], number)
        moves.add(next_move(loads.snapshot(7, NEEDS)))
    assert len(moves) == 1


def test_a_member_that_names_a_stage_that_does_not_exist_delays_no_other(port):
    port.view = View(1, bytes(32), 0, (*VIEW.members, Member("x", 5, 1000)))
    loads = LoadReports(port)
    loads.say(load())
    loads.receive("b", 2, load())
    loads.receive("c", 3, load())
    assert loads.snapshot(7, NEEDS) is not None


def test_strangers_and_other_lives_are_not_heard(port):
    loads = LoadReports(port)
    loads.receive("x", 1, load())
    loads.receive("b", 99, load())
    assert port.dropped == ["load of a stranger"] * 2


def test_what_was_said_is_repeated_until_the_next_period(port):
    loads = LoadReports(port)
    loads.tick()
    assert port.sent == []
    loads.say(load())
    assert [peer for peer, _ in port.sent] == ["b", "c", "t"]
    loads.say(load(queue=5.0))
    assert len(port.sent) == 3, "one set of numbers a period"
    loads.tick()
    assert len(port.sent) == 3
    port.now_s = REPEAT_S
    loads.tick()
    assert len(port.sent) == 6
