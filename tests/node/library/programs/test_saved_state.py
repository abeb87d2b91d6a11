"""A program that ends writes its state as long as the disk takes it, and says why there is none."""

import asyncio
from types import SimpleNamespace

import pytest

from farflock.node.assembly.checkpoints import SaveProgress
from farflock.node.assembly.leaving import STALL_S
from farflock.node.library.presence import OptimizerNode
from farflock.node.state.checkpoint import CheckpointError
from farflock.swarm.sim.virtual_time import run_virtual

SLOW_S = STALL_S / 2


class Keeper:
    """A keeper on a disk that takes this many pieces, one every ten seconds, of the four there
    are."""

    def __init__(self, pieces, error=None):
        self.pieces, self.error, self.progress = pieces, error, SaveProgress()
        self.is_saved = False

    async def save(self):
        for _ in range(min(self.pieces, 4)):
            await asyncio.sleep(SLOW_S)
            self.progress.passes(1)
        if self.error is not None:
            raise self.error
        if self.pieces < 4:
            await asyncio.Event().wait()
        self.is_saved = True


def saved(keeper):
    """Return the seconds that it took."""

    async def main():
        await OptimizerNode.save(SimpleNamespace(keeper=keeper))
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_a_slow_disk_is_waited_for(caplog):
    keeper = Keeper(4)
    assert saved(keeper) == pytest.approx(4 * SLOW_S)
    assert keeper.is_saved
    assert not caplog.records


def test_a_disk_that_takes_nothing_is_given_up(caplog):
    keeper = Keeper(1)
    assert saved(keeper) <= SLOW_S + 2 * STALL_S
    assert "the program's state is not kept: the disk takes nothing any more" in caplog.text
    with pytest.raises(CheckpointError, match="given up"):
        keeper.progress.passes(1)


def test_a_full_disk_is_said(caplog):
    saved(Keeper(2, CheckpointError("no space is left")))
    assert "the program's state is not kept: no space is left" in caplog.text


def test_without_a_keeper_nothing_is_kept():
    assert saved(None) == 0.0
