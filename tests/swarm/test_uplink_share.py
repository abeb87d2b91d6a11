"""Pieces of a state leave below all else, and never wait for ever."""

import asyncio

from worlds.waiting import now

from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.uplink_share import AHEAD_BYTES, LOOK_S, WAIT_S, UplinkShare

PIECE = 64 * 1024


def took(share, others_wait):
    async def main():
        await share.turn(PIECE, others_wait)
        return now()

    return run_virtual(main())


def test_a_piece_leaves_at_once_while_nothing_else_waits():
    assert took(UplinkShare(lambda: 0), lambda: False) == 0.0
    assert took(UplinkShare(lambda: AHEAD_BYTES), lambda: False) == 0.0


def test_a_piece_waits_until_the_others_are_served_and_the_line_is_free():
    assert 0.3 <= took(UplinkShare(lambda: 0), lambda: now() < 0.3) < 0.3 + 2 * LOOK_S
    queued = UplinkShare(lambda: 0 if now() >= 0.3 else 2 * AHEAD_BYTES)
    assert 0.3 <= took(queued, lambda: False) < 0.3 + 2 * LOOK_S


def test_it_does_not_wait_for_a_single_slow_line_for_long():
    assert WAIT_S <= took(UplinkShare(lambda: 0), lambda: True) < WAIT_S + 2 * LOOK_S


def test_each_ten_bytes_of_others_earn_a_state_one():
    share = UplinkShare(lambda: 0)
    share.others_sent(10 * PIECE)
    assert took(share, lambda: True) == 0.0
    assert took(share, lambda: True) >= WAIT_S


def test_readers_have_their_turns_one_after_the_other():
    async def main():
        share, order = UplinkShare(lambda: 0), []

        async def read(name):
            for _ in range(3):
                await share.turn(PIECE, lambda: True)
                order.append(name)

        await asyncio.gather(read("a"), read("b"))
        return order

    assert run_virtual(main()) == ["a", "b"] * 3
