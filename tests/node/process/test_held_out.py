"""The held-out text comes in the background, and the last good checkpoint is named at the end."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from worlds.prepared import documents_of, prepared

from farflock.node.assembly.checkpoints import CheckpointManager, last_good
from farflock.node.assembly.node import replica_node
from farflock.node.assembly.text import listed_text
from farflock.node.data.index import BadIndex, read_index
from farflock.node.data.local_data import LocalData
from farflock.node.data.sequences import PackedBatches
from farflock.node.errors import Failure
from farflock.node.model.corpus import load_corpus
from farflock.node.process import held_out as module
from farflock.node.process.held_out import (
    bring_held_out,
    gone_wrong,
    leave_out,
    require_unended,
    require_well,
)
from farflock.node.run.evaluation_section import EvaluationSection, GuardSection
from farflock.node.run.manifest import resolve
from farflock.node.state import checkpoint
from farflock.node.state.paths import RunFolder
from farflock.node.train.guard import Alarm
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual

MANIFEST = resolve({"evaluation": {"sequences": 8}, "train": {"seq": 32}})


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    """Work is done at once: virtual time does not wait for threads."""
    monkeypatch.setattr(asyncio, "to_thread", inline)


def on(bench, work, **options):
    """Run `work` with a lone node of an evaluated run."""

    async def main():
        bench.plan = dataclasses.replace(
            bench.plan, evaluation=EvaluationSection(1, 8), guard=GuardSection("end")
        )

        async def train(step):
            loss = step()
            await asyncio.sleep(0.5)
            return loss

        async with bench.peer(0).running() as peer:
            node = replica_node(
                bench.plan, peer, bench.text, compute=inline, train=train, **options
            )
            node.found()
            return await work(node)

    return run_virtual(main())


def test_the_shipped_text_is_there_at_once(bench, text):
    async def work(node):
        assert node.evaluator.measuring.meter is None
        await bring_held_out(node, MANIFEST, None)
        await node.run(640)
        return node.evaluator

    evaluator = on(bench(text, period=4), work)
    assert evaluator.newest.sequences == 8
    assert evaluator.newest.loss < 6
    assert evaluator.newest.gradient_norm > 0
    assert 0 < evaluator.newest.busy <= 1
    assert evaluator.newest.tokens_per_s == pytest.approx(128, rel=0.2)


def test_a_run_without_evaluations_needs_no_held_out_text(bench, text, monkeypatch):
    monkeypatch.setattr(module, "held_out_here", lambda *_: pytest.fail("it is read"))
    asyncio.run(bring_held_out(SimpleNamespace(evaluator=None), MANIFEST, None))

    async def work(node):
        node.evaluator = None
        await bring_held_out(node, MANIFEST, None)

    on(bench(text, period=4), work)


def test_what_cannot_be_had_is_said_and_tried_again(bench, text, monkeypatch):
    here, tries = module.held_out_here, []

    def fails_once(*given):
        tries.append(given)
        if len(tries) == 1:
            raise BadIndex("it is not here; wait")
        return here(*given)

    monkeypatch.setattr(module, "held_out_here", fails_once)

    async def work(node):
        bringing = asyncio.create_task(bring_held_out(node, MANIFEST, None))
        await asyncio.sleep(module.AGAIN_S / 2)
        assert node.evaluator.measuring.unable == "it is not here; wait"
        await bringing
        assert node.evaluator.measuring.meter is not None

    on(bench(text, period=4), work)


def test_a_text_without_held_out_tokens_is_given_up(bench, text, monkeypatch):
    monkeypatch.setattr(module, "held_out_here", lambda *_: load_corpus("shakespeare").train[:3])

    async def work(node):
        await bring_held_out(node, MANIFEST, None)
        assert "too few" in node.evaluator.measuring.unable

    on(bench(text, period=4), work)


def test_held_out_shards_are_fetched(bench, text, tmp_path):
    prepared(tmp_path, {"web": documents_of(300)}, shards=2)
    index = read_index((tmp_path / "index.json").read_bytes(), "the index")
    root = resolve({"data": {"from": str(tmp_path)}}).data.root
    local = LocalData(root, [tmp_path], tmp_path / "cache", None)
    local.index_bytes()
    shards, brought = listed_text(index, local, None), []

    async def bring(shard):
        brought.append(shard)

    async def work(node):
        node.training_task.batches = PackedBatches(shards, 1, "me", 2, 32)
        await bring_held_out(node, MANIFEST, SimpleNamespace(bring=bring))
        wanted = [shard for source in index.sources.values() for shard in source.held_out]
        assert brought == wanted
        assert (node.evaluator.measuring.meter is not None) == bool(wanted)

    on(bench(text, period=4), work)


def test_a_run_that_its_guard_ended_names_the_last_good_checkpoint(bench, text, tmp_path):
    async def work(node):
        keeper = CheckpointManager(node, RunFolder(tmp_path), "a" * 32, "text", 0.0, keep=1)
        keeper.good_round = lambda: 1
        applied = {}

        async def pause():
            await node.evaluator.between_steps()
            await keeper.save()
            applied[node.step] = node.evaluator.applied

        node.loop.pause = pause
        await bring_held_out(node, MANIFEST, None)
        await node.run(1600)
        require_well(node, [keeper])  # it is well
        good = f"step-{max(step for step, at in applied.items() if at <= 1)}"
        left = {path.name for path in tmp_path.joinpath("checkpoints").glob("step-*")}
        assert good in left
        assert len(left) == 2
        node.evaluator.ended_by = Alarm("rising", 5, 1, "the loss rose")
        with pytest.raises(
            Failure, match=rf"gone wrong: the loss rose; .*{good}; export it"
        ) as told:
            require_well(node, [keeper])
        (aside,) = keeper.folder.checkpoints.glob("*.gone-wrong-1")
        assert f"; {aside} came later, and nothing resumes from there" in str(told.value)
        assert [path.name for _, path in checkpoint.steps(keeper.folder.checkpoints)] == [good]
        node.evaluator.ended_by = Alarm("rising", 5, None, "the loss rose")
        assert "no checkpoint here is from before" in str(gone_wrong(node, [keeper], "x"))
        assert last_good(keeper.folder.checkpoints, -5) is None

    on(bench(text, period=4), work)


class Ended:
    """A node's folder after a run with checkpoints of these steps and rounds."""

    RUN = "a" * 32

    def __init__(self, path, steps):
        self.folder = RunFolder(path)
        for step, applied in steps.items():
            self.write(step, applied)

    def write(self, step, applied, **more):
        cursors = {"place": {"rounds": {"model": applied}}}
        meta = {"run": self.RUN, "node": cursors, **more}
        checkpoint.save(self.folder.checkpoints, step, {"model": {"w": torch.ones(2)}}, meta)

    @property
    def names(self):
        return sorted(path.name for path in self.folder.checkpoints.iterdir())


def test_what_is_newer_than_the_last_good_checkpoint_is_set_aside_and_never_deleted(tmp_path):
    ended = Ended(tmp_path, {10: 1, 20: 2, 30: 3})
    ended.write(40, 4, ended_by={"round": 4, "good": 2, "reason": "the loss rose"})
    require_unended(ended.folder, "b" * 32)  # another run, which `last_of` refuses
    left = leave_out(ended.folder, 2)
    assert [path.name for path in left] == ["step-30.gone-wrong-1", "step-40.gone-wrong-1"]
    assert ended.names == ["step-10", "step-20", "step-30.gone-wrong-1", "step-40.gone-wrong-1"]
    newest = checkpoint.latest(ended.folder.checkpoints)
    assert newest is not None
    assert newest.step == 20
    assert checkpoint.load(left[1]).meta["ended_by"]["good"] == 2  # it can still be exported
    checkpoint.prune(ended.folder.checkpoints, keep=1)
    assert ended.names == ["step-20", "step-30.gone-wrong-1", "step-40.gone-wrong-1"]


def test_a_founder_does_not_begin_again_what_its_guard_has_ended(tmp_path):
    ended = Ended(tmp_path, {20: 2})
    require_unended(ended.folder, Ended.RUN)
    ended.write(40, 4, ended_by={"round": 4, "good": 2, "reason": "the loss rose"})
    # a process that was killed before it could set anything aside
    said = r"ended this run: the loss rose; export \S+step-20 and begin .* learning rate, or, to"
    with pytest.raises(Failure, match=rf"{said} go on from step-20 .* \S+step-40\.gone-wrong-1 "):
        require_unended(ended.folder, Ended.RUN)
    with pytest.raises(Failure, match=said):
        require_unended(ended.folder, Ended.RUN)
    require_unended(ended.folder, "b" * 32)  # another run in the same folder
    (tmp_path / "elsewhere").mkdir()
    for path in checkpoint.steps_aside(ended.folder.checkpoints, "gone-wrong"):
        path.rename(tmp_path / "elsewhere" / path.name)
    require_unended(ended.folder, Ended.RUN)
    assert ended.names == ["step-20"]


def test_without_a_good_checkpoint_a_founder_is_told_to_begin_another_run(tmp_path):
    ended = Ended(tmp_path, {40: 4})
    leave_out(ended.folder, None)
    with pytest.raises(Failure, match=r"had gone wrong; begin another run, with .* this one again"):
        require_unended(ended.folder, Ended.RUN)


def test_a_checkpoint_that_cannot_be_set_aside_stays_and_is_named(tmp_path, caplog, monkeypatch):
    ended = Ended(tmp_path, {10: 1, 20: 2})

    def refuse(path, reason):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint, "put_aside", refuse)
    assert leave_out(ended.folder, 1) == []
    assert "step-20 is from after the trouble, and stays (Permission denied)" in caplog.text


def test_a_checkpoint_has_the_newest_evaluation(bench, text, tmp_path):
    async def work(node):
        keeper = CheckpointManager(node, RunFolder(tmp_path), "a" * 32, "text", 0.0)
        keeper.facts = node.evaluator.facts
        assert "evaluation" not in keeper.facts()  # a cut that nobody reads would hold training up
        await bring_held_out(node, MANIFEST, None)
        await node.run(640)
        said = keeper.cut().meta["evaluation"]
        assert said["by"] == node.peer.me
        assert said["loss"] == node.evaluator.newest.loss
        assert set(said) == {"round", "by", "loss", "standard_error", "sequences", "tokens"}
        assert "ended_by" not in keeper.facts()
        node.evaluator.ended_by = Alarm("rising", 5, 1, "the loss rose")
        told = {"round": 5, "good": 1, "reason": "the loss rose"}
        assert keeper.facts()["ended_by"] == told

    on(bench(text, period=4), work)
