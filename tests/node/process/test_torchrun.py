"""The place of a process among those of its peer, and what several processes cannot do.

tests/node/assembly/test_followers.py has two processes, and tests/net/test_torchrun.py torchrun.
"""

import asyncio

import pytest

from farflock.node.errors import Usage
from farflock.node.model.device import Device, choose
from farflock.node.model.ranks import FollowerLost
from farflock.node.process.torchrun import Place, place_of, unless_lost
from farflock.swarm.sim.virtual_time import run_virtual

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}


class Group:
    """Ranks of which one ends as soon as `ends` is set."""

    def __init__(self):
        self.ends = False

    def gone(self):
        return {2: "out of memory"} if self.ends else {}

    def lost(self):
        return (
            FollowerLost("rank 2 of this peer has ended", "out of memory", "")
            if self.ends
            else None
        )


def test_torchrun_gives_a_process_its_place():
    assert place_of(TORCHRUN) == Place(3, 1, 4)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"},  # as in many a cluster's containers
        TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"},
    ],
)
def test_a_process_that_torchrun_did_not_start_with_others_is_alone(environment):
    assert place_of(environment) is None


def test_each_process_takes_a_device_of_its_own(card):
    assert choose("auto", 0).place == choose("card:0").place
    with pytest.raises(Usage, match="process 1 of this peer finds no device"):
        choose("auto", 1)
    with pytest.raises(Usage, match="takes a device of its own"):
        choose("card:0", 0)
    assert choose("cpu", 5) == Device()


def test_a_lost_follower_ends_work_that_waits():
    group = Group()

    async def forever():
        group.ends = True
        await asyncio.sleep(60)

    with pytest.raises(FollowerLost, match="out of memory"):
        run_virtual(unless_lost(group, forever()))


def test_a_lost_follower_is_the_cause_of_what_it_broke():
    group = Group()

    async def broken():
        group.ends = True
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(FollowerLost) as caught:
        run_virtual(unless_lost(group, broken()))
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_result_of_work_is_returned_while_all_are_there():
    async def work():
        await asyncio.sleep(0)
        return 7

    assert run_virtual(unless_lost(Group(), work())) == 7
