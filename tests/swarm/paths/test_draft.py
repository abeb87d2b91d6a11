"""Drafts of plans: after any change, every path is still allowed and stages are still balanced."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.paths.draft import MAX_MICROBATCHES, Draft, Instance, even_paths
from farflock.swarm.paths.skippipe import (
    PathPlan,
    PlanTerms,
    StageKind,
    Stop,
    require_order,
    require_paths,
)

HIDDEN = StageKind("hidden", "hidden")


def instance(sizes=(3, 2, 2, 2, 2), visited=3, headed=False, memory=2, turns=4, swaps=True):
    kinds = [HIDDEN] * len(sizes)
    if headed:
        kinds[0], kinds[-1] = StageKind("tokens", "hidden"), StageKind("hidden", "logits")
    serving = tuple(
        tuple(f"s{stage}-{number}" for number in range(many)) for stage, many in enumerate(sizes)
    )
    peers = [peer for each in serving for peer in each]
    hops = {
        a: {b: 1.0 + (3 * i + 5 * j) % 7 for j, b in enumerate(peers)} for i, a in enumerate(peers)
    }
    terms = PlanTerms(tuple(kinds), visited)
    return Instance(
        serving, terms, dict.fromkeys(peers, 1.0), hops, memory, turns, turns, swaps, not headed
    )


def orders(draft):
    return [[stop.stage for stop in path] for path in draft.paths]


SHAPES = [
    {},
    {"visited": 4},
    {"visited": 5},
    {"visited": 1},
    {"headed": True},
    {"headed": True, "visited": 5},
    {"headed": True, "sizes": (2, 3), "visited": 2},
    {"sizes": (1, 1, 1, 1), "visited": 2, "turns": 1},
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_every_move_keeps_to_the_rules_and_can_be_taken_back(shape, seed):
    wanted, chance = instance(**shape), random.Random(seed)
    draft = Draft(wanted, wanted.turns, chance)
    require_paths(draft.plan(), wanted.serving, wanted.terms)
    for _ in range(60):
        before = list(draft.paths)
        back = draft.apply(draft.propose())
        if chance.random() < 0.3:
            draft.apply(back)
            assert draft.paths == before
        require_paths(draft.plan(), wanted.serving, wanted.terms)
    origins = [path[0].peer for path in draft.paths]
    assert origins == [peer for peer in wanted.serving[0] for _ in range(wanted.turns)]


@pytest.mark.parametrize("seed", range(5))
def test_where_a_lane_has_one_path_every_move_keeps_the_balance_of_all_turns(seed):
    wanted = instance(sizes=(4, 2, 2, 2, 2))  # each optional stage twice: there is nothing to give
    draft = Draft(wanted, 1, random.Random(seed))
    for _ in range(200):
        draft.apply(draft.propose())
        require_paths(draft.plan(), wanted.serving, wanted.terms)


def test_a_horizon_has_so_many_microbatches_and_no_more():
    assert instance(sizes=(64, 1, 1), turns=64).microbatches == MAX_MICROBATCHES
    with pytest.raises(ValueError, match="64 lanes of 65 microbatches, and room"):
        instance(sizes=(64, 1, 1), turns=65)


def test_moves_reach_other_servers_other_stages_and_swaps():
    wanted = instance()
    draft = Draft(wanted, wanted.turns, random.Random(0))
    seen, swapped, visits = set(), False, set()
    for _ in range(500):
        draft.apply(draft.propose())
        seen |= {stop for path in draft.paths for stop in path}
        swapped |= any(order != sorted(order) for order in orders(draft))
        visits.add(tuple(sum(stage in order for order in orders(draft)) for stage in range(5)))
    assert seen == {
        Stop(stage, peer) for stage, peers in enumerate(wanted.serving) for peer in peers
    }
    assert swapped
    assert len(visits) > 1


def test_where_swaps_are_forbidden_there_are_none():
    draft = Draft(instance(swaps=False), 4, random.Random(0))
    for _ in range(300):
        draft.apply(draft.propose())
        assert all(order == sorted(order) for order in orders(draft))


def test_visiting_all_stages_without_swaps_leaves_only_the_models_order():
    draft = Draft(instance(visited=5, swaps=False), 4, random.Random(0))
    for _ in range(100):
        draft.apply(draft.propose())
        assert orders(draft) == [[0, 1, 2, 3, 4]] * 12


def test_a_lane_with_one_path_takes_it_every_turn():
    draft = Draft(instance(), 1, random.Random(0))
    assert len(draft.paths) == 3
    assert draft.plan().pinned
    assert [len(paths) for paths in draft.plan().lanes] == [4, 4, 4]


def test_even_paths_take_stages_and_servers_in_turn():
    paths = even_paths(instance(sizes=(2, 2, 2, 2), visited=3), 2)
    assert [[stop.stage for stop in path] for path in paths] == [
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 3],
        [0, 1, 2],
    ]
    assert [stop.peer for path in paths for stop in path if stop.stage == 1] == [
        "s1-0",
        "s1-1",
        "s1-0",
    ]


@pytest.mark.parametrize("sizes", [(3, 2, 2, 2, 2), (5, 1, 1, 1, 1, 1), (2, 1, 1)])
def test_paths_whose_balance_is_off_are_mended(sizes):
    """With one path per lane there is no balance unless the stages divide lanes times stops."""
    wanted = instance(sizes=sizes, visited=2)
    shared, own = Draft(wanted, 1, random.Random(0)), Draft(wanted, wanted.turns, random.Random(0))
    plan = shared.plan()
    own.adopt(plan)
    require_paths(own.plan(), wanted.serving, wanted.terms)
    changed = sum(one != other for one, other in zip(own.paths, plan.paths, strict=True))
    assert 0 <= changed < len(plan.paths) / 2


def test_mending_takes_the_nearest_server():
    wanted = instance(sizes=(1, 1, 3), visited=2, turns=4)
    near = {"s0-0": {"s1-0": 1.0, "s2-0": 9.0, "s2-1": 2.0, "s2-2": 9.0}}
    hops = {
        a: {b: near.get(a, {}).get(b, near.get(b, {}).get(a, 9.0)) for b in wanted.transfer_s}
        for a in wanted.transfer_s
    }
    wanted = Instance(wanted.serving, wanted.terms, wanted.forward_s, hops, 2, 4, 4)
    draft = Draft(wanted, 4, random.Random(0))
    draft.adopt(PathPlan((((Stop(0, "s0-0"), Stop(1, "s1-0")),) * 4,), 4))
    assert sorted(path[1].peer for path in draft.paths) == ["s1-0"] * 3 + ["s2-1"]


def test_what_fits_already_is_taken_as_it_is():
    wanted = instance()
    shared = Draft(wanted, wanted.turns, random.Random(3))
    for _ in range(50):
        shared.apply(shared.propose())
    own = Draft(wanted, wanted.turns, random.Random(0))
    own.adopt(shared.plan())
    assert own.plan() == shared.plan()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sizes": (2, 0, 1), "visited": 2}, r"\[2, 0, 1\] servers for 3 stages; give each stage"),
        ({"turns": 0}, "3 lanes of 0 microbatches, and room for 2"),
        ({"memory": 0}, "room for 0"),
        ({"turns": 4096}, "choose 1 to 4096 microbatches in all"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        instance(**changes)


def test_the_rules_of_an_order_are_what_the_draft_asks():
    draft = Draft(instance(visited=4), 4, random.Random(2))
    for _ in range(200):
        for path in draft.propose().values():
            require_order([stop.stage for stop in path], instance(visited=4).terms)
