"""A worker knows for how long its thread has computed, in the middle of its work too."""

import asyncio

import pytest

from farflock.node.process.busy import TimedWorker


class Clock:
    now_s = 50.0

    def __call__(self):
        return self.now_s


def after(work):
    """What `work(worker, clock)` returns, for a worker whose clock stands still."""
    clock = Clock()
    return asyncio.run(work(TimedWorker("test", clock), clock))


@pytest.mark.net
def test_only_work_counts_and_work_that_fails_does_too():
    async def main(worker, clock):
        def works(seconds):
            clock.now_s += seconds
            return seconds

        assert await worker(lambda: works(3.0)) == 3.0
        clock.now_s += 10.0
        with pytest.raises(ZeroDivisionError):
            await worker(lambda: works(2.0) / 0)
        return worker.busy_s

    assert after(main) == 5.0


@pytest.mark.net
def test_a_long_step_counts_before_it_ends():
    async def main(worker, clock):
        def long():
            clock.now_s += 4.0
            return worker.busy_s

        return await worker(long), worker.busy_s

    assert after(main) == (4.0, 4.0)
