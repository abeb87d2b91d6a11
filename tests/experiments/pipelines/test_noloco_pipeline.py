"""The study of a grid of replicas: its periods, its measures, and that a server has one microbatch
a step."""

import math
from functools import partial

import msgspec
import pytest
import torch

from farflock.experiments.pipelines import noloco_pipeline as study
from farflock.experiments.pipelines.noloco_pipeline import (
    ARMS,
    RANDOM,
    Grid,
    Merges,
    Outcome,
    Size,
    replicas_loss,
    spread,
)
from farflock.node.model.llama import build
from farflock.node.run.split import even
from farflock.swarm.sim.virtual_time import run_virtual


@pytest.mark.parametrize(("replicas", "period", "other"), [(2, 1, 1), (4, 16, 24), (8, 16, 28)])
def test_at_equal_bytes_diloco_s_period_is_longer_by_what_a_round_sends(replicas, period, other):
    steps = math.lcm(period, other)
    size = Size(replicas=replicas, steps=steps, period=period, seeds=[1])
    assert size.all_reduce_period == other
    assert {arm.options(size)["period"] for arm in ARMS} == {period, other}


@pytest.mark.parametrize(("replicas", "steps", "period"), [(4, 32, 16), (4, 6, 3), (2, 3, 2)])
def test_sizes_at_which_a_method_would_not_end_with_a_round_are_refused(replicas, steps, period):
    given = {"replicas": replicas, "steps": steps, "period": period, "seeds": [1]}
    with pytest.raises(msgspec.ValidationError, match="both methods must end with a round"):
        msgspec.convert(given, Size)


def test_a_spread_is_a_weight_s_standard_deviation_over_the_servers_of_its_stage():
    one, other = {"w": torch.tensor([1.0, 5.0])}, {"w": torch.tensor([3.0, 5.0])}
    alone = {"v": torch.tensor([7.0, 7.0])}
    assert spread({0: {"a": one, "b": other}}) == pytest.approx(math.sqrt(1 / 2))
    assert spread({0: {"a": one, "b": other}, 1: {"c": alone}}) == pytest.approx(math.sqrt(1 / 4))


def test_a_merge_is_measured_once_all_servers_have_made_it():
    merges = Merges(servers=2)
    merges.note(16, 0, "a", {"w": torch.zeros(1)})
    merges.note(32, 0, "a", {"w": torch.zeros(1)})
    assert merges.spreads == []
    merges.note(16, 0, "b", {"w": torch.full((1,), 2.0)})
    assert merges.spreads == [1.0]
    assert sorted(merges.last[0]) == ["a", "b"]


def test_a_replica_is_a_server_of_each_stage_and_the_loss_their_mean():
    def stages(seed):
        whole = dict(build(study.MODEL, seed).named_parameters())
        own = [build(study.MODEL, seed, span) for span in even(study.MODEL, study.STAGES)]
        return [{name: whole[name].detach() for name, _ in part.named_parameters()} for part in own]

    first, second = stages(1), stages(2)
    alike = {stage: {"a": first[stage], "b": first[stage]} for stage in range(study.STAGES)}
    apart = {stage: {"a": first[stage], "b": second[stage]} for stage in range(study.STAGES)}
    other = {stage: {"a": second[stage]} for stage in range(study.STAGES)}
    expected = (replicas_loss(alike, 2) + replicas_loss(other, 2)) / 2
    assert replicas_loss(apart, 2) == pytest.approx(expected)


def test_each_server_has_one_microbatch_a_step_and_random_paths_cross():
    """Two replicas: the last stage's servers have microbatches of both trainers."""
    size = Size(replicas=2, steps=8, period=4, batch=1, held_out=2, seeds=[1])
    taken, callers = [], set()

    class Watched(Grid):
        def watch(self, number, node):
            super().watch(number, node)
            for serving in node.servings:
                accounts = serving.server.accounts
                accounts.take = partial(self.taking, number, accounts, accounts.take)

        def taking(self, number, accounts, take):
            callers.update((number, trainer) for trainer, _ in accounts.sums.rounds)
            found = take()
            taken.append(found.staged.tokens // study.SEQ)
            return found

    async def whole():
        return await Watched(size, RANDOM, 1).run()

    grid = run_virtual(whole())
    assert taken == [1] * (size.steps * size.replicas * study.STAGES)
    assert len(callers) == 2 + 4, "the first stage holds its own lanes, the last one both"
    assert grid.merges.spreads == [0.0, 0.0], "two that always meet are equal afterwards"


def test_rows_are_of_all_arms_and_seeds(table, monkeypatch):
    monkeypatch.setattr(
        study, "trained", lambda size, arm, seed: Outcome(float(seed), [0.1, 0.3], 2e6)
    )
    found = table("noloco-pipeline", steps=48, period=16, seeds=[1, 2])
    assert len(found) == 5 * len(ARMS)
    assert found["DiLoCo, fixed paths, loss"] == [1.0, 2.0]
    assert found["NoLoCo, random paths, perplexity"] == pytest.approx([math.e, math.e**2])
    assert found["NoLoCo, random paths, spread"] == pytest.approx([0.2, 0.2])
    assert found["NoLoCo, fixed paths, spread at the end"] == [0.3, 0.3]
    assert found["NoLoCo, fixed paths, MB of merges a server"] == [2.0, 2.0]
