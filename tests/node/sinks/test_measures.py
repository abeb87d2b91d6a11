"""Every place shows the same measures under the same names."""

from typing import get_args, get_type_hints

import pytest
from worlds.measured import measured
from worlds.peers import node_status

from farflock.node.process.status import EvaluationStatus, measures_of
from farflock.node.sinks.measures import COUNTERS, MEANINGS, NAMES, OUTCOMES, numbers
from farflock.optimizers.method import Result


def status(**known):
    values = {"step": 120, "tokens": 61_440, "loss": 2.5, "members": ("me", "other")}
    return node_status(**values, sent_bytes=940, received_bytes=939, **known)


def test_each_measure_has_a_meaning_and_nothing_else_has_one():
    assert tuple(MEANINGS) == NAMES


def test_rounds_are_counted_by_every_outcome_that_there_is():
    assert get_args(get_type_hints(Result)["status"]) == OUTCOMES
    assert {f"rounds_{outcome}" for outcome in OUTCOMES} < set(COUNTERS)


def test_a_status_is_measured():
    found = measures_of(
        status(rounds={"ok": 3, "failed": 1}, tokens_per_s=512.0, busy_share=0.5), 5.0
    )
    assert (found.time_s, found.step, found.loss, found.tokens) == (5.0, 120, 2.5, 61_440)
    assert (found.sent_bytes, found.received_bytes, found.peers) == (940, 939, 2)
    assert (found.tokens_per_s, found.busy_share) == (512.0, 0.5)
    assert (found.rounds_ok, found.rounds_partial) == (3, 0)
    assert (found.rounds_alone, found.rounds_failed) == (0, 1)


def test_an_evaluation_is_measured_until_the_next_one():
    value = EvaluationStatus(40, "other", 2.5, 0.01, 3.6, 512)
    found = measures_of(status(evaluation=value), 5.0)
    assert (found.evaluation_round, found.evaluation_loss) == (40, 2.5)
    assert (found.evaluation_error, found.evaluation_bits) == (0.01, 3.6)
    assert measures_of(status(), 5.0).evaluation_round is None


def test_what_is_not_known_is_not_shown():
    assert set(numbers(measured())) == set(NAMES) - {"time_s", "step"}
    known = numbers(measured(loss=None, tokens_per_s=None, peers=0))
    assert set(NAMES) - set(known) == {"time_s", "step", "loss", "tokens_per_s"}
    assert known["peers"] == 0


@pytest.mark.parametrize("name", sorted(MEANINGS))
def test_a_meaning_is_a_sentence(name):
    assert MEANINGS[name].endswith(".")
