"""The study of syncs: its models where delays are known, its distribution, and that the product's
exchanges are among all their members."""

import math
import statistics

import pytest

from farflock.experiments.pipelines import noloco_sync as study
from farflock.experiments.pipelines.noloco_sync import (
    DelayLaw,
    Size,
    exchange_s,
    modelled,
    ring_s,
    tree_s,
)
from farflock.node.errors import Failure

SHORT = Size(few=2, many=4, rounds=1, models=4, seeds=[1])


@pytest.mark.parametrize(("count", "hops"), [(1, 0), (2, 2), (16, 8), (64, 12)])
def test_where_all_delays_are_equal_a_tree_takes_twice_the_logarithm_of_them(count, hops):
    assert tree_s(count, lambda: 1.0) == hops


@pytest.mark.parametrize(("count", "hops"), [(2, 2), (5, 8), (64, 126)])
def test_where_all_delays_are_equal_a_ring_takes_twice_as_many_as_there_are_others(count, hops):
    assert ring_s(count, lambda: 1.0) == hops


def test_a_tree_waits_for_the_later_ones():
    """Up to 0 and to 2, from 2 to 0; then down to 2, to 1 and to 3."""
    delays = iter([1.0, 4.0, 2.0, 0.5, 3.0, 0.25])
    assert tree_s(4, lambda: next(delays)) == 4.0 + 2.0 + 3.0


def test_a_tree_of_three_peers_is_refused():
    with pytest.raises(ValueError, match="binomial tree of 3 peers"):
        tree_s(3, lambda: 1.0)


def test_delays_are_log_normal_around_their_median():
    law = DelayLaw("1", 0.7)
    logs = [math.log(law.uniform(0.0, 0.05)) for _ in range(4000)]
    assert statistics.fmean(logs) == pytest.approx(math.log(0.05), abs=0.06)
    assert statistics.stdev(logs) == pytest.approx(0.7, abs=0.04)


def test_without_a_spread_an_exchange_takes_whole_delays_the_same_in_every_run():
    size = Size(few=2, many=4, rounds=2, median_s=0.05, sigma=0.0, models=1, seeds=[1])
    took_s = {name: exchange_s(size, name, 4, 1) for name in study.METHODS}
    assert modelled(size, 4, 1)["pair"] == pytest.approx(0.1)
    assert took_s["noloco"] < took_s["diloco"]
    assert took_s["noloco"] >= 0.05
    assert exchange_s(size, "noloco", 4, 1) == took_s["noloco"]


def test_an_exchange_that_lacks_a_member_is_no_number_but_a_failure(monkeypatch):
    monkeypatch.setattr(study, "DEADLINE_S", 1e-3)
    with pytest.raises(Failure, match="exchanges of 1 were among all 4 members"):
        exchange_s(SHORT, "diloco", 4, 1)


def test_rows_are_seconds_and_ratios_of_few_and_many_peers(table, monkeypatch):
    monkeypatch.setattr(
        study,
        "exchange_s",
        lambda size, name, count, seed: {"noloco": 0.5, "diloco": 0.25 * count}[name],
    )
    found = table("noloco-sync", few=2, many=8, rounds=1, models=1, sigma=0.0, seeds=[1, 2])
    assert found["DiLoCo's round over NoLoCo's pair, few peers"] == [1.0, 1.0]
    assert found["DiLoCo's round over NoLoCo's pair, many peers"] == [4.0, 4.0]
    assert found["tree over pair, modelled, many peers"] == pytest.approx([3.0, 3.0])
    assert found["a ring, modelled, many peers, s"] == pytest.approx([0.7, 0.7])
