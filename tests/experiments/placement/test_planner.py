"""The planner: the optimum where all layouts can be tried, never above the genetic baseline,
and the same plan again."""

import itertools
import math

import numpy as np
import pytest

from farflock.experiments.placement import genetic, planner
from farflock.experiments.placement.layout import MAX_STAGES, Costs, LinkCosts, StepTraffic
from farflock.experiments.placement.planner import balanced, partition_count, partitions, plan


def scattered(nodes, seed):
    chance = np.random.default_rng(seed)
    links = LinkCosts.of(
        chance.uniform(0.001, 0.3, (nodes, nodes)), chance.uniform(1e5, 1e8, (nodes, nodes))
    )
    return Costs(links, StepTraffic(*chance.uniform(1e5, 1e7, 2)))


def clustered(nodes, seed, places=3):
    """Near and fast inside a place, far and slow between them; nodes are dealt to places by
    chance."""
    chance = np.random.default_rng(seed)
    at, spots = chance.integers(0, places, nodes), chance.random((places, 2))
    far = np.linalg.norm(spots[at][:, None] - spots[at], axis=2)
    rate = np.where(at[:, None] == at, 1e8, 1e6) * chance.uniform(0.8, 1.2, (nodes, nodes))
    return Costs(LinkCosts.of(0.002 + 0.2 * far, rate), StepTraffic(*chance.uniform(1e6, 1e7, 2)))


def exhaustive(costs, stages):
    """The optimum, from all ways to put nodes in a row."""
    size = costs.nodes // stages
    rows = (row for row in itertools.permutations(range(costs.nodes)) if row[0] == 0)
    seen = {
        frozenset(frozenset(row[at : at + size]) for at in range(0, costs.nodes, size))
        for row in rows
    }
    return min(costs.layout([tuple(stage) for stage in partition]).seconds for partition in seen)


@pytest.fixture(scope="module")
def found_by_permutation():
    """Each case's optimum, worked out once."""
    cases = {}
    for kind, stages in itertools.product((scattered, clustered), (2, 4)):
        for seed in range(2):
            cases[kind, stages, seed] = exhaustive(kind(8, seed), stages)
    return cases


def optimum(costs, sizes):
    return min(costs.layout(stages).seconds for stages in partitions(sizes))


def test_it_is_optimal_where_all_can_be_tried(found_by_permutation):
    for (kind, stages, seed), best in found_by_permutation.items():
        assert plan(kind(8, seed), balanced(8, stages), seed).seconds == pytest.approx(
            best, rel=1e-12
        )


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("kind", [scattered, clustered])
def test_its_search_alone_finds_the_optimum_too(kind, stages, monkeypatch):
    """As if there were too many to try."""
    monkeypatch.setattr(planner, "partition_count", lambda sizes: math.inf)
    for seed in range(3):
        costs = kind(8, 100 + seed)
        found = plan(costs, balanced(8, stages), seed)
        assert found.seconds == pytest.approx(optimum(costs, balanced(8, stages)), rel=1e-9)


@pytest.mark.parametrize(
    ("kind", "gain", "work"),
    [
        (scattered, "circular", planner.WORK),
        (clustered, "circular", planner.WORK),
        (clustered, "kernighan-lin", planner.WORK),
        # a better local search than DT-FM's, where nothing is near anything
        pytest.param(scattered, "kernighan-lin", 4 * planner.WORK, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    ("nodes", "stages"), [(16, 4), pytest.param(24, 4, marks=pytest.mark.ci_more)]
)
def test_it_is_never_worse_than_the_genetic_baseline(kind, nodes, stages, gain, work):
    for seed in range(2):
        costs = kind(nodes, seed)
        ours = plan(costs, balanced(nodes, stages), seed, work)
        theirs = genetic.search(
            costs, balanced(nodes, stages), seed, genetic.Setting(gain, trials=60)
        )
        assert ours.seconds <= theirs.seconds * (1 + 1e-9)


@pytest.mark.parametrize("work", [1, 50, 1500])
def test_the_same_seed_gives_the_same_plan(work):
    costs = scattered(20, 1)
    assert plan(costs, balanced(20, 5), 7, work) == plan(costs, balanced(20, 5), 7, work)


def test_another_seed_may_give_another():
    costs = scattered(20, 1)
    assert len({plan(costs, balanced(20, 5), seed, work=1).stages for seed in range(5)}) > 1


@pytest.mark.parametrize(
    ("nodes", "sizes"),
    [(20, (4,) * 5), (14, (5, 3, 3, 3)), (7, (7,)), (9, (1,) * 9), (11, (6, 3, 2))],
)
@pytest.mark.parametrize("work", [1, 300])
def test_every_node_has_one_place_and_the_cost_is_the_layouts(nodes, sizes, work):
    costs = clustered(nodes, 5)
    found = plan(costs, sizes, 0, work)
    assert sorted(map(len, found.stages)) == sorted(sizes)
    assert sorted(itertools.chain(*found.stages)) == list(range(nodes))
    assert found.seconds == pytest.approx(costs.layout(found.stages).seconds)
    assert found.pipeline_s == pytest.approx(
        sum(itertools.starmap(costs.match, itertools.pairwise(found.stages)))
    )


def test_more_work_ends_no_worse_than_its_starts():
    for seed in range(5):
        costs = clustered(24, seed)
        start = plan(costs, balanced(24, 6), seed, work=1)
        assert plan(costs, balanced(24, 6), seed, work=1500).seconds <= start.seconds


def test_the_work_is_a_bound(monkeypatch):
    """On whole layouts: 64 nodes in 8 stages cost 8 units each."""
    looked = []
    whole = Costs.layout
    monkeypatch.setattr(
        Costs, "layout", lambda costs, stages: looked.append(1) or whole(costs, stages)
    )
    plan(scattered(64, 0), balanced(64, 8), 0, work=400)
    assert len(looked) <= 6 + 400 // 8


def test_near_nodes_share_a_stage_if_gradients_are_sent_and_a_pipeline_if_they_are_not():
    at = np.arange(64) % 8
    rate = np.where(at[:, None] == at, 1e9, 1e6)
    links = LinkCosts.of(np.full((64, 64), 0.01), rate)
    gradients = plan(Costs(links, StepTraffic(1e8, 1e3)), balanced(64, 8), 0)
    assert all(len({node % 8 for node in stage}) == 1 for stage in gradients.stages)
    activations = plan(Costs(links, StepTraffic(1e3, 1e8)), balanced(64, 8), 0)
    assert all(len({node % 8 for node in stage}) == 8 for stage in activations.stages)


def test_links_that_cost_nothing_are_planned_too():
    links = LinkCosts.of(np.zeros((16, 16)), np.ones((16, 16)))
    assert plan(Costs(links, StepTraffic(0, 0)), balanced(16, 4), 0, work=200).seconds == 0


@pytest.mark.parametrize(
    "sizes", [(2, 2), (4, 4), (2, 2, 2, 2), (1, 2, 3), (3, 1, 1), (5,), (2, 2, 3)]
)
def test_partitions_are_all_there_are_and_each_once(sizes):
    found = [frozenset(map(frozenset, stages)) for stages in partitions(sizes)]
    nodes = range(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    expected = {
        frozenset(frozenset(row[end - size : end]) for size, end in zip(sizes, ends, strict=True))
        for row in itertools.permutations(nodes)
    }
    assert len(found) == len(set(found)) == partition_count(sizes)
    assert set(found) == expected


@pytest.mark.parametrize(
    ("nodes", "stages", "sizes"),
    [(8, 4, (2,) * 4), (10, 4, (3, 3, 2, 2)), (3, 3, (1,) * 3), (5, 1, (5,))],
)
def test_balanced_stages_differ_by_one_at_most(nodes, stages, sizes):
    assert balanced(nodes, stages) == sizes


@pytest.mark.parametrize(("nodes", "stages"), [(3, 4), (4, 0), (0, 1), (5, -1)])
def test_a_stage_without_a_node_is_refused(nodes, stages):
    with pytest.raises(ValueError, match=f"{nodes} nodes cannot serve {stages} stages"):
        balanced(nodes, stages)


@pytest.mark.parametrize(
    ("sizes", "work", "reason"),
    [
        ((3, 3), 100, r"\(3, 3\) nodes need 6, but there are 8; give sizes"),
        ((8, 0), 100, "give each stage at least one node"),
        ((), 100, f"cannot plan 0 stages; give 1 to {MAX_STAGES}"),
        ((1,) * 17, 100, "17 stages"),
        ((4, 4), 0, "give at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_reason(sizes, work, reason):
    with pytest.raises(ValueError, match=reason):
        plan(scattered(8, 0), sizes, 0, work)
