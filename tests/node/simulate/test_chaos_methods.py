"""Disasters run every method, each stream's rounds within a few steps of a replica to judge by."""

import pytest
import torch

from farflock.node.simulate.chaos_methods import (
    ARMS,
    PHASES,
    ChaosCase,
    CountingReplica,
    CountingTask,
    case_of,
)
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.method import Progress

FEW_STEPS = 6  # in which each stream has a round


def test_every_method_has_an_arm_and_every_arm_its_turn():
    assert {arm.method for arm in ARMS} == METHODS.keys()
    assert [case_of(seed) for seed in range(len(ARMS), 2 * len(ARMS))] == list(ARMS)


@pytest.mark.parametrize("name", METHODS)
def test_of_one_method_only_its_own_arms_take_turns(name):
    own = [arm for arm in ARMS if arm.method == name]
    assert [case_of(seed, name) for seed in range(2 * len(own))] == own * 2


@pytest.mark.parametrize("arm", ARMS, ids=[arm.method for arm in ARMS])
def test_an_arm_begins_its_rounds_within_a_few_steps(arm):
    method, replica = arm.make(), arm.replica(3)
    training_task, asked = CountingTask(replica), []
    first = min((entry.key for entry in arm.streams()), key=lambda key: key.round, default=None)
    for step in range(FEW_STEPS):
        training_task.forward_backward(step, Progress(step))
        method.local_step(replica, Progress(step, run_time_s=float(step)))
        asked += method.due(replica, Progress(step + 1, run_time_s=float(step + 1)))
    assert [exchange.key for exchange in asked[:1]] == [first] * (first is not None)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("diloco", set()),
        ("edit", set()),
        ("sparseloco", {"reduced"}),
        ("noloco", {"reduced", "vote"}),
        ("local", set(PHASES.values())),
    ],
)
def test_an_arm_knows_the_phases_that_its_exchanges_have(name, missing):
    assert set(case_of(0, name).phases()) == set(PHASES.values()) - missing


def test_a_step_tells_whose_it_was_and_which():
    replica = CountingReplica(2, {"a": 12, "b": 5})
    replica.add_gradient(6)
    replica.inner_step()
    theta, gradient = (replica.read(("a", "b"), what) for what in ("param", "grad"))
    assert theta["a"].nonzero().tolist() == [[2]]
    assert theta["a"][2] == -1
    assert theta["b"].nonzero().tolist() == [[1]]
    assert theta["b"][1] == -0.25
    assert not any(x.any() for x in gradient.values())


def test_what_is_read_is_a_copy_and_moments_are_kept_only_where_they_are_asked_for():
    plain, keeping = ChaosCase("diloco").replica(0), ChaosCase("desloc").replica(0)
    for replica in (plain, keeping):
        replica.add_gradient(0)
        replica.inner_step()
        replica.read(replica.names, "param")["a"].zero_()
        assert replica.read(replica.names, "param")["a"][0] == -1
        replica.write({"a": torch.ones(12)}, "exp_avg_sq")
    assert not plain.read(("a",), "exp_avg")["a"].any()
    assert not plain.read(("a",), "exp_avg_sq")["a"].any()
    assert keeping.read(("a",), "exp_avg")["a"][0] == 0.5
    assert keeping.read(("a",), "exp_avg_sq")["a"].all()
