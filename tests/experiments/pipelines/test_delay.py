"""The study of late gradients: that it measures lateness and nothing else."""

import math

import pytest
import torch

from farflock.experiments.pipelines import delay as study
from farflock.experiments.pipelines.delay import (
    ARMS,
    COMPARED,
    LATE,
    Arm,
    Late,
    Quadratic,
    Reading,
    Row,
    best,
    closed,
    corrected,
    read,
    settle,
)
from farflock.node.errors import Failure
from farflock.optimizers.parts.corrections import stability_limit

SHORT = Reading(batch=1, seq=16, steps=16, seeds=(1,), sgd_rates=(1.0,), other_rates=(1e-2,), held_out=2)


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_sgd_settles_up_to_the_limit_that_theory_gives(delay):
    assert settle(Arm("plain", "sgd", delay, momentum=0.0), 400).limit == pytest.approx(
        stability_limit(delay), rel=0.011
    )


def test_momentum_settles_up_to_twice_1_plus_m_and_forgets_by_the_root_of_m():
    found = settle(Arm("momentum", "sgd"), 400)
    assert found.limit * (1 - 0.9) == pytest.approx(2 * (1 + 0.9), rel=0.011)
    assert found.half_life == pytest.approx(math.log(2) / -math.log(math.sqrt(0.9)), rel=0.06)


def test_on_quadratics_compensation_and_prediction_bear_longer_steps_than_nothing():
    late, spike, velocity, trend, both = (settle(arm, 400) for arm in corrected(1)[:5])
    assert late.limit < min(spike.limit, velocity.limit) < both.limit
    assert velocity.limit == trend.limit
    assert both.half_life < min(spike.half_life, trend.half_life) < late.half_life


def test_braking_and_adam_are_not_for_quadratics_side_by_side():
    for arm in (Arm("b", "sgd", 1, braking=2.0), Arm("a", "adamw", 1)):
        with pytest.raises(ValueError, match="by itself"):
            settle(arm)


@pytest.mark.parametrize("delay", [0, 1, 4])
def test_a_step_takes_the_gradient_of_the_weights_that_many_steps_ago(delay):
    trainer = Late(
        Quadratic(torch.tensor([1.0], dtype=torch.float64)), Arm("plain", "sgd", delay, momentum=0.0), 0.1, 9
    )
    path = [1.0]
    for step in range(9):
        trainer.step(lambda module: module(), clip_norm=None)
        path.append(path[-1] - 0.1 * path[max(step - delay, 0)])
        assert trainer.module.w.item() == pytest.approx(path[-1], rel=1e-12)


def test_without_a_delay_every_arm_of_sgd_is_the_same_run_to_the_last_bit():
    sgd = [arm for arm in corrected(0) if arm.base == "sgd"]
    assert len({row.loss for row in read(SHORT, sgd)}) == 1


def test_every_arm_runs_and_equal_seeds_give_equal_numbers():
    first = list(read(SHORT, ARMS))
    assert [row.arm for row in first] == [arm.name for arm in ARMS]
    assert all(math.isfinite(row.loss) for row in first)
    assert list(read(SHORT, ARMS[-2:])) == first[-2:]
    losses = {row.arm: row.loss for row in first}
    by_trend, by_velocity = losses.pop("sgd + prediction by trend"), losses.pop("sgd + prediction by velocity")
    assert by_trend == pytest.approx(by_velocity, abs=1e-4)
    assert len({by_trend, *losses.values()}) == len(losses) + 1, "two arms are the same"


def test_another_seed_is_another_run():
    one, two = read(Reading(batch=1, seq=16, steps=2, seeds=(1, 2), sgd_rates=(1.0,), held_out=2), ARMS[:1])
    assert (one.seed, two.seed) == (1, 2)
    assert one.loss != two.loss


def test_what_diverges_has_an_infinite_loss():
    wild = Reading(batch=1, seq=16, steps=12, seeds=(1,), sgd_rates=(1e30,), held_out=2)
    (row,) = read(wild, [Arm("wild", "sgd", LATE)])
    assert row.loss == math.inf


def row(arm, rate, seed, loss):
    return Row(arm, 1, rate, seed, loss, 0.1)


def test_an_arm_is_judged_at_its_best_rate_over_all_seeds():
    rows = [row("a", 1.0, 1, 2.0), row("a", 1.0, 2, 4.0), row("a", 3.0, 1, 1.0), row("a", 3.0, 2, math.inf)]
    a, b = best([*rows, row("b", 1.0, 1, 5.0)])
    assert (a.arm, a.rate, a.loss) == ("a", 1.0, 3.0)
    assert a.by_rate == {1.0: 3.0, 3.0: math.inf}
    assert (b.arm, b.loss) == ("b", 5.0)


def test_the_share_of_a_gap_that_is_closed():
    assert closed(2.0, 3.0, 2.25) == 0.75
    assert closed(2.0, 3.0, 3.5) == -0.5
    assert math.isnan(closed(2.0, 2.0, 1.0))


def test_each_optimizer_is_compared_with_itself_without_delay_and_nadam_has_the_momentum_of_its_source():
    assert len({arm.name for arm in COMPARED}) == len(COMPARED) == 8
    assert {(arm.base, arm.delay) for arm in COMPARED} >= {("adamw", 0), ("nadam", 0), ("muon", 0), ("nadam", 1)}
    assert {arm.momentum for arm in COMPARED if arm.base == "nadam"} == {0.99}


@pytest.fixture
def invented(monkeypatch):
    """Every arm is best at 1e-2, where its loss is its place and a tenth of the seed, and diverges at the rates given."""

    def replace(diverging=()):
        def read(reading, arms):
            for place, arm in enumerate(arms):
                for rate in reading.other_rates:
                    for seed in reading.seeds:
                        loss = math.inf if rate in diverging and seed == 2 else place + seed / 10 + abs(rate - 1e-2)
                        yield Row(arm.name, arm.delay, rate, seed, loss, 0.1)

        monkeypatch.setattr(study, "read", read)

    return replace


def test_rows_are_losses_at_the_best_rate_and_what_lateness_adds(table, invented):
    invented(diverging=[3e-2])
    found = table("delay", rates=[3e-3, 1e-2, 3e-2], seeds=[1, 2])
    assert found["adamw, 0 late"] == pytest.approx([0.1, 0.2])
    assert found["nadam, 4 late"] == pytest.approx([5.1, 5.2])
    assert found["what 1 late costs adamw"] == pytest.approx([1, 1])
    assert found["what 4 late costs nadam"] == pytest.approx([2, 2])
    assert found["what 1 late costs muon"] == pytest.approx([1, 1])
    assert {found[f"{arm.name}, best rate"] for arm in COMPARED} == {1e-2}
    assert len(found) == 8 + 5 + 8


def test_an_arm_that_diverges_at_every_rate_is_no_row_but_a_failure(table, invented):
    invented(diverging=[3e-3, 1e-2])
    with pytest.raises(Failure, match="adamw, 0 late: every rate diverges"):
        table("delay", rates=[3e-3, 1e-2], seeds=[1, 2])


def test_a_short_computation_is_the_short_reading(table):
    found = table("delay", steps=3, rates=[1e-2], held_out=2, seeds=[1])
    reading = Reading(steps=3, seeds=(1,), other_rates=(1e-2,), held_out=2)
    (late,) = (arm for arm in COMPARED if arm.name == "nadam, 1 late")
    (row,) = read(reading, [late])
    assert found["nadam, 1 late"] == [row.loss]
