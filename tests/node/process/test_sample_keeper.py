"""A node goes on at the first sample that no round has counted, or where its checkpoint ends."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from farflock.node.data.coming_shards import ReadingStopped
from farflock.node.data.samples import SampleReader, Text
from farflock.node.data.shard_order import SampleStream
from farflock.node.model.data import Start
from farflock.node.process.sample_keeper import (
    SampleKeeper,
    founders_start,
    joiners_start,
    keep_samples,
)
from farflock.node.run.manifest import resolve
from farflock.node.state.checkpoint import Checkpoint, CheckpointCorrupt
from farflock.node.state.sample_position import SamplePosition
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual

RUN = "a" * 32
WHOLE = resolve({"train": {"accumulate": 3}})
STAGES = resolve({"model": {"preset": "tiny", "tied": False}, "pipeline": {"stages": 2}})


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def keeper(folder, batches):
    return SampleKeeper(SamplePosition(folder, RUN), batches, inline)


def saved(**meta):
    return Checkpoint(Path("step-40"), 40, {}, meta, {})


def test_the_place_of_the_first_batch_that_does_not_count_is_on_disk(tmp_path):
    batches = SimpleNamespace(cursor=lambda batch: b"at %d" % batch)
    run_virtual(keeper(tmp_path, batches).counted(7))
    assert SamplePosition(tmp_path, RUN).read() == b"at 7"


def test_a_full_disk_is_said_once_and_training_goes_on(tmp_path, caplog):
    def full(content):
        raise OSError(28, "No space left on device")

    position = SimpleNamespace(write=full)
    one = SampleKeeper(position, SimpleNamespace(cursor=lambda batch: b"x"), inline)
    with caplog.at_level(logging.WARNING):
        run_virtual(one.counted(1))
        run_virtual(one.counted(2))
    assert [each.message for each in caplog.records] == [
        "cannot keep the position in the data: No space left on device"
    ]


def test_a_stop_while_shards_are_missing_saves_the_place_of_the_last_round(tmp_path):
    def missing(batch):
        raise ReadingStopped

    batches = SimpleNamespace(cursor=lambda batch: b"at %d" % batch)
    one = keeper(tmp_path, batches)
    run_virtual(one.counted(7))
    assert one.place(9) == b"at 9"
    batches.cursor = missing
    run_virtual(one.counted(8))
    assert SamplePosition(tmp_path, RUN).read() == one.place(9) == b"at 7"


def test_a_state_from_a_checkpoint_goes_on_where_that_was_written(tmp_path):
    SamplePosition(tmp_path, RUN).write(b"later")
    found = founders_start(tmp_path, WHOLE, RUN, saved(samples=b"then".hex()))
    assert found == Start(b"then", 120)
    assert founders_start(tmp_path, WHOLE, RUN, None) == Start()
    assert founders_start(tmp_path, WHOLE, RUN, saved()) == Start(b"", 120)


def test_a_state_from_the_swarm_goes_on_at_the_first_sample_that_does_not_count(tmp_path):
    before = saved(samples=b"then".hex())
    assert joiners_start(tmp_path, WHOLE, RUN, before) == Start(b"then", 120)
    SamplePosition(tmp_path, RUN).write(b"later")
    assert joiners_start(tmp_path, WHOLE, RUN, before) == Start(b"later", 120)
    assert joiners_start(tmp_path, WHOLE, RUN, None) == Start(b"later", 0)
    assert joiners_start(tmp_path, WHOLE, "b" * 32, None) == Start()


def test_a_trainer_of_stages_goes_on_at_its_lowest_uncommitted_number(tmp_path):
    SamplePosition(tmp_path, RUN).write(b"later")
    assert founders_start(tmp_path, STAGES, RUN, saved()) == Start(b"later", 0)
    assert founders_start(tmp_path, STAGES, RUN, None) == Start(), "its run begins again"


@pytest.mark.parametrize("wrong", [7, "zz", None])
def test_a_checkpoint_with_a_place_that_is_none_is_refused(tmp_path, wrong):
    with pytest.raises(CheckpointCorrupt, match="does not say where its node stood in the data"):
        founders_start(tmp_path, WHOLE, RUN, saved(samples=wrong))


class Shards:
    """Shards of 400 tokens, in documents of some lengths."""

    name, end_of_text, sizes = "ab", 255, (400,) * 40

    def read(self, number):
        return np.random.default_rng(number).integers(0, 256, 400).astype(np.uint16)


TEXT = Text((Shards(),), (1.0,))
BATCH, SEQ = 2, 32  # what the bench's plan trains on


class Life:
    """One life of a peer: the sequences that it drew, and how many of them a round has counted."""

    def __init__(self, bench, number, incarnation, folder):
        self._bench, self._number, self._incarnation = bench, number, incarnation
        self._folder, self.drawn, self.counted = folder, [], 0

    async def live(self):
        async with self._bench.peer(self._number, self._incarnation).running() as peer:
            start = joiners_start(self._folder, WHOLE, RUN, None)
            node = self._bench.node(peer, self._heard, start=start)
            self._me, batches = peer.me, node.training_task.batches
            node.training_task.batches = SimpleNamespace(
                batch=lambda step: self._noted(batches.batch(step)), batch_size=BATCH, seq=SEQ
            )
            keep_samples(node, keeper(self._folder, batches), 1)
            if self._number:
                await node.join([self._bench.record(0)], 60.0)
            else:
                node.found()
            await node.loop.run(10**9)

    def _heard(self, kind, fields):
        if kind == "round" and self._me in fields["participants"]:
            self.counted = len(self.drawn)  # the method waits for its rounds

    def _noted(self, batch):
        self.drawn += batch[0].tolist()
        return batch


@pytest.mark.parametrize(
    "killed_s",
    [6.1, 9.2, pytest.param(0.3, marks=pytest.mark.long)]
    + [pytest.param(4 + n * 0.41, marks=pytest.mark.long) for n in range(17)],
)
def test_a_killed_peer_goes_on_with_the_first_sample_that_no_round_has_counted(
    bench, tmp_path, killed_s
):
    made = bench(TEXT, "diloco", peers=2, total=10**9, period=3, deadline_s=2.0)
    homes = [tmp_path / name for name in ("founder", "mine")]
    lives = [Life(made, 0, 1, homes[0]), *(Life(made, 1, n, homes[1]) for n in (1, 2))]

    async def main():
        for home in homes:
            home.mkdir()
        founder = asyncio.create_task(lives[0].live())
        await asyncio.sleep(1.0)
        for life, last_s in zip(lives[1:], (killed_s, 9.0), strict=True):
            task = asyncio.create_task(life.live())
            await asyncio.sleep(last_s)
            task.cancel()
            await asyncio.wait([task])
        founder.cancel()
        await asyncio.wait([founder])

    run_virtual(main())
    first, second = lives[1:]
    me = made.identities[1].peer
    whole = SampleReader(TEXT, SampleStream(made.plan.run_seed, me), SEQ + 1).read(0, 400)[:, :-1]
    assert first.drawn == whole[: len(first.drawn)].tolist()
    assert second.drawn, "the second life was too short"
    assert second.drawn == whole[first.counted :][: len(second.drawn)].tolist()
    assert first.counted or killed_s < 6, "nothing was counted, so this test shows little"
