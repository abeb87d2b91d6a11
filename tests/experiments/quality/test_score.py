"""Shares, and what is chosen by them: on made-up losses, so that every number can be checked by
hand."""

import math
from statistics import stdev

import pytest

from farflock.experiments.quality.score import Final, best, edges, ranked, shares
from farflock.experiments.reproduce.verdict import estimate


def test_a_share_is_of_the_gain_of_its_own_seed():
    assert shares([2.4, 3.0], [2.0, 2.0], [2.1, 2.5]) == pytest.approx([0.75, 0.5])


def test_a_method_worse_than_none_has_a_negative_share_and_one_better_than_ddp_over_one():
    assert shares([2.4, 2.4], [2.0, 2.0], [2.6, 1.9]) == pytest.approx([-0.5, 1.25])


def test_the_error_is_that_of_the_paired_shares_not_of_the_losses():
    none, ddp = [2.4, 3.4, 4.4], [2.0, 3.0, 4.0]
    found = estimate(shares(none, ddp, [one + 0.1 for one in ddp]))
    assert found.mean == pytest.approx(0.75)
    assert found.error == pytest.approx(0, abs=1e-12)
    spread = shares(none, ddp, [2.1, 3.2, 4.1])
    assert estimate(spread).error == pytest.approx(stdev([0.75, 0.5, 0.75]) / math.sqrt(3))


@pytest.mark.parametrize(
    ("none", "ddp", "ours"),
    [
        ([2.0], [2.0], [2.0]),
        ([2.4, 1.9], [2.0, 2.0], [2.0, 2.0]),
        ([], [2.0], [2.1]),
        ([2.4], [2.0], []),
    ],
)
def test_without_a_gain_or_without_a_seed_there_is_no_share(none, ddp, ours):
    assert shares(none, ddp, ours) == []


def test_a_run_at_its_budget_counts_and_one_above_says_by_how_much(run_of):
    within, above = run_of("diloco.100", 2.0, sent=10.0), run_of("diloco.100", 2.0, sent=11.5)
    assert (within.counts, within.excess, within.saving) == (True, 0.0, 100.0)
    assert not above.counts
    assert above.excess == pytest.approx(0.15)


def test_the_same_bytes_are_too_many_at_a_smaller_budget(run_of):
    assert run_of("diloco.100", 2.0, sent=9.0).counts
    assert run_of("diloco.500", 2.0, sent=9.0).excess == pytest.approx(3.5)


def test_lines_have_no_budget_and_ddp_s_bytes_are_the_ring_s(run_of):
    assert run_of("ddp", 2.0).sent_bytes == 1000
    assert run_of("ddp", 2.0).saving == 1
    assert run_of("none", 2.0).saving == math.inf
    assert run_of("ddp", 2.0).counts
    assert not run_of("ddp", None).counts


def test_a_run_that_diverged_does_not_count_and_has_no_bytes(run_of):
    gone = run_of("diloco.100", None)
    assert (gone.counts, gone.saving, gone.excess, gone.loss) == (False, None, 0.0, math.inf)


def test_the_best_is_the_lowest_loss_among_those_that_count(run_of):
    runs = [
        run_of("a.100", 2.2),
        run_of("a.100", 2.1),
        run_of("a.100", 1.5, sent=10.1),
        run_of("a.100", None),
    ]
    assert best(runs) is runs[1]
    assert best(runs[2:]) is None


def test_methods_are_ranked_by_their_best_trial_and_those_without_one_are_left_out(scores):
    assert ranked(scores.screen, scores.at(100)) == ["fast.100", "slow.100"]
    assert scores.at(500) == []


def test_equal_losses_are_ranked_by_name(run_of):
    screen = {name: (run_of(name, 2.0),) for name in ("b.100", "a.100")}
    assert ranked(screen, screen) == ["a.100", "b.100"]


def test_a_grid_whose_best_is_inside_has_no_edges(run_of):
    runs = [
        run_of("ddp", abs(lr - 2) + abs(w - 0.2), lr=lr, warmup=w)
        for lr in (1, 2, 3)
        for w in (0.1, 0.2, 0.3)
    ]
    assert edges(runs) == []


@pytest.mark.parametrize(
    ("at", "found"), [((1, 0.2), ["lr"]), ((3, 0.3), ["lr", "warmup"]), ((2, 0.1), ["warmup"])]
)
def test_a_grid_whose_best_is_at_an_end_says_in_which_setting(run_of, at, found):
    runs = [
        run_of("ddp", abs(lr - at[0]) + abs(w - at[1]), lr=lr, warmup=w)
        for lr in (1, 2, 3)
        for w in (0.1, 0.2, 0.3)
    ]
    assert edges(runs) == found


def test_a_setting_with_one_value_has_no_edge_and_a_grid_that_diverged_none(run_of):
    assert (
        edges([run_of("ddp", 2.0, lr=1), run_of("ddp", 1.0, lr=2), run_of("ddp", 2.0, lr=3)]) == []
    )
    assert edges([run_of("ddp", None, lr=1), run_of("ddp", None, lr=2)]) == []


@pytest.mark.parametrize(("rate", "edge"), [(1e-3, True), (2e-3, False), (4e-3, True)])
def test_a_ladder_is_at_its_edge_at_either_end(run_of, rate, edge):
    ladder = tuple(run_of("a.100", 2.0, lr=one) for one in (2e-3, 4e-3, 1e-3))
    assert Final(ladder, (run_of("a.100", 1.0, lr=rate),)).at_edge is edge


def test_a_finalist_with_a_run_above_its_budget_has_no_losses_and_no_share(scores, run_of):
    runs = (run_of("fast.100", 2.1), run_of("fast.100", 2.2, 2, sent=10.5))
    finals = {**scores.finals, "fast.100": Final(runs[:1], runs)}
    changed = type(scores)(scores.screen, finals)
    assert changed.finals["fast.100"].losses == []
    assert changed.shares("fast.100") == []
    assert changed.shares("slow.100") == pytest.approx([0.5, 0.5])


def test_a_trial_s_share_is_beside_the_best_of_both_grids(scores):
    assert scores.screen_share(scores.screen["fast.100"][0]) == pytest.approx(0.75)
    assert scores.screen_share(scores.screen["fast.100"][1]) is None
