"""The node's loop and the bare loop take the same steps, and are compared in processor time."""

import importlib
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from farflock.experiments.bench import loop
from farflock.experiments.bench.workers import loop_process
from farflock.experiments.bench.workers.bare import Bare, plan_of
from farflock.node.data.samples import text_in_memory
from farflock.node.model.corpus import SHIPPED, load_corpus
from farflock.node.tokens.tokenizer import ByteTokenizer
from farflock.swarm.sim.virtual_time import run_virtual


@pytest.fixture(scope="module")
def tokens():
    return text_in_memory(ByteTokenizer().encode(load_corpus(SHIPPED).train[:50_000]))


@pytest.mark.net
@pytest.mark.ci_more
@pytest.mark.usefixtures("forked")
def test_the_ratio_and_the_time_outside_of_the_training_thread(quick):
    ratio, outside = loop.run(quick())
    assert (ratio.metric, outside.metric) == ("loop", "loop.outside")
    assert 0 < ratio.value < math.inf
    assert 0 < ratio.yardstick < math.inf
    assert 0 < ratio.ratio < math.inf
    assert 0 < outside.value < math.inf
    assert ratio.n == outside.n == 2


def test_a_turn_splits_the_processor_time_by_threads(tokens):
    async def turns():
        with ThreadPoolExecutor(1) as thread:
            return [turn async for turn in loop_process.measured(loop_process.QUICK, thread)]

    first, second = run_virtual(turns())
    for turn in (first, second):
        parts = turn["train_s"] + turn["loop_s"] + turn["other_s"]
        assert parts == pytest.approx(turn["ours_s"])
        assert 0 < turn["train_s"] < turn["ours_s"]
        assert turn["loop_s"] > 0


def test_node_and_bare_loop_come_to_the_same_loss(tokens):
    plan = plan_of("tiny", 2, 16, "local")

    async def losses():
        async with loop_process.alone(plan, tokens) as (node, _):
            await node.loop.run(7 * 2 * 16)
            bare = Bare(plan, tokens, node.peer.me)
            bare.train(4)
            bare.train(3)
            return node.loop.step, node.loop.losses.last, bare.loss

    steps, ours, theirs = run_virtual(losses())
    assert steps == 7
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_the_bare_loop_learns(tokens):
    bare = Bare(plan_of("tiny", 2, 16, "local"), tokens, "a")
    bare.train(1)
    before = bare.loss
    bare.train(120)
    assert bare.loss < before - 0.5


def test_the_bare_loop_clips_only_where_the_plan_does(tokens):
    plan = plan_of("tiny", 2, 16, "local")
    clipped, free = (
        Bare(replace(plan, clip_norm=1e-6), tokens, "a"),
        Bare(replace(plan, clip_norm=None), tokens, "a"),
    )
    for bare in (clipped, free):
        bare.train(20)
    assert clipped.loss != free.loss


@pytest.mark.parametrize("ours", [None, 2.01, math.nan])
def test_loops_that_did_not_train_alike_are_not_compared(ours):
    with pytest.raises(loop_process.Unalike):
        loop_process.require_alike(ours, 2.0)


def test_nothing_of_a_lone_node_is_left_behind(tokens, tmp_path, monkeypatch):
    # which a first optimizer step imports, and which makes a folder of its own
    importlib.import_module("torch._dynamo")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def live():
        async with loop_process.alone(plan_of("tiny", 2, 16, "local"), tokens) as (node, _):
            await node.loop.run(32)
            assert list(tmp_path.iterdir())

    run_virtual(live())
    assert not list(tmp_path.iterdir())
