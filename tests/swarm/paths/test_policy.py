"""The law of path policies, checked for all of them, and what each promises beyond it."""

import collections
import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.paths import noloco as mixing
from farflock.swarm.paths.partial_paths import PartialPaths
from farflock.swarm.paths.policy import (
    NUMBERS,
    FinishedCall,
    Microbatch,
    StageServers,
    SwarmPaths,
    fixed,
    mixed,
)
from farflock.swarm.paths.round_robin import BACKWARD_SIZE, DIAL_BAN_S, Announced

STAGES = 3
POLICIES = {
    "wired": lambda: SwarmPaths(STAGES, random.Random(5)),
    "fixed": lambda: fixed(STAGES),
    "mixed": lambda: mixed(STAGES, seed=5),
    "partial": lambda: PartialPaths(SwarmPaths(STAGES, random.Random(5)), STAGES, 3, "a"),
}
OUTCOMES = ("done", "busy", "dial", "rpc", "deadline")


def serving(*sizes, membership=1, rate=1.0):
    stages = tuple(
        tuple(Announced(f"s{stage}-{number}", 1, rate) for number in range(size))
        for stage, size in enumerate(sizes)
    )
    return StageServers(membership, stages)


each_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)

microbatches = st.builds(Microbatch, st.integers(0, 99), st.integers(0, 9), st.integers(0, 20))
steps = st.tuples(
    microbatches, st.integers(0, STAGES - 1), st.sets(st.integers(0, 3)), st.sampled_from(OUTCOMES)
)


@each_policy
def test_each_stage_is_visited_as_often_as_it_is_said(make):
    policy = make()
    orders = [policy.stage_order(Microbatch(step, 0, 0)) for step in range(60)]
    for stage in range(STAGES):
        assert sum(stage in order for order in orders) == policy.share(stage) * 60


@each_policy
@given(
    sizes=st.tuples(*[st.integers(0, 4)] * STAGES),
    history=st.lists(steps, max_size=25),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_law(make, sizes, history, data):
    here, there = make(), make()
    known = serving(*sizes)
    shuffled = StageServers(
        1, tuple(tuple(data.draw(st.permutations(servers))) for servers in known.stages)
    )
    for number, (microbatch, stage, excluded, outcome) in enumerate(history):
        now_s, exclude = 0.5 * number, {f"s{stage}-{peer}" for peer in excluded}
        order = here.stage_order(microbatch)
        assert order[0] == 0
        assert len(set(order)) == len(order)
        assert set(order) <= set(range(STAGES))
        peer = here.next_hop(microbatch, stage, known, now_s, 1.0, exclude)
        assert peer == there.next_hop(microbatch, stage, shuffled, now_s, 1.0, exclude)
        allowed = set(known.peers(stage)) - exclude
        retry_s = here.retry_s(stage)
        assert retry_s is None or retry_s > now_s
        if peer is None:
            assert not allowed or retry_s is not None
            continue
        assert peer in allowed
        for policy in (here, there):
            policy.on_result(FinishedCall(peer, stage, 1.0, now_s), outcome, now_s + 0.25)


@each_policy
@given(
    history=st.lists(steps, max_size=15), lane=st.integers(0, 9), stage=st.integers(0, STAGES - 1)
)
@settings(max_examples=40, deadline=None)
def test_pinned_policies_keep_a_lane_on_its_servers_whatever_happened(make, history, lane, stage):
    policy, known = make(), serving(3, 4, 2)
    first = policy.next_hop(Microbatch(0, 0, lane), stage, known, 0.0)
    for microbatch, where, _, outcome in history:
        peer = policy.next_hop(microbatch, where, known, 0.0)
        if peer is not None:
            policy.on_result(FinishedCall(peer, where, 1.0, 0.0), outcome, 1.0)
    if policy.pinned:
        assert policy.next_hop(Microbatch(7, 3, lane), stage, known, 2.0) == first


@each_policy
def test_excluding_one_server_after_the_other_reaches_all_of_them_and_then_none(make):
    policy, known, tried = make(), serving(3, 5, 4), []
    while (peer := policy.next_hop(Microbatch(1, 2, 3), 1, known, 0.0, 1.0, tried)) is not None:
        tried.append(peer)
    assert sorted(tried) == known.peers(1)
    assert policy.retry_s(1) is None


@each_policy
def test_a_new_list_of_servers_is_in_force_at_once(make):
    policy = make()
    assert policy.next_hop(Microbatch(0, 0, 0), 1, serving(1, 2, 1), 0.0) in {"s1-0", "s1-1"}
    assert policy.next_hop(Microbatch(0, 0, 0), 1, serving(1, 0, 1, membership=2), 0.0) is None
    newer = StageServers(3, ((Announced("a", 1),), (Announced("b", 1),), (Announced("c", 1),)))
    assert policy.next_hop(Microbatch(0, 0, 0), 1, newer, 0.0) == "b"


def test_a_pipeline_without_stages_is_refused():
    for refused in (lambda: SwarmPaths(0, random.Random(0)), lambda: fixed(0), lambda: mixed(0, 1)):
        with pytest.raises(ValueError, match="a pipeline of 0 stages; it needs at least one"):
            refused()


def test_only_fixed_maps_are_pinned():
    assert [name for name, make in POLICIES.items() if make().pinned] == ["fixed"]


def test_a_fixed_map_gives_a_lane_the_server_of_its_number_and_the_next_one_in_its_absence():
    policy, known = fixed(STAGES), serving(2, 3, 1)
    paths = [
        [policy.next_hop(Microbatch(0, 0, lane), s, known, 0.0) for s in range(STAGES)]
        for lane in range(4)
    ]
    assert paths == [
        ["s0-0", "s1-0", "s2-0"],
        ["s0-1", "s1-1", "s2-0"],
        ["s0-0", "s1-2", "s2-0"],
        ["s0-1", "s1-0", "s2-0"],
    ]
    assert policy.next_hop(Microbatch(0, 0, 2), 1, known, 0.0, 1.0, {"s1-2"}) == "s1-0"


def test_mixing_takes_the_holder_of_the_lane_and_draws_anew_when_the_membership_changes():
    policy, known = mixed(STAGES, seed=5), serving(4, 4, 4)
    peers = [known.peers(stage) for stage in range(STAGES)]
    for step in range(10):
        draw = mixing.Draw(5, 1, step, 6)
        for stage in range(STAGES):
            hops = [
                policy.next_hop(Microbatch(step, 6, lane), stage, known, 0.0) for lane in range(4)
            ]
            assert hops == [mixing.line(draw, peers[stage], stage, lane)[0] for lane in range(4)]
            assert sorted(hops) == peers[stage]
    before = [policy.next_hop(Microbatch(step, 0, 0), 1, known, 0.0) for step in range(20)]
    after = [
        policy.next_hop(Microbatch(step, 0, 0), 1, serving(4, 4, 4, membership=2), 0.0)
        for step in range(20)
    ]
    assert before != after


@pytest.mark.parametrize("make", [fixed, lambda stages, me: mixed(stages, 5, me)])
def test_trainers_in_any_of_their_lives_take_a_server_of_each_stage_each(make):
    trainers = ["t0", "t1", "t2", "t3"]
    known = replace(serving(4, 4, 4), lanes={"t2": 0, "t0": 1, "t3": 2, "t1": 3, "s0-0": 4})
    policies = {me: make(STAGES, me) for me in trainers}
    for step, stage in itertools.product(range(5), range(STAGES)):
        hops = [
            policies[me].next_hop(Microbatch(life * NUMBERS + step, 0, 77), stage, known, 0.0)
            for life, me in enumerate(trainers, 3)
        ]
        assert sorted(hops) == known.peers(stage)


def test_wiring_gives_each_stage_work_by_measured_speed_and_counts_backward_calls_for_more():
    policy, known = SwarmPaths(STAGES, random.Random(0)), serving(1, 2, 1)
    for peer, taken_s in (("s1-0", 1.0), ("s1-1", 3.0)):
        policy.next_hop(Microbatch(0, 0, 0), 1, known, 0.0)
        policy.on_result(FinishedCall(peer, 1, 1.0, 0.0), "done", taken_s)
    counts = collections.Counter(
        policy.next_hop(Microbatch(0, 0, 0), 1, known, 9.0) for _ in range(400)
    )
    assert counts["s1-0"] == pytest.approx(300, abs=3)
    busiest = policy.next_hop(Microbatch(0, 0, 0), 1, known, 9.0, 100 * BACKWARD_SIZE)
    assert policy.next_hop(Microbatch(0, 0, 0), 1, known, 9.0) != busiest


def test_wiring_bans_at_the_stage_where_a_call_failed_and_says_when_to_ask_again():
    policy, known = SwarmPaths(STAGES, random.Random(0)), serving(1, 2, 1)

    def asked(stage, known, now_s):
        found = (policy.next_hop(Microbatch(0, 0, 0), stage, known, now_s) for _ in range(6))
        return set(found)

    assert asked(1, known, 0.0) == {"s1-0", "s1-1"}
    for outcome in ("busy", "deadline", "done"):
        policy.on_result(FinishedCall("s1-0", 1, 1.0, 0.0), outcome, 1.0)
        assert "s1-0" in asked(1, known, 2.0)
    policy.on_result(FinishedCall("s1-0", 1, 1.0, 0.0), "dial", 5.0)
    assert asked(1, known, 6.0) == {"s1-1"}
    assert policy.retry_s(1) == 5.0 + DIAL_BAN_S
    assert policy.retry_s(0) is None
    policy.on_result(FinishedCall("s1-1", 1, 1.0, 0.0), "rpc", 6.0)
    assert asked(1, known, 7.0) == {"s1-0"}, "of a stage's only servers, one is asked all the same"
    policy.on_result(FinishedCall("s0-0", 0, 1.0, 0.0), "rpc", 6.0)
    assert asked(0, known, 6.0) == {"s0-0"}
    newer = StageServers(1, (*known.stages[:1], (Announced("s1-1", 2),), *known.stages[2:]))
    assert asked(1, newer, 7.0) == {"s1-1"}
