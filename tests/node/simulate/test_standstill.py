"""A task that never waits ends its run, and is named; one that computes for long is left alone."""

import asyncio
import signal

import pytest

from farflock.node.simulate.standstill import Standstill, moving_clock
from farflock.swarm.sim.virtual_time import run_virtual

LIMIT_S = 0.05


async def at_once():
    pass


async def spin():
    await asyncio.sleep(2.5)
    while True:
        await at_once()


async def beside():
    task = asyncio.create_task(spin())
    await asyncio.sleep(60.0)
    await task


@pytest.mark.parametrize("main", [spin, beside])
def test_a_task_that_never_waits_ends_the_run_and_is_named(main):
    said = pytest.raises(Standstill, match=r"shows 2.5 s for .* in (spin|at_once) ")
    with said, moving_clock(LIMIT_S):
        run_virtual(main())


def test_a_run_whose_clock_moves_may_compute_for_long():
    async def main():
        for _ in range(400):
            await asyncio.sleep(0.001)
            sum(range(20_000))
        return "done"

    with moving_clock(LIMIT_S):
        assert run_virtual(main()) == "done"


def test_computing_without_a_loop_is_not_watched_nor_anything_after_the_block():
    before = signal.getsignal(signal.SIGVTALRM)
    with moving_clock(LIMIT_S):
        for _ in range(400):
            sum(range(20_000))
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == before
