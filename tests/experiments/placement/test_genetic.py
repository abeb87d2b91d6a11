"""The baseline does what the paper says: crossover of pieces, mended sizes, both gains by hand,
a population that improves."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.experiments.placement import genetic
from farflock.experiments.placement.genetic import (
    Refine,
    Setting,
    Stages,
    crossed,
    mended,
    search,
    stages_of,
)
from farflock.experiments.placement.layout import Costs, LinkCosts, StepTraffic


def drawn(nodes, seed):
    chance = np.random.default_rng(seed)
    links = LinkCosts.of(
        chance.uniform(0.001, 0.3, (nodes, nodes)), chance.uniform(1e5, 1e8, (nodes, nodes))
    )
    return Costs(links, StepTraffic(6e6, 2e6))


def symmetric(nodes, seed):
    weights = np.random.default_rng(seed).random((nodes, nodes))
    weights += weights.T
    np.fill_diagonal(weights, 0)
    return weights.tolist()


@given(st.integers(2, 40), st.integers(0, 1000))
def test_a_child_has_pieces_of_both_parents_in_turn(length, seed):
    child = crossed([0] * length, [1] * length, random.Random(seed))
    assert len(child) == length
    assert child[0] == 0
    assert sum(a != b for a, b in itertools.pairwise(child)) == min(genetic.POINTS, length - 1)


@given(st.lists(st.integers(0, 3), min_size=10, max_size=10), st.integers(0, 1000))
def test_a_mended_child_has_the_sizes_and_moves_only_what_it_must(genome, seed):
    sizes = (3, 3, 2, 2)
    fixed = mended(genome, sizes, random.Random(seed))
    assert Counter(fixed) == Counter(dict(enumerate(sizes)))
    surplus = sum(max(0, genome.count(stage) - size) for stage, size in enumerate(sizes))
    assert sum(a != b for a, b in zip(genome, fixed, strict=True)) == surplus


def test_the_papers_gain_by_hand():
    """Of links (0, 1) and (2, 3), the fastest in each stage: 0 leaves for 2."""
    weights = [[0, 1, 9, 8, 0], [1, 0, 2, 1, 0], [9, 2, 0, 2, 0], [8, 1, 2, 0, 0], [0] * 5]
    gain, a, b = genetic.circular_move(Stages.of([0, 1], [2, 3]), weights)
    assert (a, b) == (0, 2)
    assert gain == ((9 + 8) / 2 - 1) + ((9 + 2) / 2 - 2)


def test_the_fastest_links_are_of_nodes_that_have_not_moved():
    weights = symmetric(8, 1)
    stages = Stages.of([0, 1, 2, 3], [4, 5, 6, 7])
    seen = []
    for _ in range(3):
        _, a, b = genetic.circular_move(stages, weights)
        stages.exchange(a, b)
        seen += [a, b]
    assert len(set(seen)) == 6
    assert sorted(stages.one + stages.other) == list(range(8))


@pytest.mark.parametrize("seed", range(10))
def test_kernighan_and_lins_gain_is_by_how_much_inner_costs_fall(seed):
    weights = symmetric(8, seed)

    def inner(stages):
        return sum(weights[a][b] for stage in stages for a in stage for b in stage if a < b)

    stages = Stages.of([0, 1, 2, 3], [4, 5, 6, 7])
    before = inner((stages.one, stages.other))
    gain, a, b = genetic.kernighan_lin_move(stages, weights)
    gains = {}
    for x in range(4):
        for y in range(4, 8):
            trial = Stages.of(stages.one, stages.other)
            trial.exchange(x, y)
            gains[x, y] = before - inner((trial.one, trial.other))
    assert gain == pytest.approx(gains[a, b]) == pytest.approx(max(gains.values()))


@pytest.mark.parametrize("gain", ["circular", "kernighan-lin"])
@pytest.mark.parametrize("seed", range(5))
def test_local_search_keeps_the_sizes_and_helps_more_often_than_not(gain, seed):
    costs, chance = drawn(12, seed), random.Random(seed)
    refine, saved = Refine(costs, (4, 4, 4), gain), []
    for _ in range(10):
        genome = [0, 1, 2] * 4
        chance.shuffle(genome)
        better = refine(genome)
        assert Counter(better) == Counter(genome)
        saved.append(
            costs.layout(stages_of(genome)).seconds - costs.layout(stages_of(better)).seconds
        )
    assert sum(saved) > 0


def test_local_search_leaves_alone_what_it_cannot_improve():
    links = LinkCosts.of(np.zeros((6, 6)), np.ones((6, 6)))
    assert Refine(Costs(links, StepTraffic(1, 1)), (3, 3), "circular")([0, 1, 0, 1, 0, 1]) == [
        0,
        1,
        0,
        1,
        0,
        1,
    ]


def test_longer_search_is_no_worse_and_the_same_seed_gives_the_same():
    costs = drawn(16, 0)
    found = [
        search(costs, (4,) * 4, 3, Setting(population=6, trials=trials)) for trials in (0, 20, 60)
    ]
    assert found[0].seconds >= found[1].seconds >= found[2].seconds
    assert found[0].seconds > found[2].seconds
    assert search(costs, (4,) * 4, 3, Setting(population=6, trials=20)) == found[1]


@pytest.mark.parametrize("gain", ["circular", "kernighan-lin"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 2, 2), (1,) * 12, (12,)])
def test_every_node_has_one_place(gain, sizes):
    found = search(drawn(12, 2), sizes, 0, Setting(gain, 4, 5))
    assert sorted(map(len, found.stages)) == sorted(sizes)
    assert sorted(node for stage in found.stages for node in stage) == list(range(12))


def test_its_length_is_that_of_the_released_script():
    assert (Setting().population, Setting().trials, genetic.POINTS) == (24, 4900, 5)
