"""Verdicts from numbers over seeds: a claim holds, or fails, only beyond the tolerance."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.experiments.reproduce.claim import Rule
from farflock.experiments.reproduce.verdict import (
    NO,
    UNKNOWN,
    YES,
    Estimate,
    Finding,
    between,
    estimate,
    judge,
    rises,
    together,
)

numbers = st.floats(-1e3, 1e3, allow_nan=False)


def rule(kind, arms, **limits):
    return Rule(kind=kind, arms=arms, says="so", paper="1", **limits)


def word(kind, values, sweeps=None, **limits):
    arms = limits.pop("arms", list(values))
    return judge(rule(kind, arms, **limits), values, sweeps or {}).word


def test_an_estimate_is_the_mean_and_its_standard_error():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.error == pytest.approx(1 / math.sqrt(3))
    assert estimate([5.0]) == Estimate(5.0, math.inf)


@pytest.mark.parametrize(
    ("mean", "error", "low", "high", "said"),
    [
        (1.0, 0.1, None, 1.5, YES),
        (1.0, 0.1, None, 1.2, UNKNOWN),
        (1.0, 0.1, None, 0.8, UNKNOWN),
        (1.0, 0.1, None, 0.5, NO),
        (1.0, 0.1, 0.5, None, YES),
        (1.0, 0.1, 1.5, None, NO),
        (1.0, 0.0, 1.0, 1.0, YES),
        (1.0, 0.1, 0.5, 1.5, YES),
        (1.0, 0.3, 0.5, 1.5, UNKNOWN),
        (1.0, math.inf, 0.0, 2.0, UNKNOWN),
    ],
)
def test_limits_are_kept_or_broken_by_three_errors_or_it_cannot_be_told(
    mean, error, low, high, said
):
    assert between(Estimate(mean, error), low, high, 3.0) == said


@given(numbers, st.floats(0, 10), numbers, st.floats(0, 5))
def test_no_number_both_keeps_and_breaks_a_limit(mean, error, limit, tolerance):
    above, below = (
        between(Estimate(mean, error), *limits, tolerance)
        for limits in ((limit, None), (None, limit))
    )
    assert above != NO or below != NO
    if above == NO:
        assert below == YES


@given(st.lists(numbers, min_size=2, max_size=6), st.floats(0, 5), st.floats(0, 5))
def test_a_larger_tolerance_never_makes_a_verdict_surer(values, one, other):
    small, large = sorted((one, other))
    if rises(estimate(values), small) == UNKNOWN:
        assert rises(estimate(values), large) == UNKNOWN


def test_an_order_must_rise_at_each_step():
    assert word("ordering", {"a": [1.0, 1.1], "b": [2.0, 2.1], "c": [3.0, 3.1]}) == YES
    assert word("ordering", {"a": [1.0, 1.1], "b": [3.0, 3.1], "c": [2.0, 2.1]}) == NO
    assert word("ordering", {"a": [1.0, 1.1], "b": [2.0, 2.1], "c": [2.1, 2.0]}) == UNKNOWN


def test_equal_numbers_are_no_order():
    assert word("ordering", {"a": [1.0, 2.0], "b": [1.0, 2.0]}) == UNKNOWN


def test_differences_are_between_runs_of_the_same_seed():
    """The seeds differ by far more than the arms: only pairs can tell them apart."""
    assert word("ordering", {"a": [1.0, 5.0, 9.0], "b": [1.1, 5.11, 9.1]}) == YES
    assert word("ordering", {"a": [1.0, 5.0, 9.0], "b": [5.11, 9.1, 1.1]}) == UNKNOWN


def test_a_difference_is_the_first_less_the_second():
    values = {"a": [3.0, 3.01], "b": [1.0, 1.01]}
    assert word("within", values, low=1.9, high=2.1) == YES
    assert word("within", values, arms=["b", "a"], low=1.9, high=2.1) == NO


def test_a_ratio_is_of_the_first_to_the_second():
    values = {"a": [3.0, 3.0], "b": [1.5, 1.5]}
    assert word("ratio", values, low=1.9, high=2.1) == YES
    assert word("ratio", values, arms=["b", "a"], high=0.4) == NO
    assert word("ratio", {"a": [1.0, 1.0], "b": [0.0, 1.0]}, high=2) == UNKNOWN


def test_a_bound_is_of_one_arm():
    assert word("bound", {"a": [0.5, 0.51]}, high=1) == YES
    assert word("bound", {"a": [0.5, 0.51]}, low=1) == NO


def test_one_seed_says_nothing():
    assert word("bound", {"a": [0.5]}, high=1) == UNKNOWN
    assert word("ordering", {"a": [0.5], "b": [9.0]}) == UNKNOWN


def test_an_exact_number_has_no_error_and_is_judged_alone():
    assert estimate([2.5], exact=True) == Estimate(2.5, 0.0)
    assert Estimate(2.5, 0.0).text == "2.5"
    finding = judge(rule("bound", ["a"], high=1), {"a": [0.5]}, {}, exact=True)
    assert (finding.word, finding.ours) == (YES, "0.5")
    assert finding.reason.endswith("wanted at most 1"), "no errors are spoken of"
    assert judge(rule("bound", ["a"], high=1), {"a": [1.5]}, {}, exact=True).word == NO
    assert judge(rule("ordering", ["a", "b"]), {"a": [1.0], "b": [2.0]}, {}, exact=True).word == YES
    assert (
        judge(rule("ratio", ["a", "b"], low=3), {"a": [1.0], "b": [2.0]}, {}, exact=True).word == NO
    )


def test_an_exact_number_is_one():
    with pytest.raises(ValueError, match="unpack"):
        estimate([1.0, 2.0], exact=True)


def test_an_arm_that_diverged_says_nothing_and_is_named():
    finding = judge(rule("ordering", ["a", "b"]), {"a": [1.0, 1.1], "b": []}, {})
    assert finding.word == UNKNOWN
    assert "b diverged or has no loss" in finding.reason


@pytest.fixture
def grid():
    sweeps = {
        name: {value: f"{name}@{value:g}" for value in (1.0, 2.0, 3.0)} for name in ("few", "many")
    }

    def values(few, many):
        """Losses whose least lies, for each seed, at the named value."""
        best = {"few": few, "many": many}
        return {
            arm: [abs(value - chosen) for chosen in best[name]]
            for name, grid in sweeps.items()
            for value, arm in grid.items()
        }

    return sweeps, values


def test_a_best_value_that_rises_in_every_seed_does(grid):
    sweeps, values = grid
    assert word("optimum", values([1, 1, 1], [2, 2, 2]), sweeps, arms=["few", "many"]) == YES
    assert word("optimum", values([2, 2, 2], [1, 1, 1]), sweeps, arms=["few", "many"]) == NO
    assert word("optimum", values([2, 2, 2], [2, 2, 2]), sweeps, arms=["few", "many"]) == UNKNOWN
    assert word("optimum", values([1, 2, 3], [2, 3, 1]), sweeps, arms=["few", "many"]) == UNKNOWN


def test_a_best_value_at_the_edge_of_its_grid_is_said_to_be_one(grid):
    sweeps, values = grid
    finding = judge(rule("optimum", ["few", "many"]), values([2, 2], [3, 3]), sweeps)
    assert finding.reason.endswith("the best of many lies at the edge of its grid")


def test_values_that_diverged_are_left_out_of_a_sweep(grid):
    sweeps, values = grid
    left = values([1, 1], [2, 2]) | {"many@3": []}
    assert word("optimum", left, sweeps, arms=["few", "many"]) == YES
    assert word("optimum", left | {"many@2": []}, sweeps, arms=["few", "many"]) == UNKNOWN


@pytest.mark.parametrize(
    ("words", "whole"),
    [([YES, YES], YES), ([YES, UNKNOWN], UNKNOWN), ([YES, UNKNOWN, NO], NO), ([NO], NO)],
)
def test_every_rule_must_hold_and_one_that_fails_is_enough(words, whole):
    assert together([Finding(word, "", "") for word in words]) == whole
