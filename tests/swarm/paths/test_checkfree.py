"""CheckFree+'s swap: which stages change places, which layouts allow it, and that it is half of the
microbatches."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farflock.swarm.paths.checkfree import BadSwap, SwappedPaths, partners
from farflock.swarm.paths.policy import (
    FinishedCall,
    Microbatch,
    StageServers,
    SwarmPaths,
    fixed,
    mixed,
)
from farflock.swarm.paths.round_robin import Announced

SIX = (2, 3, 3, 1, 1, 4)
seeds = st.none() | st.integers(0, 2**64)


def serving(stages, each=2):
    return StageServers(
        1, tuple(tuple(Announced(f"s{s}-{n}", 1, 1.0) for n in range(each)) for s in range(stages))
    )


def orders(policy, microbatches):
    return [policy.stage_order(microbatch) for microbatch in microbatches]


@pytest.mark.parametrize(
    ("layers", "order"),
    [
        ((5, 1, 1, 2), (0, 2, 1, 3)),
        (SIX, (0, 2, 1, 4, 3, 5)),
        ((1, 2, 2, 7, 3, 3, 1), (0, 2, 1, 3, 5, 4, 6)),
    ],
)
def test_the_first_two_and_the_last_two_block_stages_change_places(layers, order):
    policy = SwappedPaths(fixed(len(layers)), layers)
    usual = tuple(range(len(layers)))
    assert orders(policy, [Microbatch(0, index, 0) for index in range(4)]) == [
        usual,
        order,
        usual,
        order,
    ]


@given(layers=st.lists(st.integers(1, 3), min_size=1, max_size=9))
def test_partners_are_equal_stages_between_the_ends_and_of_each_other(layers):
    try:
        found = partners(layers)
    except BadSwap as error:
        assert str(error).startswith("swap of unequal stages: ")
        return
    assert found.keys() == {1, 2, len(layers) - 3, len(layers) - 2}
    for here, there in found.items():
        assert abs(here - there) == 1
        assert found[there] == here
        assert layers[here] == layers[there]


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((), "only 0 of 0 stages could change places"),
        ((6,), "only 0 of 1 stages could change places"),
        ((3, 3), "only 0 of 2 stages could change places.*choose 4 or at least 6"),
        ((2, 2, 2), "only 1 of 3 stages could change places"),
        ((2, 2, 2, 2, 2), "stage 2 of 5 would be in the first and in the last pair"),
        (
            (2, 1, 2, 2),
            "stages 1 and 2 have 1 and 2 layers; give them equally many, or do not swap",
        ),
        ((2, 1, 1, 3, 2, 2), "stages 3 and 4 have 3 and 2 layers"),
    ],
)
def test_other_layouts_are_refused_by_the_rules_name(layers, reason):
    with pytest.raises(BadSwap, match=f"^swap of unequal stages: .*{reason}"):
        SwappedPaths(fixed(max(1, len(layers))), layers)


@given(
    seed=seeds,
    step=st.integers(0, 99),
    lane=st.integers(0, 9),
    start=st.integers(0, 50),
    half=st.integers(1, 20),
)
def test_exactly_half_of_each_2n_microbatches_is_swapped(seed, step, lane, start, half):
    """Invariant 5 of specs 3.5, for any seed, lane and step."""
    policy = SwappedPaths(fixed(6), SIX, seed)
    batch = [Microbatch(step, 2 * start + index, lane) for index in range(2 * half)]
    assert sum(policy.is_swapped(microbatch) for microbatch in batch) == half
    assert sum(order != tuple(range(6)) for order in orders(policy, batch)) == half


def test_without_a_seed_lanes_and_steps_of_one_microbatch_alternate_too():
    policy = SwappedPaths(fixed(6), SIX)
    assert [policy.is_swapped(Microbatch(step, 0, 0)) for step in range(4)] == [
        False,
        True,
        False,
        True,
    ]
    assert [policy.is_swapped(Microbatch(0, 0, lane)) for lane in range(4)] == [
        False,
        True,
        False,
        True,
    ]


def test_with_a_seed_chance_takes_one_of_each_pair_alike_on_every_machine():
    batch = [Microbatch(step, index, 0) for step in range(50) for index in range(4)]
    drawn = {
        seed: [SwappedPaths(fixed(6), SIX, seed).is_swapped(one) for one in batch]
        for seed in (1, 2)
    }
    assert drawn[1] != drawn[2]
    assert drawn[1] == [SwappedPaths(mixed(6, 3), SIX, 1).is_swapped(one) for one in batch]
    assert "".join(str(int(swapped)) for swapped in drawn[1][:16]) == "1010100101101001"
    assert 30 < sum(drawn[1][::2]) < 70  # of 100 first ones of a pair


@given(seed=seeds, step=st.integers(0, 99), index=st.integers(0, 9), lane=st.integers(0, 20))
def test_orders_obey_the_law_of_path_policies(seed, step, index, lane):
    order = SwappedPaths(mixed(6, 5), SIX, seed).stage_order(Microbatch(step, index, lane))
    assert order[0] == 0
    assert order[-1] == 5
    assert sorted(order) == list(range(6))


class Skipping:
    """A policy that skips stage 2."""

    def stage_order(self, microbatch):
        return (0, 1, 3, 4, 5)


def test_what_the_wrapped_policy_leaves_out_stays_out_by_place():
    assert orders(SwappedPaths(Skipping(), SIX), [Microbatch(0, 0, 0), Microbatch(0, 1, 0)]) == [
        (0, 1, 3, 4, 5),
        (0, 2, 4, 3, 5),
    ]


def test_the_wrapped_policy_chooses_the_server_of_a_stage_and_no_lane_is_pinned():
    here, there = SwarmPaths(6, random.Random(1)), SwarmPaths(6, random.Random(1))
    swapped, known = SwappedPaths(here, SIX), serving(6)
    assert not swapped.pinned
    assert not SwappedPaths(fixed(6), SIX).pinned
    for number in range(12):
        microbatch, stage = Microbatch(0, number, 0), number % 6
        peer = swapped.next_hop(microbatch, stage, known, float(number), 1.0, {f"s{stage}-0"})
        assert peer == there.next_hop(microbatch, stage, known, float(number), 1.0, {f"s{stage}-0"})
        for policy in (swapped, there):
            policy.on_result(FinishedCall(peer, stage, 1.0, float(number)), "dial", number + 0.5)
        assert swapped.retry_s(stage) == there.retry_s(stage)
    assert swapped.retry_s(0) is not None
