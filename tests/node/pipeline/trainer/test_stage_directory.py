"""A trainer's view of its stages, from views and logs of rounds: servers, commits, departures."""

import collections
from functools import partial
from types import SimpleNamespace

from farflock.node.pipeline.trainer.stage_directory import (
    HOPE_S,
    ServerLife,
    StageDirectory,
    StreamName,
)
from farflock.node.train import microbatch_ids as notes
from farflock.swarm.protocol.views import Certified, Chain, Member, View
from farflock.swarm.roles import EVERY, NOTHING

A, B, C, T = Member("a", 1, 0), Member("b", 1, 1), Member("c", 1, 1), Member("t", 1, NOTHING)
STREAMS = {0: StreamName("grad/0", 0, 1), 1: StreamName("grad/1", 2, 5)}


class Swarm:
    """A peer whose views and logs are what a test says."""

    def __init__(self, *members, streams=STREAMS):
        self.context = self.rounds = self
        self.views = Chain("run", [Certified(View(1, bytes(32), 0, members))])
        self.dead = set()
        self.logs = {stream.name: collections.OrderedDict() for stream in streams.values()}
        self.firsts = {stream.name: stream.first for stream in streams.values()}
        self.counted = collections.Counter()
        self.weights = {}  # by stream and round, those of members
        self.streams = {
            name: SimpleNamespace(entry=partial(self.entry, name)) for name in self.logs
        }
        self.now_s = 0.0

    def now(self):
        return self.now_s

    def gone(self, view, peer):
        return peer in self.dead

    def view(self, *members, begins=(0, 0, 0)):
        newest = self.views.newest
        self.views.views.append(
            Certified(View(newest.number + 1, newest.hash, begins[0], members, tuple(begins[1:])))
        )

    def close(self, stage, number, *keys):
        self.logs[STREAMS[stage].name][number] = (notes.written(keys),)
        return self

    def forget(self, stage, count):
        for _ in range(count):
            self.logs[STREAMS[stage].name].popitem(last=False)

    def entry(self, name, number):
        return SimpleNamespace(weights=self.weights.get((name, number), {}))

    def last_shards(self, name, number):
        return self.logs[name].get(number)

    def oldest_kept(self, name):
        return next(iter(self.logs[name]), self.firsts[name])

    def newest(self, name):
        return next(reversed(self.logs[name]), -1)

    def tokens(self, name):
        return self.counted[name]


def made(*members):
    swarm = Swarm(*(members or (A, B, C, T)))
    return swarm, StageDirectory(swarm, STREAMS)


def serving(stage_directory):
    return [[server.peer for server in stage] for stage in stage_directory.serving().stages]


def test_servers_are_the_members_of_the_view_that_are_not_known_to_be_gone():
    swarm, stage_directory = made(A, B, C, T, Member("all", 3, EVERY))
    assert stage_directory.stages == 2
    assert serving(stage_directory) == [["a", "all"], ["b", "c", "all"]]
    swarm.dead.add("b")
    assert serving(stage_directory) == [["a", "all"], ["c", "all"]]


def test_replicas_that_serve_no_passes_are_not_asked_but_are_heard_of_when_they_leave():
    whole = Member("all", 3, EVERY)
    swarm = Swarm(A, B, T, whole)
    stage_directory = StageDirectory(swarm, STREAMS, whole=False)
    assert serving(stage_directory) == [["a"], ["b"]]
    list(stage_directory.left())
    swarm.view(A, B, T)
    assert {name for _, name in stage_directory.left()} == {"all/3"}


def test_it_is_the_same_object_as_long_as_nothing_changes():
    swarm, stage_directory = made()
    before = stage_directory.serving()
    assert stage_directory.serving() is before
    swarm.dead.add("b")
    assert stage_directory.serving() is not before
    again = stage_directory.serving()
    swarm.view(A, B, C, T)
    assert stage_directory.serving() is not again
    assert stage_directory.serving().membership == 2


def test_a_server_is_a_life_and_is_found_by_its_name_while_it_is_a_member():
    swarm, stage_directory = made()
    assert stage_directory.at(1, "b") == ServerLife("b", 1)
    assert stage_directory.at(0, "b") is None
    assert stage_directory.server("b/1") == ServerLife("b", 1)
    swarm.view(A, Member("b", 2, 1), T)
    assert stage_directory.at(1, "b") == ServerLife("b", 2)
    assert stage_directory.server("b/1") is None
    assert stage_directory.server("c/1") is None


def test_the_epoch_is_the_newest_round_of_any_stage_and_the_tokens_are_those_of_the_slowest_one():
    swarm, stage_directory = made()
    assert stage_directory.epoch == -1
    swarm.close(0, 0).close(0, 1).close(1, 2)
    swarm.counted.update({"grad/0": 300, "grad/1": 200})
    assert (stage_directory.epoch, stage_directory.tokens()) == (2, 200)
    for number in range(2, 6):
        swarm.close(0, number)
    assert stage_directory.epoch == 5


def test_what_rounds_name_is_heard_once_in_their_order_and_by_their_stride():
    swarm, stage_directory = made()
    swarm.close(0, 0, ("t", 1)).close(1, 2, ("t", 1), ("u", 5))
    assert list(stage_directory.named()) == [(0, [("t", 1)]), (1, [("t", 1), ("u", 5)])]
    assert list(stage_directory.named()) == []
    swarm.close(0, 1, ("t", 2)).close(0, 2).close(1, 7, ("t", 3))
    assert list(stage_directory.named()) == [(0, [("t", 2)]), (0, []), (1, [("t", 3)])]


def test_a_round_whose_notes_are_not_here_yet_is_waited_for():
    swarm, stage_directory = made()
    swarm.close(0, 0, ("t", 1)).close(0, 1, ("t", 2)).close(0, 2, ("t", 3))
    logs = swarm.logs["grad/0"]
    logs[1], kept = None, logs[1]
    assert list(stage_directory.named()) == [(0, [("t", 1)])]
    logs[1] = kept
    assert list(stage_directory.named()) == [(0, [("t", 2)]), (0, [("t", 3)])]
    assert stage_directory.skipped() is None


def test_rounds_that_have_left_all_logs_unheard_are_said_to_be_skipped():
    swarm, stage_directory = made()
    for number in range(6):
        swarm.close(0, number, ("t", number))
    swarm.forget(0, 4)
    assert list(stage_directory.named()) == [(0, [("t", 4)]), (0, [("t", 5)])]
    assert [stage_directory.skipped(), stage_directory.skipped()] == [0, None]
    swarm.forget(0, 1)
    assert list(stage_directory.named()) == []
    assert stage_directory.skipped() is None, "it was heard before it went"


def test_notes_that_went_with_all_servers_of_a_stage_are_skipped_after_a_while():
    swarm, stage_directory = made()
    swarm.close(0, 0, ("t", 1)).close(0, 1, ("t", 2)).logs["grad/0"][0] = None
    assert list(stage_directory.named()) == []
    swarm.now_s += 2 * HOPE_S
    assert list(stage_directory.named()) == [], "its server is there and will deliver them"
    swarm.view(Member("a", 2, 0), B, C, T, begins=(0, 2, 0))
    assert list(stage_directory.named()) == []
    swarm.now_s += HOPE_S / 2
    assert list(stage_directory.named()) == []
    swarm.now_s += HOPE_S / 2
    assert list(stage_directory.named()) == [(0, [("t", 2)])]
    assert [stage_directory.skipped(), stage_directory.skipped()] == [0, None]
    swarm.now_s += HOPE_S
    assert list(stage_directory.named()) == [], "there is no round to be heard of"
    assert stage_directory.skipped() is None


def test_a_departure_is_reported_once_every_round_it_could_be_in_is_heard():
    swarm, stage_directory = made()
    assert list(stage_directory.left()) == []
    swarm.view(A, B, T, begins=(9, 4, 7))
    assert list(stage_directory.left()) == [], "rounds 2 of stage 1 may have been its"
    swarm.close(1, 2)
    assert list(stage_directory.left()) == [], "that round is not known yet"
    list(stage_directory.named())
    assert list(stage_directory.left()) == [(1, "c/1")]
    assert list(stage_directory.left()) == []


def test_another_life_and_another_stage_are_leaving_too():
    swarm, stage_directory = made()
    swarm.view(A, Member("b", 2, 1), Member("c", 2, 0), T)
    assert list(stage_directory.left()) == [(1, "b/1"), (1, "c/1")]


def test_what_counts_only_at_servers_that_left_is_added_up_by_their_last_weights():
    swarm, stage_directory = made()
    list(stage_directory.left())
    swarm.weights = {("grad/0", 0): {"a": 64.0}, ("grad/0", 1): {"a": 48.0}}
    swarm.close(0, 0, ("t", 1)).close(0, 1, ("t", 2))
    assert len(list(stage_directory.named())) == 2
    swarm.view(B, C, T, begins=(0, 2, 0))
    assert list(stage_directory.left()) == [(0, "a/1")]
    assert stage_directory.lost_tokens == 48
    assert list(stage_directory.left()) == []
    assert stage_directory.lost_tokens == 48, "once"


def test_a_server_that_goes_and_returns_between_two_looks_has_left():
    swarm, stage_directory = made()
    list(stage_directory.left())
    swarm.view(A, C, T)
    swarm.view(A, C, T, Member("b", 5, 1))
    swarm.view(C, T, Member("b", 5, 1))
    assert sorted(stage_directory.left()) == [(0, "a/1"), (1, "b/1")]


def test_a_life_that_is_back_is_another_server_than_before_it_was_left_out():
    """What is asked of it now is not lost once the rounds of its first membership are known."""
    swarm, stage_directory = made()
    before = stage_directory.at(1, "b")
    swarm.view(A, C, T, begins=(0, 0, 4))
    swarm.view(A, C, T, B, begins=(0, 0, 4))
    again = stage_directory.at(1, "b")
    assert (before.name, again.name) == ("b/1", "b/1+1")
    assert stage_directory.server(before.name) is None
    assert stage_directory.server(again.name) == again
    assert list(stage_directory.left()) == [], "the last round of its first membership is not known"
    swarm.close(1, 2)
    assert len(list(stage_directory.named())) == 1
    assert list(stage_directory.left()) == [(1, before.name)]
    swarm.view(A, C, T)
    assert list(stage_directory.left()) == [(1, again.name)]
    assert stage_directory.view_number == swarm.views.newest.number


def test_a_full_replica_leaves_every_stage():
    swarm, stage_directory = made(A, B, Member("all", 3, EVERY))
    swarm.view(A, B)
    assert sorted(stage_directory.left()) == [(0, "all/3"), (1, "all/3")]


def test_places_are_the_view_s_order_and_a_gone_server_keeps_its_place_in_it():
    swarm, stage_directory = made(C, A, B, T)
    assert stage_directory.serving().seniority == (("a",), ("c", "b"))
    swarm.dead = {"c"}
    assert [
        [server.peer for server in servers] for servers in stage_directory.serving().stages
    ] == [["a"], ["b"]]
    assert stage_directory.serving().at(1, 0) == "c"
    swarm.view(A, B, T)
    assert (stage_directory.serving().at(1, 0), stage_directory.serving().at(1, 1)) == ("b", None)
