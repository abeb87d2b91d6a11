"""Faults of real swarms: the worst time counts, and what never came is said as such."""

import contextlib

import pytest

from farflock.experiments.bench import faults
from farflock.experiments.bench.plays.play import Play
from farflock.experiments.bench.workers.hosted_swarm import NEVER, Setting
from farflock.experiments.measure.metric import NotMeasured, Options


class Swarm:
    """A swarm that trains as long as nobody looks."""

    def require_whole(self):
        pass


@pytest.fixture
def played(monkeypatch):
    """A function that lets a row be played with times that the test knows, and the numbers of nodes
    of the swarms that were made for it."""
    made = []

    @contextlib.contextmanager
    def hosted_swarm(setting):
        made.append(setting.nodes)
        yield Swarm()

    def play(*times, **more):
        left = list(times)
        row = Play("cut", "one is cut off", lambda swarm: left.pop(0), **more)
        monkeypatch.setattr(faults, "PLAYS", (row,))
        return row

    monkeypatch.setattr(faults, "hosted_swarm", hosted_swarm)
    play.made = made
    return play


def test_the_worst_time_is_beside_what_it_was(played):
    played({"cut": 1.0, "cut.back": 9.0}, {"cut": 3.0, "cut.back": 4.0}, before={"cut": 6.0})
    first, second = faults.run(Options(repeats=2))
    assert (first.metric, first.value) == ("faults.cut", 3.0)
    assert (first.yardstick, first.ratio) == (6.0, 0.5)
    assert first.note.startswith("one is cut off; each time: 1.0, 3.0; yardstick: ")
    assert (second.metric, second.value) == ("faults.cut.back", 9.0)
    assert (second.yardstick, second.ratio) == (None, None)
    assert played.made == [4]


def test_what_never_came_is_the_worst_and_the_next_time_has_a_new_swarm(played):
    played(
        {"cut": 1.0}, {"cut": NEVER}, {"cut": 99.0}, before={"cut": 6.0}, setting=Setting(nodes=6)
    )
    (metric,) = faults.run(Options(repeats=3))
    assert (metric.value, metric.ratio, metric.n) == (-1.0, None, 3)
    assert played.made == [6, 6]


def test_a_row_that_never_was_better_has_no_ratio(played):
    played({"cut": 5.0}, before={"cut": NEVER})
    (metric,) = faults.run(Options(repeats=1))
    assert (metric.yardstick, metric.ratio) == (-1.0, None)


def test_one_row_can_be_asked_for_by_any_of_its_metrics(played):
    played({"cut": 1.0, "cut.back": 2.0})
    assert len(list(faults.run(Options(repeats=1, only="faults.cut.back")))) == 2
    assert list(faults.run(Options(only="faults.kill"))) == []
    assert played.made == [4]


def test_a_row_without_a_swarm_does_not_end_the_others(played, monkeypatch):
    row = played({"cut": 1.0})

    def no_room(swarm):
        raise NotMeasured("no room")

    broken = Play("disk", "a full disk", no_room)
    monkeypatch.setattr(faults, "PLAYS", (broken, row))
    running = faults.run(Options(repeats=1))
    assert next(running).metric == "faults.cut"
    with pytest.raises(NotMeasured, match="disk: no room"):
        next(running)


def test_each_row_has_a_name_of_its_own_and_says_where_its_past_stands():
    names = [play.name for play in faults.PLAYS]
    assert len(set(names)) == len(names)
    for play in faults.PLAYS:
        assert all(name.split(".")[0] == play.name for name in play.before)
        assert bool(play.before) == bool(play.source)


@pytest.mark.net
@pytest.mark.long
def test_a_member_is_killed_and_the_others_go_on(quick):
    gone_on, back = faults.run(quick(only="faults.kill"))
    assert (gone_on.metric, back.metric) == ("faults.kill", "faults.kill.back")
    assert gone_on.value > 0
    assert back.value > 0
