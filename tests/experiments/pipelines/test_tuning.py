"""Arms are judged at the rate that is best for them over all seeds."""

import math

import pytest

from farflock.experiments.pipelines.tuning import tuned
from farflock.node.errors import Failure

LOSSES = {"a": {1.0: [2.0, 4.0], 3.0: [1.0, math.inf]}, "b": {1.0: [5.0, 5.0], 3.0: [4.0, 5.0]}}


def runs(losses):
    return {name: lambda rate, seed, own=own: own[rate][seed] for name, own in losses.items()}


def test_an_arm_is_judged_at_its_best_rate_over_all_seeds():
    told = []
    rates, losses = tuned(runs(LOSSES), [1.0, 3.0], [0, 1], told.append)
    assert rates == {"a": 1.0, "b": 3.0}
    assert losses == {"a": [2.0, 4.0], "b": [4.0, 5.0]}
    assert told == [done / 8 for done in range(1, 9)]


def test_an_arm_that_diverges_at_every_rate_is_a_failure():
    with pytest.raises(Failure, match="a: every rate diverges"):
        tuned(runs({"a": {3.0: [1.0, math.inf]}}), [3.0], [0, 1], lambda share: None)
