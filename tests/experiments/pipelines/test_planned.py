"""Our planner on the released instance: its plans keep to the rules, and are held against the
released one in its program."""

import math

import pytest

from farflock.experiments.pipelines import planned, released, skippipe
from farflock.swarm.paths import planner as skip_planner
from farflock.swarm.paths.skippipe import BadPlan


def test_a_released_plan_goes_through_our_types_and_back():
    plan = planned.as_plan(released.COLLISION_AWARE.values())
    assert planned.starts(plan) == list(released.planned_starts(released.COLLISION_AWARE))
    assert planned.simulated_s(plan, released.delays_s()) == skippipe.reproduce()["collision-aware"]


@pytest.mark.parametrize("forward_s", [released.FORWARD_S, released.SCRIPT_FORWARD_S])
def test_our_plan_is_as_good_as_the_released_one(forward_s):
    delays = released.delays_s()
    wanted = planned.instance(delays, forward_s)
    theirs = planned.as_plan(released.COLLISION_AWARE.values())
    ours = skip_planner.plan_paths(wanted, seed=0, work=40)
    skip_planner.require(ours, wanted)
    skip_planner.require(theirs, wanted)
    assert wanted.timetable(ours).makespan_s <= wanted.timetable(theirs).makespan_s + 1e-9
    # the released program rests and starts at other times, which our timetable does not know
    assert planned.simulated_s(ours, delays, forward_s) <= 1.15 * planned.simulated_s(
        theirs, delays, forward_s
    )


def test_judged_by_the_released_program_our_plan_is_no_worse_there():
    delays = released.delays_s()
    wanted = planned.instance(delays)
    theirs, ours = (
        planned.as_plan(released.COLLISION_AWARE.values()),
        planned.judged(seed=0, work=20),
    )
    theirs_s, ours_s = (planned.simulated_s(plan, delays) for plan in (theirs, ours))
    assert ours_s <= theirs_s + 1e-9
    assert theirs_s == skippipe.reproduce()["collision-aware"]
    timed = skip_planner.plan_paths(wanted, seed=0, work=20)
    theirs_s, ours_s, timed_s = (
        wanted.timetable(plan).makespan_s for plan in (theirs, ours, timed)
    )
    assert max(ours_s, timed_s) < 1.05 * theirs_s


def test_a_plan_of_which_the_program_forgets_a_part_counts_as_endless(monkeypatch):
    plan = planned.as_plan(released.COLLISION_AWARE.values())
    outcome = skippipe.simulate(planned.starts(plan), released.delays_s())
    monkeypatch.setattr(
        planned, "simulate", lambda *_: skippipe.Outcome(outcome.finished_s, (7,), outcome.worked)
    )
    assert planned.simulated_s(plan, released.delays_s()) == math.inf


def test_the_data_nodes_never_hand_to_the_mistaken_link():
    delays = released.delays_s()
    plan = skip_planner.plan_paths(planned.instance(delays), seed=3, work=10)
    for path in plan.paths:
        hops = [planned.NAMES.index(stop.peer) for stop in path]
        assert all(
            delays[here][there] < 5 for here, there in zip(hops, [*hops[1:], hops[0]], strict=True)
        )


def test_full_pipelines_are_no_plan_that_skips():
    full = planned.as_plan(released.FULL.values())
    with pytest.raises(BadPlan, match="skip ratio: a path takes 6 stages of 6"):
        skip_planner.require(full, planned.instance(released.delays_s()))
