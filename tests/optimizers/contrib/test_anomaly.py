"""Judging norms: which peers are rejected, what the others weigh, and the statistics behind it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.optimizers.contrib.anomaly import (
    HUGE,
    UNIT,
    AnomalyFilter,
)

FRESH = [0.0, 0.0, 0.0, 0.0]
norms_of_peers = st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=8)


def judge(temperature=1.0, relative=False, threshold=3.0, warmup=0, alpha=0.02, step_ratio=0.0):
    return AnomalyFilter(temperature, relative, threshold, warmup, alpha, step_ratio)


def nobody(norms):
    return [False] * len(norms)


def shares(made):
    return [weight / UNIT for weight in made]


# weights


@pytest.mark.parametrize("peers", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("norm", [0.0, 0.3, 1e6])
def test_equal_norms_weigh_one_over_the_number_of_peers(peers, norm):
    made = judge().weights([norm] * peers, [3.0] * peers, [False] * peers)
    assert len(set(made)) == 1
    assert made[0] == round(UNIT / peers)


def test_weights_are_the_softmax_of_negative_norms():
    norms = [0.3, 1.1, 2.0]
    for temperature in (0.5, 1.0, 4.0):
        expected = np.exp(-np.array(norms) / temperature)
        made = judge(temperature).weights(norms, [1.0] * 3, nobody(norms))
        np.testing.assert_allclose(shares(made), expected / expected.sum(), rtol=1e-8)


def test_relative_weights_do_not_depend_on_the_scale_of_norms():
    norms = [0.3, 1.1, 2.0]
    made = [
        judge(relative=True).weights([x * scale for x in norms], [1.0] * 3, nobody(norms))
        for scale in (1, 1024)
    ]
    assert made[0] == made[1]
    assert made[0] != judge().weights(norms, [1.0] * 3, nobody(norms))


@pytest.mark.parametrize(
    "norms", [[1e6, 1e6 + 1], [1e6, 0.0], [HUGE / 2, 1.0, HUGE / 2], [0.0, 1e-30]]
)
def test_norms_of_any_size_have_finite_weights_with_a_sum_of_one(norms):
    made = judge().weights(norms, [1.0] * len(norms), nobody(norms))
    assert abs(sum(made) - UNIT) <= len(norms)
    assert min(made) >= 0
    assert max(made) == made[norms.index(min(norms))]


def test_the_largest_norms_difference_is_what_counts_even_at_a_million():
    near, far = (
        judge().weights([base, base + 1], [1.0, 1.0], [False, False]) for base in (1.0, 1e6)
    )
    assert near == far


def test_the_rejected_weigh_nothing_and_the_others_share():
    made = judge().weights([1.0, 50.0, 1.0], [1.0] * 3, [False, True, False])
    assert made == [UNIT // 2, 0, UNIT // 2]
    assert judge().weights([9.0, 9.0], [1.0, 1.0], [True, True]) == [0, 0]


def test_without_temperature_all_that_are_left_weigh_alike():
    assert judge(None).weights([0.1, 5.0, 900.0], [1.0] * 3, [False, False, True]) == [
        UNIT // 2,
        UNIT // 2,
        0,
    ]


def test_a_part_of_the_weight_goes_by_the_number_of_steps():
    made = judge(step_ratio=0.5).weights([1.0, 1.0, 1.0], [10.0, 30.0, 99.0], [False, False, True])
    assert shares(made) == pytest.approx([0.5 * 0.5 + 0.5 * 0.25, 0.5 * 0.5 + 0.5 * 0.75, 0.0])
    assert shares(judge(step_ratio=1.0).weights([1.0, 9.0], [1.0, 3.0], [False, False])) == [
        0.25,
        0.75,
    ]
    assert shares(judge(step_ratio=1.0).weights([1.0, 1.0], [0.0, 0.0], [False, False])) == [
        0.5,
        0.5,
    ]


@settings(deadline=None)
@given(norms=norms_of_peers, data=st.data())
def test_permuting_peers_permutes_weights_and_leaves_the_statistics_bit_for_bit(norms, data):
    order = data.draw(st.permutations(range(len(norms))))
    steps = [float(number + 1) for number in range(len(norms))]
    stats, one = [2.0, 1.0, 0.1, 0.3], judge(step_ratio=0.25)
    rejected, after = one.anomalies(norms, stats, 9)
    moved = [[values[at] for at in order] for values in (norms, steps)]
    rejected_moved, after_moved = one.anomalies(moved[0], stats, 9)
    assert after_moved == after
    assert rejected_moved == [rejected[at] for at in order]
    made, made_moved = one.weights(norms, steps, rejected), one.weights(*moved, rejected_moved)
    assert made_moved == [made[at] for at in order]


# anomalies


def test_the_statistics_begin_at_the_first_norms_and_not_at_zero():
    assert judge().anomalies([2.0, 4.0], FRESH, 0) == ([False, False], [3.0, 1.0, 0.0, 0.0])


def test_statistics_follow_the_recursion_of_the_specification():
    mean, variance, alpha = 5.0, 4.0, 0.25
    _, after = judge(alpha=alpha, warmup=99).anomalies([7.0], [mean, variance, 0.0, 0.0], 1)
    d = 7.0 - mean
    mean += alpha * d
    assert after[:2] == [mean, (1 - alpha) * (variance + alpha * d * (7.0 - mean))]


@pytest.mark.parametrize(("norm", "out"), [(10.9, False), (11.1, True), (0.0, False)])
def test_a_norm_is_rejected_beyond_the_threshold_and_never_for_being_small(norm, out):
    assert judge().anomalies([5.0, norm], [5.0, 4.0, 0.0, 0.0], 1)[0] == [False, out]


def test_a_wide_spread_of_recent_scores_widens_the_threshold():
    norm = 5.0 + 2.0 * 4.0  # 4 standard deviations
    assert judge().anomalies([norm], [5.0, 4.0, 0.0, 1.0], 1)[0] == [True]
    assert judge().anomalies([norm], [5.0, 4.0, 0.0, 2.0], 1)[0] == [False]


def test_a_score_is_taken_before_its_norm_enters():
    """A norm that entered first would pull the mean towards itself and widen the variance: it would
    mask itself."""
    norm, stats = 5.0 + 2.0 * 3.001, [5.0, 4.0, 0.0, 0.0]
    rejected, after = judge(alpha=0.5).anomalies([norm], stats, 1)
    assert rejected == [True]
    assert (norm - after[0]) / math.sqrt(after[1]) < 3


def test_no_peer_is_rejected_during_the_warm_up_or_without_threshold():
    stats = [5.0, 4.0, 0.0, 0.0]
    assert judge(warmup=3).anomalies([1e5], stats, 2)[0] == [False]
    assert judge(warmup=3).anomalies([1e5], stats, 3)[0] == [True]
    assert judge(threshold=None).anomalies([1e5], stats, 9)[0] == [False]


@pytest.mark.parametrize("seen", [0, 5])
def test_what_is_no_norm_at_all_is_rejected_always_and_enters_nothing(seen):
    stats = [5.0, 4.0, 0.2, 0.5] if seen else FRESH
    rejected, after = judge(warmup=9).anomalies([HUGE, 5.5], stats, seen)
    assert rejected == [True, False]
    assert after == judge(warmup=9).anomalies([5.5], stats, seen)[1]
    assert judge(warmup=9).anomalies([HUGE, HUGE], stats, seen) == ([True, True], stats)


def test_one_outlier_does_not_open_the_door_to_the_next():
    stats = [5.0, 0.01, 0.0, 0.0]
    for outlier in (1e9, 100.0, 10.0):
        rejected, stats = judge().anomalies([5.0, 5.1, 4.9, outlier], stats, 1)
        assert rejected == [False, False, False, True]


def test_a_lasting_change_gets_in_after_a_while():
    stats, rounds = [5.0, 0.01, 0.0, 0.0], 0
    while judge().anomalies([20.0, 20.1], stats, 1)[0] == [True, True]:
        _, stats = judge().anomalies([20.0, 20.1], stats, 1)
        rounds += 1
        assert rounds < 200
    assert rounds > 5


@settings(deadline=None)
@given(rounds=st.lists(norms_of_peers, min_size=1, max_size=30))
def test_statistics_stay_finite_and_variances_positive_whatever_comes(rounds):
    stats = FRESH
    for seen, norms in enumerate(rounds):
        _, stats = judge(warmup=2, alpha=0.5).anomalies(norms, stats, seen)
        kept = torch.tensor(stats, dtype=torch.float32)
        assert bool(torch.isfinite(kept).all())
        assert min(kept[1], kept[3]) >= 0
        stats = kept.tolist()


# norms and layers
