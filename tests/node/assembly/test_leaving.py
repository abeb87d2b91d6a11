"""A node says goodbye first, saves while the disk takes something, and says how it went."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from farflock.node.assembly.checkpoints import SaveProgress
from farflock.node.assembly.leaving import (
    CHANGE_S,
    MERGE_S,
    STALL_S,
    STEP_S,
    Leaving,
    Unsaved,
)
from farflock.node.state.checkpoint import CheckpointError
from farflock.node.state.paths import RunFolder
from farflock.swarm.sim.virtual_time import run_virtual


class Keeper:
    """A keeper whose save takes 1 MB a second, then stands still once `still` MB are written."""

    def __init__(self, megabytes=60, still=None, error=None, older=None, changes_s=0.0, untaken=0):
        self.role, self.progress, self.megabytes, self.still = (
            "replica",
            SaveProgress(),
            megabytes,
            still,
        )
        self.error, self.older, self.changes_s, self.saves = error, older, changes_s, 0
        position = SimpleNamespace(own_tokens=untaken)
        driver = SimpleNamespace(position=position)
        self.node = SimpleNamespace(loop=SimpleNamespace(step=7, driver=driver))

    whole_steps = False

    def trust(self):
        pass

    def newest(self):
        return self.older

    async def save(self):
        self.saves += 1
        await asyncio.sleep(self.changes_s)
        self.progress.begins(7, self.megabytes * 10**6)
        for written in range(2 * self.megabytes):  # written, and read again
            if written == self.still:
                await asyncio.sleep(10**6)
            await asyncio.sleep(0.5)
            self.progress.passes(10**6)
        if self.error is not None:
            raise self.error
        return Path("checkpoints") / "step-7"


class Run:
    """One life of a node among these members: what happened, and when."""

    def __init__(self, keeper, members=("me",), grace_s=None, merged_s=0.0):
        self.said, self.keeper = [], keeper
        chain = SimpleNamespace(newest=SimpleNamespace(peers=members))
        self.peer = SimpleNamespace(me="me", context=SimpleNamespace(chain=chain))
        self.leaving = Leaving(self, [keeper], RunFolder(Path("x")), self.report)
        self.leaving.grace_s = grace_s
        self.leaving.unmerged = lambda: self.now() < merged_s
        self.stopped_s = []
        self.leaving.stop = lambda: self.stopped_s.append(self.now())

    def report(self, kind, fields):
        self.said.append((kind, self.now()))

    async def leave(self):
        self.said.append(("goodbye", self.now()))
        await asyncio.sleep(2.0)

    def now(self):
        return asyncio.get_running_loop().time()

    async def lives(self, asked_s, work):
        """Ask for the end after a while; return how many seconds later it came."""
        asyncio.get_running_loop().call_later(asked_s, self.leaving.ask)
        await self.leaving.train(work)
        try:
            await self.leaving.end()
        finally:
            self.took_s = self.now() - asked_s
        return self


def lived(keeper, work_s=10**6, asked_s=10.0, **options):
    async def main():
        run = Run(keeper, **options)
        try:
            return await run.lives(asked_s, asyncio.sleep(work_s))
        except Unsaved:
            return run

    return run_virtual(main())


def test_a_save_of_a_minute_that_progresses_is_finished_and_said_after_the_goodbye():
    run = lived(Keeper(), work_s=11.0)
    assert run.said == [("goodbye", 10.0), ("stopped", pytest.approx(71.0, abs=0.5))]
    assert run.leaving.saved == Path("checkpoints") / "step-7"
    assert run.leaving.said == "the checkpoint is in checkpoints/step-7"


def test_one_that_stands_still_is_given_up_and_said_with_what_there_is_instead():
    keeper = Keeper(still=30, older=(4, Path("step-4")))
    run = lived(keeper, work_s=11.0)
    assert run.took_s == pytest.approx(1 + 15 + STALL_S, abs=0.5)
    assert run.leaving.saved is None
    assert run.leaving.said == (
        "step 7 is not saved: the disk has taken nothing for 20 s; the newest checkpoint is step-4;"
        " no other member has this work"
    )
    assert [kind for kind, _ in run.said] == ["goodbye", "unsaved"]
    with pytest.raises(CheckpointError, match="given up"):
        keeper.progress.passes(1)  # the thread that still writes makes no checkpoint


def test_a_long_step_is_left_out_and_the_state_before_it_is_saved():
    run = lived(Keeper(megabytes=4))
    assert run.took_s == pytest.approx(STEP_S + 4, abs=0.5)
    assert run.leaving.said.endswith("step-7, without the step that was under way")


@pytest.mark.parametrize(
    ("merged_s", "grace_s", "goodbye_s"),
    [(0.0, None, 10.0), (12.0, None, 12.0), (60.0, None, 10.0 + MERGE_S), (60.0, 8.0, 12.0)],
)
def test_what_would_be_lost_with_the_node_is_merged_before_the_goodbye(
    merged_s, grace_s, goodbye_s
):
    run = lived(Keeper(megabytes=1), merged_s=merged_s, grace_s=grace_s)
    assert run.said[0] == ("goodbye", pytest.approx(goodbye_s, abs=0.2))
    assert run.stopped_s == [pytest.approx(goodbye_s, abs=0.2)]


def test_a_step_that_cannot_be_left_out_has_a_minute():
    keeper = Keeper(megabytes=4)
    keeper.whole_steps = True
    assert lived(keeper, work_s=40.0).leaving.saved is not None
    run = lived(keeper)
    assert "its step has not ended after 60 s, and cannot be left out here" in run.leaving.said


def test_a_state_that_goes_on_changing_is_not_waited_for_for_ever():
    run = lived(Keeper(changes_s=10**6))
    assert run.took_s == pytest.approx(STEP_S + CHANGE_S, abs=0.5)
    assert "was changing the state for 60 s; there is no earlier checkpoint" in run.leaving.said


@pytest.mark.parametrize(("untaken", "rest"), [(0, ""), (3072, " but its last 3,072 tokens")])
def test_it_says_how_much_of_its_work_the_others_have(untaken, rest):
    run = lived(Keeper(megabytes=1, untaken=untaken), members=("me", "other"), work_s=11.0)
    assert run.leaving.said.endswith(f"; the other members have all of this node's work{rest}")
    full = CheckpointError("no room on the disk for step-7")
    run = lived(Keeper(error=full, untaken=untaken), members=("me", "other"), work_s=11.0)
    assert run.leaving.said == (
        "step 7 is not saved: no room on the disk for step-7; there is no earlier checkpoint;"
        f" the other members have all of this node's work{rest}"
    )


def test_what_cannot_be_written_in_the_grace_by_the_last_rate_is_not_begun():
    def once_saved():
        keeper = Keeper()
        keeper.progress.begins(3, 60 * 10**6)
        keeper.progress.ended(60.0)
        return keeper

    run = lived(keeper := once_saved(), work_s=11.0, grace_s=30.0)
    assert (keeper.saves, run.took_s) == (0, pytest.approx(2.0, abs=0.5))
    assert "it takes 60 s by the last one, and --grace leaves 26 s" in run.leaving.said
    assert lived(once_saved(), work_s=11.0, grace_s=90.0).leaving.saved is not None


def test_without_a_rate_it_is_begun_and_given_up_before_the_grace_is_over():
    run = lived(Keeper(), work_s=11.0, grace_s=30.0)
    assert run.took_s == pytest.approx(27.0, abs=0.5)
    assert "the 30 s of --grace are over" in run.leaving.said


def test_a_node_at_its_run_s_end_saves_and_only_then_says_goodbye():
    run = lived(Keeper(megabytes=4), work_s=1.0, asked_s=100.0)
    assert run.said == [("goodbye", pytest.approx(5.0)), ("done", pytest.approx(7.0))]


def test_an_error_of_training_is_raised_and_says_no_goodbye():
    async def fails():
        raise OSError("no disk")

    async def main():
        run = Run(Keeper())
        with pytest.raises(OSError, match="no disk"):
            await run.lives(10.0, fails())
        return run

    assert run_virtual(main()).said == []


def test_its_status_shows_how_far_the_save_is():
    leaving = Run(keeper := Keeper()).leaving
    assert leaving.doing == "is leaving"
    keeper.progress.begins(7, 60 * 10**6)
    keeper.progress.passes(30 * 10**6)
    assert leaving.doing == "is leaving: saves step 7, 50% of 60.0 MB"
