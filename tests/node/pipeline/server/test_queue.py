"""A server's order of work: the kinds in turn, each in order, and none starves."""

import random

import pytest

from farflock.node.pipeline.server.queue import TURNS, StageQueue


def filled(forward, backward, measured=0, room=8, together=1):
    queue = StageQueue(room, together)
    for number in range(forward):
        queue.put("forward", f"f{number}")
    for number in range(backward):
        queue.put("backward", f"b{number}")
    for number in range(measured):
        queue.put("measure", f"m{number}")
    return queue


def drained(queue):
    taken = []
    while jobs := queue.take():
        taken.append(jobs)
    return taken


def test_the_kinds_take_turns_a_backward_pass_first_and_each_in_its_order():
    assert drained(filled(2, 2)) == [["b0"], ["f0"], ["b1"], ["f1"]]
    assert drained(filled(1, 3)) == [["b0"], ["f0"], ["b1"], ["b2"]]


def test_forward_passes_are_taken_several_at_once_where_no_backward_one_waits():
    assert drained(filled(7, 2, together=3)) == [
        ["b0"],
        ["f0"],
        ["b1"],
        ["f1", "f2", "f3"],
        ["f4", "f5", "f6"],
    ]


def test_a_crowd_of_one_kind_does_not_hold_up_the_other():
    queue, kinds = filled(1, 8), []
    for number in range(8):
        (job,) = queue.take()
        kinds.append(job[0])
        if job[0] == "f":
            queue.put("forward", f"f{number}")
    assert kinds == ["b", "f"] * 4


def test_a_backward_pass_that_comes_meanwhile_is_next():
    queue = filled(2, 0)
    assert queue.take() == ["f0"]
    queue.put("backward", "late")
    assert drained(queue) == [["late"], ["f1"]]


@pytest.mark.parametrize("kind", TURNS)
def test_each_kind_has_room_of_its_own(kind):
    queue = StageQueue(3)
    for number in range(3):
        queue.put(kind, number)
    assert [each for each in TURNS if queue.has_room(each)] == [x for x in TURNS if x != kind]
    with pytest.raises(AssertionError, match="admitted to a full queue"):
        queue.put(kind, "one too many")
    queue.put(next(each for each in TURNS if each != kind), "another kind")
    assert len(queue) == 4


def test_an_empty_queue_gives_nothing_and_says_so():
    queue = filled(0, 0)
    assert queue.take() == []
    assert len(queue) == 0


def test_whatever_happens_nothing_is_lost_doubled_or_overtaken():
    for seed in range(50):
        chance, queue, put, taken = random.Random(seed), StageQueue(5, 1 + seed % 4), [], []
        for number in range(100):
            kind = chance.choice(TURNS)
            if queue.has_room(kind):
                queue.put(kind, (kind, number))
                put.append((kind, number))
            if chance.random() < 0.5:
                taken += queue.take()
        taken += [job for jobs in drained(queue) for job in jobs]
        assert sorted(taken) == sorted(put)
        for kind in TURNS:
            assert [job for job in taken if job[0] is kind] == [
                job for job in put if job[0] is kind
            ]
