"""A user's loop measures its pace and its waits, under the names that are everywhere."""

import pytest

from farflock.node.library.loop_measures import SAMPLES, LoopMeasures, RoundReport
from farflock.node.sinks.measures import NAMES


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def stepped(measures, clock, steps, waits_s):
    for _ in range(steps):
        clock.now_s += 1.0 - waits_s
        with measures.waiting():
            clock.now_s += waits_s
        measures.stepped(64)


def round_of(number, status):
    return {"stream": "delta", "round": number, "status": status, "peers": 2, "tokens": 9}


def test_names_are_those_of_a_node_without_what_the_program_knows_better(clock):
    measures = LoopMeasures(clock)
    stepped(measures, clock, 2, 0.25)
    found = measures.numbers(512, (30, 20), 2)
    known_better = ("time_s", "step", "loss")  # and a user's loop is not evaluated
    assert list(found) == [
        name for name in NAMES if name not in known_better and "evaluation" not in name
    ]
    assert (found["tokens"], found["sent_bytes"], found["received_bytes"]) == (512, 30, 20)
    assert (found["tokens_per_s"], found["busy_share"], found["peers"]) == (64, 0.75, 2)


def test_before_the_first_step_there_is_no_pace(clock):
    found = LoopMeasures(clock).numbers(0, (0, 0), 1)
    assert "tokens_per_s" not in found
    assert "busy_share" not in found


def test_pace_and_waits_are_those_of_the_last_steps(clock):
    measures = LoopMeasures(clock)
    stepped(measures, clock, SAMPLES, 0.0)
    stepped(measures, clock, SAMPLES, 0.5)
    assert measures.numbers(0, (0, 0), 1)["busy_share"] == pytest.approx(0.5)


def test_an_interrupted_wait_is_one_too(clock):
    measures = LoopMeasures(clock)
    with pytest.raises(KeyboardInterrupt), measures.waiting():
        clock.now_s += 3.0
        raise KeyboardInterrupt
    clock.now_s += 1.0
    measures.stepped(64)
    assert measures.numbers(0, (0, 0), 1)["busy_share"] == pytest.approx(0.25)


def test_rounds_are_counted_by_outcome_and_the_newest_is_known():
    measures = LoopMeasures()
    assert measures.last_round is None
    for number, status in enumerate(["ok", "partial", "ok", "failed"]):
        measures.report("round", round_of(number, status))
    measures.report("adopt", {"reason": "behind"})
    found = measures.numbers(0, (0, 0), 1)
    assert (found["rounds_ok"], found["rounds_partial"]) == (2, 1)
    assert (found["rounds_alone"], found["rounds_failed"]) == (0, 1)
    assert measures.last_round == RoundReport("delta", 3, "failed", 2)
