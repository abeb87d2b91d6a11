"""The planner's numbers: worst cases are the worst, each baseline has its own line,
and the cases are the papers'."""

import math

import pytest

from farflock.experiments.bench import planner
from farflock.experiments.placement import cases as networks
from farflock.experiments.placement import genetic
from farflock.experiments.placement.layout import Costs, Layout
from farflock.experiments.placement.planner import balanced

METRICS = [
    "planner.seconds",
    "planner.over_optimum",
    "planner.over_genetic",
    "planner.over_kernighan_lin",
]


def test_all_metrics_are_there_and_sane(quick):
    took, over_optimum, *over_genetic = lines = list(planner.run(quick()))
    assert [line.metric for line in lines] == METRICS
    assert 0 < took.value < math.inf
    assert (took.n, took.ratio) == (2 * 3, None)
    assert over_optimum.value == over_optimum.ratio == 1.0
    assert over_optimum.n == 6
    assert all(0 < line.ratio <= 1.1 for line in over_genetic)


@pytest.mark.parametrize("metric", METRICS)
def test_only_what_was_asked_for_is_run(quick, metric):
    assert [line.metric for line in planner.run(quick(metric))] == [metric]


def test_the_time_is_the_median_and_the_note_has_the_longest(monkeypatch):
    taken = iter([1.0, 9.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    monkeypatch.setattr(networks, "plan", lambda *arguments, **options: None)
    monkeypatch.setattr(planner, "seconds", lambda work, clock: next(taken))
    metric = planner.planner_seconds(planner.QUICK, 3)
    assert (metric.value, metric.n) == (5.0, 9)
    assert "worldwide 2.00 (at most 9.00)" in metric.note


def test_over_the_optimum_is_the_worst_case(monkeypatch):
    whole = planner.plan

    def worse(costs, sizes, seed, **options):
        layout = whole(costs, sizes, seed)
        factor = 1.5 if seed == 1 and not options else 1.0
        return Layout(layout.stages, layout.data_parallel_s * factor, layout.pipeline_s * factor)

    monkeypatch.setattr(planner, "plan", worse)
    metric = planner.over_optimum(planner.QUICK)
    assert metric.value == metric.ratio == pytest.approx(1.5)
    assert "misses 0 optima, at worst 1.0000" in metric.note


def test_over_a_baseline_is_the_worst_case_of_its_own_search(monkeypatch):
    theirs = {"circular": 4.0, "kernighan-lin": 2.0}
    monkeypatch.setattr(
        genetic,
        "search",
        lambda costs, sizes, seed, setting: Layout((), theirs[setting.gain] - 1.0, 1.0),
    )
    for (name, gain), ratio in zip(planner.BASELINES.items(), (0.75, 1.5), strict=True):
        ours = iter([1.0, 3.0, 1.0])
        monkeypatch.setattr(
            networks, "plan", lambda *arguments, ours=ours: Layout((), next(ours), 0.0)
        )
        metric = planner.over_genetic(planner.QUICK, name, gain)
        assert (metric.metric, metric.value, metric.yardstick, metric.ratio) == (
            name,
            1.0,
            theirs[gain],
            ratio,
        )
        assert f"gcp 3 s against {theirs[gain]:.0f} s" in metric.note


def test_the_optimum_is_the_least_of_all_partitions():
    case = networks.drawn(4, 0)
    costs = Costs(case.links, case.traffic)
    by_hand = [
        costs.layout(stages).seconds
        for stages in ([(0, 1), (2, 3)], [(0, 2), (1, 3)], [(0, 3), (1, 2)])
    ]
    assert planner.optimum(costs, balanced(4, 2)) == min(by_hand)


def test_the_worldwide_case_has_eight_machines_in_each_city():
    worldwide = networks.cases(64)[0].links
    assert worldwide.latency_s[0, 8] == 0.005  # both in Oregon
    assert worldwide.latency_s[0, 1] == 0.067  # Virginia
    assert [len(case.links) for case in networks.cases(64)] == [64, 64, 64]


def test_the_workload_is_gpt3_xls():
    assert networks.GPT3_XL.gradient_bytes == 650e6
    assert networks.GPT3_XL.activation_bytes == pytest.approx(512e6)


def test_cases_by_chance_are_the_same_again():
    assert (networks.drawn(8, 3).links.bandwidth == networks.drawn(8, 3).links.bandwidth).all()
    assert (networks.drawn(8, 3).links.bandwidth != networks.drawn(8, 4).links.bandwidth).any()
