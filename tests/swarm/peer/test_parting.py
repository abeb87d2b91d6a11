"""A leaving member stays until the others can decide without it: one of two members, or the last
one that a quorum needs."""

import asyncio

import pytest
from worlds.herd import VIEW_S, in_virtual_time
from worlds.waiting import now, until

from farflock.swarm.peer.peer import GOODBYE_S, STAY_S, TICK_S
from farflock.swarm.sim.network import Faults

AT_ONCE_S = GOODBYE_S + TICK_S + 1e-6
SOON_S = 2.5


async def parted(herd, *numbers):
    """Let these members leave together, as processes do; return how long each took."""

    async def one(number):
        began_s = now()
        herd.nodes[number].quiet = True
        await herd.nodes[number].peer.leave_gracefully()
        took_s, gone = now() - began_s, herd.kill(number)
        await asyncio.gather(gone.task, return_exceptions=True)
        return took_s

    took_s = await asyncio.gather(*(one(number) for number in numbers))
    for number in numbers:
        del herd.nodes[number]
    return took_s


async def goes_on(herd, *numbers):
    """Check that the members that stay decide rounds by themselves, and soon."""
    start = max(herd.nodes[number].applied for number in numbers)
    there = {herd.nodes[number].peer.me for number in numbers}
    await until(
        lambda: min(herd.nodes[number].applied for number in numbers) >= start + 4,
        15,
        "four rounds more",
    )
    assert all(set(herd.nodes[number].members) == there for number in numbers)


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6, 0.9, 1.3, 20.0])
@pytest.mark.parametrize("seed", range(3))
def test_when_the_senior_of_two_leaves_the_other_goes_on_whatever_round_is_open(seed, after_s):
    @in_virtual_time(2, seed=seed)
    async def main(herd):
        await asyncio.sleep(after_s)
        (took_s,) = await parted(herd, 0)
        assert took_s < SOON_S
        await goes_on(herd, 1)

    main()


@pytest.mark.parametrize("seed", range(8))
def test_it_does_so_where_frames_are_lost_and_come_late(seed):
    @in_virtual_time(2, seed=seed)
    async def main(herd):
        herd.network.faults = Faults(loss=0.05, reorder=0.2)
        await asyncio.sleep(seed * 0.13)
        await parted(herd, 0)
        herd.network.faults = Faults()
        await goes_on(herd, 1)

    main()


@in_virtual_time(2)
async def test_a_leaving_peer_repeats_the_view_that_it_alone_has_decided(herd):
    """The decision itself is sent once, and here it is lost."""
    there = [herd.nodes[number].peer.me for number in (0, 1)]
    herd.nodes[1].quiet = True
    await asyncio.sleep(3.9)  # to a moment at which no other message shows which view it knows
    herd.network.cut(*there)
    leaving = asyncio.ensure_future(parted(herd, 0))
    await asyncio.sleep(0.3)
    assert herd.nodes[0].peer.context.views.newest.peers == (there[1],)
    herd.network.heal()
    await leaving
    herd.nodes[1].quiet = False
    await goes_on(herd, 1)


@in_virtual_time(2)
async def test_the_junior_of_two_is_not_needed_and_goes_at_once(herd):
    assert max(await parted(herd, 1)) <= AT_ONCE_S
    await until(lambda: len(herd.nodes[0].members) == 1, VIEW_S + 3, "the view without it")
    await goes_on(herd, 0)


@in_virtual_time(4)
async def test_one_of_four_is_not_needed_and_goes_at_once(herd):
    assert max(await parted(herd, 0)) <= AT_ONCE_S
    await until(lambda: len(herd.nodes[1].members) == 3, VIEW_S + 3, "the view without it")
    await goes_on(herd, 1, 2, 3)


@in_virtual_time(4)
async def test_of_several_that_leave_together_enough_stay_for_a_quorum(herd):
    took_s = await parted(herd, 0, 1, 3)
    assert max(took_s) <= STAY_S + SOON_S
    await goes_on(herd, 2)


@in_virtual_time(4)
async def test_where_all_leave_together_no_peer_stays_for_another(herd):
    assert max(await parted(herd, 0, 1, 2, 3)) < SOON_S


@in_virtual_time(2)
async def test_a_leaving_peer_does_not_stay_forever_for_one_that_cannot_be_heard(herd):
    herd.network.faults = Faults(loss=0.999)
    (took_s,) = await parted(herd, 0)
    assert took_s <= STAY_S + AT_ONCE_S + 0.2


@in_virtual_time(2)
async def test_a_leaving_peer_does_not_stay_for_the_dead(herd):
    herd.kill(1)
    await asyncio.sleep(1.0)
    began_s = now()
    await herd.nodes[0].peer.leave_gracefully()
    assert now() - began_s < GOODBYE_S
