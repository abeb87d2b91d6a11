"""DT-FM's cost model against twins that try everything: all matchings by permutation, all orders,
every sum by hand."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.experiments.placement.layout import (
    MAX_STAGES,
    Costs,
    LinkCosts,
    StepTraffic,
    bottleneck,
    cheapest_order,
)

TRAFFIC = StepTraffic(gradient_bytes=6e6, activation_bytes=2e6)


def links(nodes, seed):
    """Both directions drawn apart."""
    chance = np.random.default_rng(seed)
    return LinkCosts.of(
        chance.uniform(0.001, 0.3, (nodes, nodes)), chance.uniform(1e5, 1e8, (nodes, nodes))
    )


def twin_data_parallel(measured, traffic, stage):
    """Equation 1, literally."""

    def exchange(d, e):
        return 2 * (
            measured.latency_s[d, e]
            + traffic.gradient_bytes / (len(stage) * measured.bandwidth[d, e])
        )

    return max(sum(exchange(d, e) for e in stage if e != d) for d in stage)


def twin_match(measured, traffic, one, other):
    """Equation 2 over all perfect matchings."""
    return min(
        max(
            2 * (measured.latency_s[d, e] + traffic.activation_bytes / measured.bandwidth[d, e])
            for d, e in zip(one, partners, strict=True)
        )
        for partners in itertools.permutations(other)
    )


def twin_order(weights):
    """Equation 3 over all orders."""
    return min(
        sum(weights[a][b] for a, b in itertools.pairwise(order))
        for order in itertools.permutations(range(len(weights)))
    )


def drawn_stages(nodes, stages, seed):
    shuffled = random.Random(seed).sample(range(nodes), nodes)
    return [tuple(shuffled[stage::stages]) for stage in range(stages)]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("nodes", "stages"), [(8, 4), (8, 2), (12, 3), (5, 5), (6, 1)])
def test_a_layouts_cost_is_that_of_the_four_equations(nodes, stages, seed):
    measured, partition = links(nodes, seed), drawn_stages(nodes, stages, seed)
    weights = [
        [twin_match(measured, TRAFFIC, one, other) if one != other else 0 for other in partition]
        for one in partition
    ]
    layout = Costs(measured, TRAFFIC).layout(partition)
    assert layout.data_parallel_s == pytest.approx(
        max(twin_data_parallel(measured, TRAFFIC, stage) for stage in partition)
    )
    assert layout.pipeline_s == pytest.approx(twin_order(weights))
    assert layout.seconds == layout.data_parallel_s + layout.pipeline_s


@pytest.mark.parametrize("seed", range(5))
def test_its_stages_come_in_an_order_that_costs_this(seed):
    partition = drawn_stages(15, 5, seed)
    costs = Costs(links(15, seed), TRAFFIC)
    layout = costs.layout(partition)
    assert sorted(layout.stages) == sorted(tuple(sorted(stage)) for stage in partition)
    assert sum(itertools.starmap(costs.match, itertools.pairwise(layout.stages))) == pytest.approx(
        layout.pipeline_s
    )


def test_two_nodes_by_hand():
    """Latencies 10 and 30 ms, rates 1 and 3 MB/s: symmetrised 20 ms and 2 MB/s."""
    measured = LinkCosts.of([[0, 0.01], [0.03, 0]], [[1, 1e6], [3e6, 1]])
    costs = Costs(measured, TRAFFIC)
    assert costs.layout([(0, 1)]).seconds == pytest.approx(2 * (0.02 + 6e6 / 2 / 2e6))
    assert costs.layout([(0,), (1,)]).seconds == pytest.approx(2 * (0.02 + 2e6 / 2e6))


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 6), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
def test_a_bottleneck_matching_is_the_best_of_all(rows):
    smallest, columns = bottleneck(rows)
    assert sorted(columns) == list(range(len(rows)))
    assert max(row[column] for row, column in zip(rows, columns, strict=True)) == smallest
    assert smallest == min(
        max(row[c] for row, c in zip(rows, p, strict=True))
        for p in itertools.permutations(range(len(rows)))
    )


@pytest.mark.parametrize("seed", range(20))
def test_rows_may_be_fewer_than_columns(seed):
    rows = np.random.default_rng(seed).integers(0, 9, (3, 5)).tolist()
    smallest, columns = bottleneck(rows)
    assert len(set(columns)) == 3
    assert smallest == min(
        max(row[c] for row, c in zip(rows, p, strict=True))
        for p in itertools.permutations(range(5), 3)
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_bottleneck_of_large_stages_is_what_a_solver_of_sums_finds_by_thresholds(seed):
    linear_sum_assignment = pytest.importorskip("scipy.optimize").linear_sum_assignment
    values = np.random.default_rng(seed).random((16, 16))

    def possible(limit):
        chosen = linear_sum_assignment(values > limit)
        return not (values > limit)[chosen].any()

    assert bottleneck(values.tolist())[0] == min(
        limit for limit in values.ravel() if possible(limit)
    )


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.floats(0, 10), min_size=n * n, max_size=n * n).map(lambda x: (n, x))
    )
)
def test_the_order_is_the_cheapest_of_all(drawn):
    count, entries = drawn
    weights = np.array(entries).reshape(count, count)
    weights = weights + weights.T
    seconds, order = cheapest_order(weights)
    assert sorted(order) == list(range(count))
    assert seconds == pytest.approx(twin_order(weights.tolist()))
    assert seconds == pytest.approx(sum(weights[a, b] for a, b in itertools.pairwise(order)))


def test_an_order_does_not_depend_on_the_direction():
    weights = np.array([[0, 5, 1], [5, 0, 1], [1, 1, 0]], dtype=float)
    assert cheapest_order(weights) == (2.0, (0, 2, 1))


def test_as_many_stages_as_allowed_are_ordered_and_no_more():
    line = np.abs(np.subtract.outer(np.arange(MAX_STAGES), np.arange(MAX_STAGES))).astype(float)
    assert cheapest_order(line) == (MAX_STAGES - 1, tuple(range(MAX_STAGES)))
    with pytest.raises(ValueError, match="cannot order 17 stages exactly; give 1 to 16"):
        cheapest_order(np.zeros((17, 17)))


@pytest.mark.parametrize("seed", range(10))
def test_between_unequal_stages_no_node_has_more_partners_than_the_sizes_force(seed):
    costs = Costs(links(8, seed), TRAFFIC)
    larger, smaller = (0, 1, 2, 3, 4), (5, 6, 7)
    ways = [
        way
        for way in itertools.product(smaller, repeat=5)
        if max(way.count(node) for node in smaller) <= 2
    ]
    best = min(max(costs.handing_s[a][b] for a, b in zip(larger, way, strict=True)) for way in ways)
    assert costs.match(larger, smaller) == costs.match(smaller, larger) == best


def test_the_diagonal_is_never_read():
    latency, rate = np.full((3, 3), 0.1), np.full((3, 3), 1e6)
    np.fill_diagonal(latency, np.nan)
    np.fill_diagonal(rate, -1)
    assert Costs(LinkCosts.of(latency, rate), TRAFFIC).layout([(0, 1, 2)]).seconds == pytest.approx(
        2 * 2 * (0.1 + 2)
    )


@pytest.mark.parametrize(
    ("latency", "rate", "reason"),
    [
        ([[0, -1], [0, 0]], np.ones((2, 2)), "latency from node 0 to node 1 is -1.0"),
        ([[0, 1], [float("nan"), 0]], np.ones((2, 2)), "latency from node 1 to node 0 is nan"),
        (np.zeros((2, 2)), [[1, 0], [1, 1]], "bandwidth from node 0 to node 1 is 0.0"),
        (np.zeros((2, 2)), [[1, np.inf], [1, 1]], "bandwidth from node 0 to node 1 is inf"),
        (np.zeros((2, 2)), np.ones((3, 3)), "one row and one column per node"),
        (np.zeros(4), np.ones(4), "one row and one column per node"),
        (np.zeros((0, 0)), np.ones((0, 0)), "cannot plan 0 nodes"),
    ],
)
def test_impossible_links_are_refused_with_the_place(latency, rate, reason):
    with pytest.raises(ValueError, match=reason):
        LinkCosts.of(latency, rate)


@pytest.mark.parametrize("size", [-1.0, float("nan"), float("inf")])
def test_impossible_traffic_is_refused(size):
    with pytest.raises(ValueError, match="bytes of gradient"):
        StepTraffic(size, 1)
    with pytest.raises(ValueError, match="bytes of activations"):
        StepTraffic(1, size)
