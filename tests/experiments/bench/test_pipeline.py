"""The benchmark of pipelines: what it compares, and small runs of both metrics."""

import math
import re

import pytest

from farflock.experiments.bench import pipeline
from farflock.experiments.bench.pipeline import FULL, QUICK, STAGES, WIDE, Unlike, tokens_metric
from farflock.experiments.bench.workers.pipeline_peer import (
    Gate,
    PlainLoop,
    corpus,
    pipeline_of,
    plan_of,
)
from farflock.swarm.peer import left


def answers(tokens, *cpu_s):
    return [{"tokens": tokens, "cpu_s": each} for each in cpu_s]


def test_tokens_are_counted_once_in_the_pipeline_and_at_each_plain_loop():
    turn = (answers(600, 1.0, 2.0, 3.0), answers(600, 2.0, 3.0, 4.0))
    metric = tokens_metric("pipeline.tokens", FULL, [turn, turn, turn])
    assert (metric.value, metric.yardstick, metric.ratio, metric.n) == (100.0, 200.0, 0.5, 3)
    assert "0.17 : 0.33 : 0.50" in metric.note


def test_arms_that_trained_unlike_each_other_are_not_compared():
    with pytest.raises(Unlike):
        tokens_metric(
            "pipeline.tokens", FULL, [(answers(600, 1.0, 1.0, 1.0), answers(500, 1.0, 1.0, 1.0))]
        )


def test_a_gate_lets_a_number_of_microbatches_begin():
    gate = Gate()
    assert not gate.may_begin()
    gate.left = 2
    assert [gate.may_begin() for _ in range(3)] == [True, True, False]


def test_the_wide_model_is_that_of_the_small_one_seven_times():
    assert 6.5 < WIDE.model.parameters() / FULL.model.parameters() < 7.5
    assert (WIDE.batch, WIDE.seq, WIDE.microbatches) == (FULL.batch, FULL.seq, FULL.microbatches)


@pytest.mark.parametrize("size", [FULL, WIDE, QUICK])
def test_both_arms_take_the_same_steps(size):
    plan = plan_of(size.model, size.batch, size.seq)
    staged = pipeline_of(plan, STAGES, size.microbatches)
    assert staged.batch_tokens == size.microbatches * size.batch * size.seq
    assert [len(span) for span in staged.stages] == [size.model.layers // STAGES] * STAGES


def test_a_plain_step_takes_the_whole_batch():
    plan = plan_of(QUICK.model, QUICK.batch, QUICK.seq)
    loop = PlainLoop(plan, 3, corpus(), number=0)
    before = [weight.detach().clone() for weight in loop.model.parameters()]
    assert loop.train(2) > 0
    assert loop.begun == 6
    after = loop.model.parameters()
    assert any(not old.equal(new) for old, new in zip(before, after, strict=True))


def test_utilisation_lies_between_nothing_and_all(quick):
    (metric,) = pipeline.run(quick("pipeline.utilisation"))
    assert (metric.metric, metric.yardstick) == ("pipeline.utilisation", 5.0)
    assert 0 < metric.ratio <= 1


@pytest.mark.long
def test_payloads_that_the_trainer_does_not_carry_save_its_line(quick, monkeypatch):
    monkeypatch.setattr(left, "MIN_LEFT_BYTES", 1)
    (metric,) = pipeline.run(quick("pipeline.direct"))
    assert metric.metric == "pipeline.direct"
    up, down, up_before, down_before = map(
        int, re.findall(r"(\d+)(?: kB up| down| and|(?= where))", metric.note)
    )
    assert (up < up_before, down < down_before) == (True, True)
    assert metric.ratio > 0


@pytest.mark.ci_more
@pytest.mark.net
@pytest.mark.usefixtures("forked")
def test_processes_train_a_small_pipeline(quick):
    (metric,) = pipeline.run(quick("pipeline.tokens"))
    assert metric.metric == "pipeline.tokens"
    assert 0 < metric.value < math.inf
    assert 0 < metric.ratio < math.inf
