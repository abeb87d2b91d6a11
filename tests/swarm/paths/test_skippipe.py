"""Plans that skip and swap stages: a bad one is refused with the rule's name and the remedy, and a
good one is followed."""

import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farflock.swarm.paths.policy import Microbatch, StageServers
from farflock.swarm.paths.round_robin import Announced
from farflock.swarm.paths.skippipe import (
    BadPlan,
    PathPlan,
    PlannedPaths,
    PlanTerms,
    ScheduledPass,
    StageKind,
    Stop,
    require_order,
    require_paths,
    require_timetable,
)

HIDDEN = StageKind("hidden", "hidden", ((8, 8),))
BODY = PlanTerms((HIDDEN,) * 5, visited=3)  # its first server is also its last
HEADED = PlanTerms(
    (StageKind("tokens", "hidden"), HIDDEN, HIDDEN, HIDDEN, StageKind("hidden", "logits")),
    visited=4,
)
SERVERS = [{f"s{stage}-{number}" for number in range(2)} for stage in range(5)]


def path(*stages, number=0):
    return tuple(Stop(stage, f"s{stage}-{number}") for stage in stages)


def plan(*lanes, per_step=1):
    return PathPlan(tuple(tuple(lane) for lane in lanes), per_step)


def serving(*sizes, membership=1):
    return StageServers(
        membership,
        tuple(
            tuple(Announced(f"s{s}-{n}", 1) for n in range(many)) for s, many in enumerate(sizes)
        ),
    )


GOOD = plan([path(0, 1, 2), path(0, 4, 3)], [path(0, 1, 3, number=1), path(0, 4, 2, number=1)])


def test_a_plan_that_keeps_to_all_rules_is_accepted():
    require_paths(GOOD, SERVERS, BODY)
    require_paths(plan([path(0, 1, 2, 4), path(0, 3, 2, 4), path(0, 1, 3, 4)]), SERVERS, HEADED)


@pytest.mark.parametrize(
    ("terms", "lanes", "rule", "remedy"),
    [
        (BODY, [[path(0, 1, 2, number=2)]], "stage's server", "plan again for the present servers"),
        (BODY, [[(*path(0, 1), Stop(5, "s5-0"))]], "stage's server", "plan again"),
        (BODY, [[(*path(0, 1), Stop(-1, "s4-0"))]], "stage's server", "plan again"),
        (BODY, [[path(1, 2, 3)]], "first stage", "begin with stage 0"),
        (BODY, [[path(1, 0, 2)]], "first stage", "begin with stage 0"),
        (BODY, [[()]], "first stage", "begin with stage 0"),
        (BODY, [[path(0, 1, 1)]], "one visit", "visit each stage at most once"),
        (BODY, [[path(0, 1, 2, 3)]], "skip ratio", "visit 3"),
        (BODY, [[path(0, 1)]], "skip ratio", "visit 3"),
        (HEADED, [[path(0, 1, 2, 3)]], "missing stage", "whose output differs in kind"),
        (
            PlanTerms((HIDDEN,) * 5, 4),
            [[path(0, 3, 1, 2)]],
            "swap bound",
            "displace at most 2 stages, each by at most 1",
        ),
        (
            PlanTerms((HIDDEN,) * 5, 5),
            [[path(0, 2, 1, 4, 3)]],
            "swap bound",
            "displace at most 2 stages, each by at most 1",
        ),
        (HEADED, [[path(0, 1, 4, 3)]], "swap of unequal stages", "in their own order"),
        (
            BODY,
            [[path(0, 1, 2), path(0, 1, 3)], [path(0, 1, 4), path(0, 1, 2)]],
            "stage balance",
            "train every stage",
        ),
    ],
)
def test_a_plan_that_breaks_a_rule_is_refused_with_its_name_and_the_remedy(
    terms, lanes, rule, remedy
):
    with pytest.raises(BadPlan) as refused:
        require_paths(plan(*lanes), SERVERS, terms)
    assert refused.value.rule == rule
    assert remedy in refused.value.remedy
    assert str(refused.value) == f"{rule}: {refused.value.why}; {refused.value.remedy}"


@pytest.mark.parametrize(
    "other",
    [StageKind("hidden", "hidden", ((9, 8),)), StageKind("hidden", "hidden", ((8, 8), (8,)))],
)
def test_stages_of_other_shapes_cannot_change_places_but_may_be_skipped(other):
    terms = PlanTerms((HIDDEN, HIDDEN, other, HIDDEN), visited=3)
    require_order([0, 2, 3], terms)
    require_order([0, 3, 1], terms)  # the unequal one is not there
    for order in ([0, 2, 1], [0, 3, 2]):
        with pytest.raises(BadPlan, match="swap of unequal stages: a path visits stage") as refused:
            require_order(order, terms)
        assert str(other) in refused.value.why


def test_visiting_all_stages_without_swaps_is_the_order_of_the_model():
    terms = PlanTerms((HIDDEN,) * 4, visited=4)
    require_order([0, 1, 2, 3], terms)
    with pytest.raises(BadPlan, match="skip ratio"):
        require_order([0, 1, 2], terms)
    assert terms.mean_visits(10) == 10
    assert (
        PlanTerms((StageKind("tokens", "hidden"), StageKind("hidden", "logits")), 2).mean_visits(10)
        == 0
    )


@pytest.mark.parametrize("visited", [0, 1, 6])
def test_a_number_of_stages_that_no_path_can_visit_is_refused(visited):
    with pytest.raises(
        BadPlan,
        match=f"cannot visit {visited} of 5 stages: no path may skip 2 of them; "
        "choose 2 to 5 stages",
    ):
        PlanTerms(HEADED.kinds, visited)


@pytest.mark.parametrize(
    ("lanes", "per_step"), [([], 1), ([[]], 1), ([[path(0)], [path(0)] * 2], 1), ([[path(0)]], 0)]
)
def test_a_plan_without_a_common_horizon_is_refused(lanes, per_step):
    with pytest.raises(BadPlan, match="horizon: lanes of"):
        plan(*lanes, per_step=per_step)


@pytest.mark.parametrize("counts", [(3, 3, 3, 3), (4, 2, 3, 3), (4, 3, 3, 2)])
def test_a_stage_may_be_visited_once_more_or_less_than_the_mean(counts):
    left = [stage for stage, count in enumerate(counts, 1) for _ in range(count)]
    pairs = [sorted((left[k], left[k + 6])) for k in range(6)]
    require_paths(plan([path(0, *pair) for pair in pairs]), SERVERS, BODY)


# timetables


def test_work_that_touches_is_no_collision_and_work_that_overlaps_is_one():
    works = [
        ScheduledPass("a", (0, 0), 0.0, 1.0),
        ScheduledPass("a", (1, 0), 1.0, 2.0),
        ScheduledPass("b", (0, 0), 0.5, 1.5),
    ]
    require_timetable(works, memory=2)
    with pytest.raises(
        BadPlan,
        match=r"collision: a works on microbatch \(1, 0\) until 2.0000 s and "
        r"on \(0, 1\) from 1.9000 s",
    ):
        require_timetable([*works, ScheduledPass("a", (0, 1), 1.9, 2.5)], memory=2)


def test_a_microbatch_is_held_from_its_forward_to_its_backward_pass():
    works = [ScheduledPass("a", (0, turn), turn, turn + 0.5) for turn in range(3)]
    works += [ScheduledPass("a", (0, turn), 10 + turn, 10.5 + turn) for turn in range(3)]
    require_timetable(works, memory=3)
    with pytest.raises(
        BadPlan,
        match=r"memory: a holds 3 microbatches at 2.0000 s and has room for 2; start them later",
    ):
        require_timetable(works, memory=2)


def test_room_is_free_as_soon_as_a_backward_pass_ends():
    works = [ScheduledPass("a", (0, 0), 0.0, 1.0), ScheduledPass("a", (0, 1), 1.0, 2.0)]
    require_timetable(works, memory=1)


intervals = st.tuples(st.integers(0, 20), st.integers(1, 3), st.integers(0, 6), st.integers(1, 3))


@given(st.lists(intervals, max_size=6), st.integers(1, 3))
@settings(deadline=None)
def test_refusals_are_those_of_counting_at_every_moment(drawn, memory):
    """The slow twin counts at every half second."""
    works, spans = [], []
    for number, (start, forward, gap, backward) in enumerate(drawn):
        end = start + forward + gap + backward
        works += [
            ScheduledPass("a", (0, number), start, start + forward),
            ScheduledPass("a", (0, number), end - backward, end),
        ]
        spans.append((start, end))
    moments = [half + 0.5 for half in range(40)]
    busiest = max(sum(work.start_s < at < work.end_s for work in works) for at in moments)
    fullest = max(sum(start < at < end for start, end in spans) for at in moments)
    expected = "collision" if busiest > 1 else "memory" if fullest > memory else None
    try:
        require_timetable(works, memory)
        assert expected is None
    except BadPlan as refused:
        assert refused.rule == expected


# the policy


def test_a_microbatch_takes_the_path_of_its_lane_and_turn():
    policy, known = PlannedPaths(GOOD, 5), serving(2, 2, 2, 2, 2)
    for step in range(4):
        for lane in range(4):
            microbatch = Microbatch(step, 0, lane)
            expected = GOOD.lanes[lane % 2][step % 2]
            assert policy.stage_order(microbatch) == tuple(stop.stage for stop in expected)
            for stop in expected:
                assert policy.next_hop(microbatch, stop.stage, known, 0.0) == stop.peer


def test_a_step_of_several_microbatches_goes_on_where_the_last_one_ended():
    paths = [path(0, 1, 2), path(0, 3, 4), path(0, 1, 4)]
    policy = PlannedPaths(plan(paths, per_step=2), 5)
    orders = [
        policy.stage_order(Microbatch(step, index, 0)) for step in range(3) for index in range(2)
    ]
    assert orders == [tuple(stop.stage for stop in paths[turn % 3]) for turn in range(6)]


@given(
    microbatch=st.builds(Microbatch, st.integers(0, 99), st.integers(0, 9), st.integers(0, 20)),
    stage=st.integers(0, 4),
    sizes=st.tuples(*[st.integers(0, 4)] * 5),
    excluded=st.sets(st.integers(0, 3)),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_the_law_of_path_policies(microbatch, stage, sizes, excluded, data):
    policy, known = PlannedPaths(GOOD, 5), serving(*sizes)
    shuffled = StageServers(
        1, tuple(tuple(data.draw(st.permutations(servers))) for servers in known.stages)
    )
    exclude = {f"s{stage}-{number}" for number in excluded}
    peer = policy.next_hop(microbatch, stage, known, 0.0, 1.0, exclude)
    assert peer == PlannedPaths(GOOD, 5).next_hop(microbatch, stage, shuffled, 9.0, 1.0, exclude)
    allowed = set(known.peers(stage)) - exclude
    assert peer in allowed if allowed else peer is None
    assert policy.retry_s(stage) is None
    order = policy.stage_order(microbatch)
    assert order[0] == 0
    assert len(set(order)) == len(order) <= 5


def test_a_place_is_the_peer_that_came_at_that_turn_and_a_name_is_that_peer():
    policy = PlannedPaths(plan([(Stop(0, "0:0"), Stop(1, "1:1"), Stop(2, "s2-0"))]), 3)
    servers = serving(1, 3, 2).stages
    known = StageServers(1, servers, (("s0-0",), ("s1-2", "s1-0", "s1-1"), ("s2-1", "s2-0")))
    asked = [policy.next_hop(Microbatch(0, 0, 0), stage, known, 0.0) for stage in range(3)]
    assert asked == ["s0-0", "s1-0", "s2-0"]
    assert policy.next_hop(Microbatch(0, 0, 0), 1, serving(1, 3, 2), 0.0) == "s1-1", (
        "by name, if the order is not known"
    )


def test_a_place_that_is_vacant_or_whose_server_is_gone_is_taken_over_by_mates():
    policy = PlannedPaths(
        plan([(Stop(0, "0:0"), Stop(1, "1:1")), (Stop(0, "0:0"), Stop(1, "1:7"))]), 2
    )
    without = StageServers(1, serving(1, 2).stages, (("s0-0",), ("s1-0", "gone", "s1-1")))
    heirs = {policy.next_hop(Microbatch(step, 0, 0), 1, without, 0.0) for step in range(8)}
    assert heirs == {"s1-0", "s1-1"}, "the server that had the place is not there"


def test_stage_mates_take_over_one_after_the_other_until_none_is_left():
    policy, known, tried = PlannedPaths(GOOD, 5), serving(2, 5, 2, 2, 2), []
    while (peer := policy.next_hop(Microbatch(0, 0, 0), 1, known, 0.0, 1.0, tried)) is not None:
        tried.append(peer)
    assert tried[0] == "s1-0"
    assert sorted(tried) == known.peers(1)


def test_a_dead_servers_work_is_shared_out_among_its_mates():
    lanes = [[path(0, 1, 2), path(0, 1, 3), path(0, 1, 4)]] * 4
    policy, known = PlannedPaths(plan(*lanes), 5), serving(1, 4, 1, 1, 1)
    heirs = collections.Counter(
        policy.next_hop(Microbatch(step, 0, lane), 1, known, 0.0, 1.0, {"s1-0"})
        for step in range(30)
        for lane in range(4)
    )
    assert heirs == {"s1-1": 40, "s1-2": 40, "s1-3": 40}


def test_a_lane_with_one_path_is_pinned_even_where_its_server_is_gone():
    pinned = plan([path(0, 1, 2)] * 2, [path(0, 3, 4)] * 2)
    assert pinned.pinned
    assert not GOOD.pinned
    policy, known = PlannedPaths(pinned, 5), serving(2, 4, 2, 2, 2)
    without = StageServers(2, (known.stages[0], known.stages[1][1:], *known.stages[2:]))
    chance = random.Random(0)
    for lane in range(6):
        for view in (known, without):
            drawn = [Microbatch(chance.randrange(50), chance.randrange(3), lane) for _ in range(20)]
            assert len({policy.next_hop(microbatch, 1, view, 0.0) for microbatch in drawn}) == 1
