"""The planner: its plans keep all rules, are the same each time, and are the best possible where
all can be tried."""

import itertools
import random

import pytest

from farflock.swarm.paths.draft import Draft, Instance
from farflock.swarm.paths.planner import LaneBounds, plan_paths, require
from farflock.swarm.paths.skippipe import BadPlan, PathPlan, PlanTerms, StageKind, Stop

HIDDEN = StageKind("hidden", "hidden")


def instance(sizes, visited, seed=0, memory=2, turns=2, swaps=True, head_is_first=True):
    chance = random.Random(seed)
    serving = tuple(
        tuple(f"s{stage}-{number}" for number in range(many)) for stage, many in enumerate(sizes)
    )
    peers = [peer for each in serving for peer in each]
    hops = {here: {there: chance.uniform(0.1, 9.0) for there in peers} for here in peers}
    seconds = {peer: chance.uniform(0.2, 1.0) for peer in peers}
    terms = PlanTerms((HIDDEN,) * len(sizes), visited)
    return Instance(serving, terms, seconds, hops, memory, turns, turns, swaps, head_is_first)


CASES = [
    instance((3, 3, 3, 3), 3),
    instance((5, 2, 3, 2), 2, turns=4),
    instance((2, 2, 2), 3),
    instance((1, 4), 2, turns=5),
]


@pytest.mark.parametrize(("seed", "case"), [*enumerate(CASES)], ids=range(len(CASES)))
def test_plans_keep_to_all_rules_are_reproducible_and_beat_the_even_one(case, seed):
    plan = plan_paths(case, seed, work=60)
    require(plan, case)
    assert plan == plan_paths(case, seed, work=60)
    even = Draft(case, case.turns, random.Random(0)).plan()
    assert case.timetable(plan).makespan_s <= case.timetable(even).makespan_s


def every_plan(case):
    """Every plan of one lane and one turn."""
    orders = itertools.permutations(range(1, len(case.serving)), case.terms.visited - 1)
    for order in orders:
        for peers in itertools.product(*(case.serving[stage] for stage in order)):
            stops = (Stop(0, case.serving[0][0]), *map(Stop, order, peers))
            plan = PathPlan(((stops,),), 1)
            try:
                require(plan, case)
            except BadPlan:
                continue
            yield plan


@pytest.mark.parametrize("seed", range(3))
def test_one_lane_gets_the_best_of_all_paths(seed):
    case = instance((1, 3, 3, 3, 3), 4, seed, turns=1)
    every = list(every_plan(case))
    assert len(every) > 300
    best = min(case.timetable(plan).makespan_s for plan in every)
    assert case.timetable(plan_paths(case, 0, work=60)).makespan_s == pytest.approx(best)


@pytest.mark.parametrize("seed", range(2))
def test_two_lanes_get_the_best_pair_of_paths(seed):
    """Each server has room for one microbatch and each lane has one, so on a shared server one of
    them waits."""
    case = instance((2, 2, 2), 3, seed, memory=1, turns=1)
    tails = [
        [Stop(*stop) for stop in zip(order, peers, strict=True)]
        for order in ((1, 2), (2, 1))
        for peers in itertools.product(*(case.serving[stage] for stage in order))
    ]
    plans = [
        PathPlan((((Stop(0, "s0-0"), *one),), ((Stop(0, "s0-1"), *other),)), 1)
        for one, other in itertools.product(tails, repeat=2)
    ]
    assert len(plans) == 64
    best = min(case.timetable(plan).makespan_s for plan in plans)
    assert case.timetable(plan_paths(case, 0, work=200)).makespan_s == pytest.approx(best)


def test_all_stages_without_swaps_is_the_identity():
    plan = plan_paths(instance((2, 2, 2, 2), 4, swaps=False), 0, work=40)
    assert {tuple(stop.stage for stop in path) for path in plan.paths} == {(0, 1, 2, 3)}


def test_another_judge_decides():
    case = instance((2, 3, 3), 2, turns=2)
    asked = []

    def hates_the_first(plan):
        asked.append(plan)
        return float(sum(stop.peer.endswith("-0") for path in plan.paths for stop in path[1:]))

    plan = plan_paths(case, 0, 80, hates_the_first)
    assert not any(stop.peer.endswith("-0") for path in plan.paths for stop in path[1:])
    assert len(asked) <= 80


@pytest.mark.parametrize("work", [4, 30])
def test_no_plan_is_worse_than_the_even_one_by_whatever_judges(work):
    """The judge here likes only the even plan."""
    case = instance((2, 3, 3), 2, turns=2)
    even = Draft(case, case.turns, random.Random(0)).plan()
    assert plan_paths(case, 0, work, lambda plan: float(plan != even)) == even


def test_a_slow_server_is_left_alone_where_another_one_is_there():
    case = instance((2, 2, 2), 3, memory=3)
    slow = Instance(
        case.serving, case.terms, {**case.forward_s, "s1-0": 500.0}, case.transfer_s, 3, 2, 2
    )
    assert all(stop.peer != "s1-0" for path in plan_paths(slow, 0, 60).paths for stop in path)


@pytest.mark.parametrize("head_is_first", [True, False])
def test_of_one_microbatch_the_estimate_is_its_time_and_a_tenth(head_is_first):
    case = instance((1, 2, 2, 2), 3, turns=1, memory=1, head_is_first=head_is_first)
    draft = Draft(case, 1, random.Random(1))
    for _ in range(20):
        draft.apply(draft.propose())
        assert LaneBounds(case)(draft.paths) == pytest.approx(
            1.1 * case.timetable(draft.plan()).makespan_s
        )


def test_the_estimate_sees_lanes_that_are_in_each_others_way():
    case = instance((2, 2), 2, memory=1)
    apart = [(Stop(0, f"s0-{lane}"), Stop(1, f"s1-{lane}")) for lane in range(2)]
    together = [apart[0], (Stop(0, "s0-1"), Stop(1, "s1-0"))]
    level = dict.fromkeys(case.forward_s, dict.fromkeys(case.forward_s, 1.0))
    estimate = LaneBounds(
        Instance(case.serving, case.terms, dict.fromkeys(case.forward_s, 1.0), level, 1, 2, 2)
    )
    assert estimate(together) > 1.3 * estimate(apart)


def test_a_plan_that_never_ends_is_refused():
    case = instance((2, 1, 1), 3, memory=1, turns=1)
    paths = [
        (Stop(0, "s0-0"), Stop(1, "s1-0"), Stop(2, "s2-0")),
        (Stop(0, "s0-1"), Stop(2, "s2-0"), Stop(1, "s1-0")),
    ]
    level = dict.fromkeys(case.forward_s, dict.fromkeys(case.forward_s, 1.0))
    even = Instance(case.serving, case.terms, dict.fromkeys(case.forward_s, 1.0), level, 1, 1, 1)
    with pytest.raises(
        BadPlan, match="memory: 2 microbatches wait for ever, each for room that another one takes"
    ):
        require(PathPlan(tuple((path,) for path in paths), 1), even)
    require(plan_paths(even, 0, 40), even)


def test_too_little_work_is_refused():
    with pytest.raises(ValueError, match="cannot work with 3 judged plans; allow at least 4"):
        plan_paths(CASES[0], 0, work=3)
