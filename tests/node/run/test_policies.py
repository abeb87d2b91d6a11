"""Path policies by name: what there is, what each stage sees of a run, and lanes that differ."""

from fractions import Fraction

import pytest

from farflock.node.run.planned_paths import plan_of_texts
from farflock.node.run.policies import (
    NAMES,
    PLANNED,
    POLICIES,
    UnknownPolicy,
    lane_of,
    policy_of,
    shares_of,
)
from farflock.swarm.paths.checkfree import BadSwap, SwappedPaths
from farflock.swarm.paths.partial_paths import BadSkip, PartialPaths
from farflock.swarm.paths.skippipe import BadPlan, PlannedPaths

LAYERS = (1, 2, 2, 1)


@pytest.mark.parametrize("name", POLICIES)
def test_those_that_visit_every_stage_say_so(name):
    assert shares_of(name, LAYERS) == (1, 1, 1, 1)


def test_a_policy_that_skips_names_how_many_stages_it_visits():
    assert isinstance(policy_of("skip:3", LAYERS, 1, "me"), PartialPaths)
    assert isinstance(policy_of("swap", LAYERS, 1, "me"), SwappedPaths)
    assert shares_of("skip:3", LAYERS) == (1, Fraction(1, 2), Fraction(1, 2), 1)
    assert shares_of("skip:4", LAYERS) == (1, 1, 1, 1)
    assert NAMES[-1] == "skip:K"


@pytest.mark.parametrize(
    "name",
    [
        "skip",
        "skip:",
        "skip:x",
        "skip:-3",
        "skip:3.0",
        "skip:\u0663",
        "skip:99999",
        "skip:5",
        "skip:2",
    ],
)
def test_how_many_cannot_be_visited_is_refused(name):
    with pytest.raises(BadSkip):
        policy_of(name, LAYERS, 1, "me")


def test_what_is_not_known_or_does_not_fit_the_stages_is_refused():
    with pytest.raises(UnknownPolicy, match="'swrm' is not known"):
        policy_of("swrm", LAYERS, 1, "me")
    with pytest.raises(BadSwap):
        policy_of("swap", (1, 1, 1), 1, "me")


def test_planned_paths_go_with_their_policy_and_no_other():
    paths = plan_of_texts([["0:0 1:0 3:0", "0:0 2:0 3:0"]])
    assert isinstance(policy_of(PLANNED, LAYERS, 1, "me", paths), PlannedPaths)
    assert shares_of(PLANNED, LAYERS, paths) == (1, Fraction(1, 2), Fraction(1, 2), 1)
    with pytest.raises(BadPlan, match="policy planned has no paths to follow"):
        policy_of(PLANNED, LAYERS, 1, "me")
    with pytest.raises(BadPlan, match="policy 'swarm' does not use the planned paths"):
        policy_of("swarm", LAYERS, 1, "me", paths)


def test_trainers_lanes_differ_and_stay():
    assert len({lane_of(f"peer{number}") % 3 for number in range(20)}) == 3
    assert lane_of("peer") == lane_of("peer")
