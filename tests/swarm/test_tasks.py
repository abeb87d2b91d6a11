"""A helper that fails is heard of at once, and begins again; nothing else ends with it."""

import asyncio
import logging

import pytest

from farflock.swarm.sim.virtual_time import run_virtual
from farflock.swarm.tasks import MAX_RESTART_S, RESTART_S, cancel, kept_up


class Helper:
    """Work that fails as often as it is told to, and the moments at which it began."""

    def __init__(self, failures, lasts_s=0.0, then_s=None):
        self.failures, self.lasts_s, self.then_s = failures, lasts_s, then_s
        self.begun_s = []

    async def __call__(self):
        self.begun_s.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.lasts_s)
        if len(self.begun_s) <= self.failures:
            raise RuntimeError("nobody foresaw this")
        if self.then_s is not None:
            await asyncio.sleep(self.then_s)

    def pauses(self):
        pairs = zip(self.begun_s, self.begun_s[1:], strict=False)
        return [after - before - self.lasts_s for before, after in pairs]


def test_a_helper_that_returns_is_over():
    helper = Helper(0)
    run_virtual(kept_up("helping", helper))
    assert len(helper.begun_s) == 1


def test_a_helper_that_fails_begins_again_after_pauses_that_double_up_to_a_limit():
    helper = Helper(9)
    run_virtual(kept_up("helping", helper))
    doubled = [RESTART_S * 2**number for number in range(9)]
    assert helper.pauses() == pytest.approx([min(pause, MAX_RESTART_S) for pause in doubled])
    assert doubled[-1] > MAX_RESTART_S


def test_after_a_long_good_time_the_pauses_start_anew():
    helper = Helper(4, lasts_s=MAX_RESTART_S + 1)
    run_virtual(kept_up("helping", helper))
    assert helper.pauses() == pytest.approx([RESTART_S] * 4)


def test_a_failure_is_said_at_once_with_its_name_and_cause_and_its_first_traceback(caplog):
    async def main():
        task = asyncio.create_task(kept_up("the status file", Helper(9)))
        await asyncio.sleep(RESTART_S / 2)
        assert "the status file failed (RuntimeError: nobody foresaw this)" in caplog.text
        assert "training goes on" in caplog.text
        await asyncio.sleep(100)
        await cancel(task)

    with caplog.at_level(logging.ERROR, logger="farflock"):
        run_virtual(main())
    assert [record.exc_info is not None for record in caplog.records[:3]] == [True, False, False]


def test_it_ends_when_it_is_cancelled_at_work_or_in_a_pause():
    async def main(helper):
        task = asyncio.create_task(kept_up("helping", helper))
        await asyncio.sleep(0.5)
        (ended,) = await cancel(task)
        assert isinstance(ended, asyncio.CancelledError)
        assert len(helper.begun_s) == 1

    run_virtual(main(Helper(0, then_s=1e9)))
    run_virtual(main(Helper(9)))
