"""A node's checkpoints: the times at which they are written, which are kept, and which one a
restart continues from."""

import asyncio
import itertools
import logging
import threading
from functools import partial

import pytest
import safetensors.torch
import torch

from farflock.node.assembly.checkpoints import KEPT, CheckpointManager, last_of, members_of
from farflock.node.assembly.resume import checkpoint_state
from farflock.node.pipeline.contrib.stash import swapped
from farflock.node.process.disk import checkpoint_bytes
from farflock.node.state import checkpoint
from farflock.node.state import cut as cuts
from farflock.node.state.checkpoint import CheckpointCorrupt, CheckpointError
from farflock.node.state.cut import raw
from farflock.node.state.paths import RunFolder
from farflock.node.train.run_size import exchanged
from farflock.optimizers.catalog import METHODS
from farflock.optimizers.parts import blocks
from farflock.optimizers.parts.state import state_hash
from farflock.optimizers.parts.stateful import live_state
from farflock.optimizers.trial_options import law_options
from farflock.swarm.compute import Worker
from farflock.swarm.sim.virtual_time import run_virtual

pytestmark = pytest.mark.net


def kept_by(bench, text, folder, every_s, work, run="a" * 32):
    """A keeper of one node, and what `work(keeper, node)` did with it."""
    made = bench(text, "local")

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            keeper = CheckpointManager(node, RunFolder(folder), run, "text", every_s)
            await work(keeper, node)

    asyncio.run(main())  # real time: checkpoints are written by a thread


def test_every_step_is_a_checkpoint_where_no_time_is_to_pass_and_the_last_ones_are_kept(
    bench, text, tmp_path
):
    async def work(keeper, node):
        for step in range(KEPT + 2):
            node.loop.step = step
            await keeper.pause()
            await keeper.written()

    kept_by(bench, text, tmp_path, 0.0, work)
    assert [step for step, _ in checkpoint.steps(tmp_path / "checkpoints")] == list(
        range(2, KEPT + 2)
    )


def test_nothing_is_written_before_its_time(bench, text, tmp_path):
    async def work(keeper, node):
        await keeper.pause()

    kept_by(bench, text, tmp_path, 1000.0, work)
    assert not checkpoint.steps(tmp_path / "checkpoints")


def test_a_step_that_has_a_checkpoint_is_not_written_again(bench, text, tmp_path):
    async def work(keeper, node):
        first = await keeper.save()
        stamp = (first / "manifest.json").stat().st_mtime_ns
        assert await keeper.save() == first
        assert (first / "manifest.json").stat().st_mtime_ns == stamp

    kept_by(bench, text, tmp_path, 0.0, work)


def test_a_disk_that_fails_does_not_end_the_training(bench, text, tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise CheckpointError("no room on the disk for it")

    async def work(keeper, node):
        monkeypatch.setattr(checkpoint, "save", full)
        await keeper.pause()
        await keeper.written()
        with pytest.raises(CheckpointError, match="no room"):
            await keeper.save()

    with caplog.at_level(logging.WARNING, logger="farflock"):
        kept_by(bench, text, tmp_path, 0.0, work)
    assert "could not write a checkpoint" in caplog.text


def test_an_old_checkpoint_that_cannot_be_deleted_ends_neither_the_training_nor_the_save(
    bench, text, tmp_path, monkeypatch, caplog
):
    def refuse(*arguments):
        raise PermissionError("not yours")

    async def work(keeper, node):
        monkeypatch.setattr(checkpoint, "prune", refuse)
        assert (await keeper.save()).name == "step-0"
        assert keeper.progress.share == 1.0

    with caplog.at_level(logging.WARNING, logger="farflock"):
        kept_by(bench, text, tmp_path, 0.0, work)
    assert "could not be deleted, and stays: not yours" in caplog.text


def test_in_the_middle_of_a_long_step_the_state_before_it_is_saved(bench, text, tmp_path):
    """The step changes the state only once it has its gradients; a method that keeps these is
    waited for."""
    begun, over = threading.Event(), threading.Event()

    async def work(keeper, node):
        before = {name: x.detach().clone() for name, x in node.model.named_parameters()}
        local_step, trainer = node.loop.driver.local_step, Worker("train")

        def slow(progress):
            begun.set()
            over.wait()
            local_step(progress)

        node.loop.driver.local_step, node.loop.train = slow, trainer
        node.peer.found()
        node.state_sync.open()
        running = asyncio.create_task(node.loop.run(10**9))
        await asyncio.to_thread(begun.wait)
        saved = checkpoint.load(await keeper.save())
        assert saved.step == 0
        assert all(torch.equal(saved.groups["model"][name], x) for name, x in before.items())
        node.loop.stop()
        over.set()
        await running
        assert (await keeper.save()).name == "step-1"
        trainer.close()

    kept_by(bench, text, tmp_path, 0.0, work)


def test_a_new_start_takes_the_newest_whole_checkpoint_of_its_own_run(bench, text, tmp_path):
    async def work(keeper, node):
        for node.loop.step in (1, 2):
            await keeper.save()

    kept_by(bench, text, tmp_path, 0.0, work, run="b" * 32)
    folder = RunFolder(tmp_path)
    assert last_of(folder, "b" * 32).step == 2
    with pytest.raises(
        CheckpointError, match=r"step-2 belongs to another run .* choose another --folder"
    ):
        last_of(folder, "c" * 32)
    (folder.checkpoints / "step-2" / "method.safetensors").write_bytes(b"broken")
    assert last_of(folder, "b" * 32).step == 1
    (folder.checkpoints / "step-1" / "method.safetensors").write_bytes(b"broken")
    with pytest.raises(
        CheckpointCorrupt,
        match=r"no checkpoint in .* is intact; restore one from a copy, or move them",
    ):
        last_of(folder, "b" * 32)


def test_an_empty_folder_has_none(tmp_path):
    assert last_of(RunFolder(tmp_path), "b" * 32) is None


def test_what_is_written_says_where_the_run_is(bench, text, tmp_path):
    made = bench(text, "local")

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            assert members_of(peer) == ()
            node.peer.found()
            node.state_sync.open()
            await node.loop.run(640)
            return node

    node = run_virtual(main())
    members = partial(members_of, node.peer)
    keeper = CheckpointManager(node, RunFolder(tmp_path), "a" * 32, "text", 0.0, members=members)
    keeper.model = node.model.config
    saved = checkpoint.load(asyncio.run(keeper.save()))
    assert saved.meta["tokens"] == 640
    assert saved.meta["step"] == saved.step == node.loop.step
    assert saved.meta["manifest"] == "text"
    assert saved.meta["members"] == [made.identities[0].peer]
    assert b"hidden_size" in saved.files["config.json"] or b"dim" in saved.files["config.json"]


def take(pieces, count=None):
    """The next pieces of a cut, as bytes."""
    return b"".join(bytes(raw(piece)) for _, piece in itertools.islice(pieces, count))


def expected_bytes(plan):
    """What a checkpoint may take, as it is reckoned, and the heads of its parts."""
    return checkpoint_bytes(plan, exchanged(plan)) + 64 * 1024


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_checkpoint_is_of_the_moment_at_which_it_was_begun(
    bench, text, tmp_path, monkeypatch, method
):
    """Of each part a piece is read after a step; each change saves what is not read."""
    monkeypatch.setattr(cuts, "PIECE_BYTES", 4096)
    monkeypatch.setattr(blocks, "BLOCK_VALUES", 256)  # larger tensors are cut as they are stored
    made = bench(text, method, **law_options(METHODS[method]))
    expected, found, readers = {}, {}, {}

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            keeper = CheckpointManager(node, RunFolder(tmp_path), "a" * 32, "text", 0.0)

            async def pause():
                if node.loop.step == 10:
                    for name, part in checkpoint_state(node)[0].items():
                        expected[name] = safetensors.torch.save(dict(part))
                    for name, cut in keeper.cut().groups.items():
                        found[name], readers[name] = cut.head, cut.read()
                for name, reader in readers.items():
                    found[name] += take(reader, 1)

            node.peer.found()
            node.state_sync.open()
            node.loop.pause = pause
            await node.loop.run(1400)

    run_virtual(main())
    left = {name: take(reader) for name, reader in readers.items()}
    assert left["inner"], "nothing was left to read"
    assert {name: found[name] + left[name] for name in readers} == expected
    assert sum(map(len, expected.values())) <= expected_bytes(made.plan)


def test_a_checkpoint_of_a_stage_is_of_its_own_weights_and_not_of_those_of_a_pass(
    bench, text, tmp_path
):
    made, begun, over = bench(text, "local"), threading.Event(), threading.Event()

    async def main():
        async with made.peer(0).running() as peer:
            node, passes = made.node(peer), Worker("stage")
            keeper = CheckpointManager(
                *(node, RunFolder(tmp_path), "a" * 32, "text", 0.0), compute=passes
            )
            own = {name: x.detach().clone() for name, x in node.model.named_parameters()}

            def compute():
                with swapped(node.model, {name: torch.zeros_like(x) for name, x in own.items()}):
                    begun.set()
                    over.wait()

            passing = asyncio.ensure_future(passes(compute))
            await asyncio.to_thread(begun.wait)
            pausing = asyncio.create_task(keeper.pause())
            await asyncio.sleep(0.05)
            assert not pausing.done(), "a pass is under way"
            over.set()
            await asyncio.gather(passing, pausing)
            assert keeper.writing
            with swapped(node.model, {name: torch.zeros_like(x) for name, x in own.items()}):
                await keeper.written()
            passes.close()
            return own, await keeper.save()

    own, folder = asyncio.run(main())
    saved = checkpoint.load(folder).groups["replica"]
    assert {name: x for name, x in saved.items() if name.startswith("param.")}.keys() == {
        f"param.{name}" for name in own
    }
    assert all(torch.equal(saved[f"param.{name}"], x) for name, x in own.items())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_live_state_is_what_joiners_and_restarts_get(bench, text, method):
    made = bench(text, method, **law_options(METHODS[method]))

    async def main():
        async with made.peer(0).running() as peer:
            node = made.node(peer)
            node.peer.found()
            node.state_sync.open()
            await node.loop.run(700)
            own, replica = node.loop.driver.method, node.loop.driver.replica
            copied = own.snapshot(replica), own.personal(replica), dict(own.eval_params(replica))
            return copied, live_state(own, replica)

    copied, live = run_virtual(main())
    assert [state_hash(dict(state)) for state in live] == [state_hash(state) for state in copied]


def test_the_newest_checkpoint_stays_even_if_it_alone_takes_more_than_may_be_kept(
    bench, text, tmp_path, caplog
):
    async def work(keeper, node):
        keeper.keep_bytes = 1000
        for node.loop.step in (1, 2):
            await keeper.save()

    with caplog.at_level(logging.WARNING, logger="farflock"):
        kept_by(bench, text, tmp_path, 0.0, work)
    assert [step for step, _ in checkpoint.steps(tmp_path / "checkpoints")] == [2]
    assert "above the 1000 that are allowed; it stays" in caplog.text
