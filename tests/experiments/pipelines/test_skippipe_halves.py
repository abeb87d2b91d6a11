"""The study of halved models: which paths are measured, and that only the paths differ."""

import math

import pytest

from farflock.experiments.pipelines import skippipe_halves as study
from farflock.experiments.pipelines.skippipe_halves import (
    MICROBATCHES,
    POLICIES,
    STAGES,
    Losses,
    NumberedThrough,
    Size,
    halves,
    trained,
)
from farflock.node.run.policies import policy_of
from farflock.swarm.paths.policy import Microbatch

SHORT = Size(steps=1, batch=1, held_out=2, seeds=[1])


def test_a_half_has_the_ends_and_half_of_all_stages_in_order():
    assert halves() == [(0, 1, 5), (0, 2, 5), (0, 3, 5), (0, 4, 5)]


def test_each_step_trains_every_inner_stage_equally_often():
    skipping = policy_of(POLICIES["trained with skips"], [1] * STAGES, 3, "trainer")
    policy = NumberedThrough(skipping, MICROBATCHES)
    orders = set()
    for step in range(8):
        paths = [policy.stage_order(Microbatch(step, index, 0)) for index in range(MICROBATCHES)]
        visits = [sum(stage in path for path in paths) for stage in range(STAGES)]
        assert visits == [4, 2, 2, 2, 2, 4]
        orders |= set(paths)
    assert len(orders) > MICROBATCHES, "the paths are drawn anew for every step"
    assert [policy.share(stage) * MICROBATCHES for stage in range(STAGES)] == visits


def test_equal_seeds_give_equal_losses_and_other_paths_another_model():
    losses = {name: trained(SHORT, policy, 1) for name, policy in POLICIES.items()}
    assert losses["trained whole"] == trained(SHORT, POLICIES["trained whole"], 1)
    assert losses["trained whole"] != losses["trained with skips"]
    assert len(losses["trained whole"].halves) == 4


def test_rows_are_perplexities_and_what_halving_adds(table, monkeypatch):
    def invented(size, policy, seed):
        return Losses(1.0 + seed, (1.5 + seed, 1.5 + seed, 1.25 + seed, 1.75 + seed))

    monkeypatch.setattr(study, "trained", invented)
    found = table("skippipe-halves", steps=1, seeds=[1, 2])
    assert found["trained whole, whole, perplexity"] == pytest.approx([math.exp(2), math.exp(3)])
    assert found["trained with skips, half, perplexity"] == pytest.approx(
        [math.exp(2.5), math.exp(3.5)]
    )
    assert found["trained with skips, half over whole"] == pytest.approx([math.exp(0.5)] * 2)
    assert found["trained with skips, best half over whole"] == pytest.approx([math.exp(0.25)] * 2)
