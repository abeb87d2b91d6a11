"""Virtual time: everything happens in order, without waiting, and what would hang is an error."""

import asyncio
import gc

import pytest
from worlds.waiting import now

from farflock.swarm.sim.virtual_time import STANDSTILL, Deadlock, run_virtual


def test_a_month_of_sleep_costs_nothing_and_the_clock_shows_it():
    async def main():
        await asyncio.sleep(30 * 86400)
        return now()

    assert run_virtual(main()) == 30 * 86400


@pytest.mark.parametrize("start_s", [0.0, -5.0, 1e6])
def test_the_clock_begins_where_it_is_told(start_s):
    async def main():
        begun_s = now()
        await asyncio.sleep(2.5)
        return begun_s, now()

    assert run_virtual(main(), start_s=start_s) == (start_s, start_s + 2.5)


def test_a_clock_of_months_still_wakes_sleepers():
    """A double near 2**24 s has steps of 4 ns: with a finer resolution a due timer would never
    count as due."""

    async def main():
        for _ in range(1000):
            await asyncio.sleep(0.1)
        return now()

    assert run_virtual(main(), start_s=2.0**24) == pytest.approx(2.0**24 + 100)


def test_sleepers_wake_in_the_order_of_their_times_and_ties_in_the_order_of_sleeping():
    async def main():
        woken = []

        async def sleeper(name, delay_s):
            await asyncio.sleep(delay_s)
            woken.append((name, now()))

        plan = [("late", 3.0), ("first", 1.0), ("second", 1.0), ("middle", 2.0), ("third", 1.0)]
        await asyncio.gather(*(sleeper(*entry) for entry in plan))
        return woken

    expected = [("first", 1.0), ("second", 1.0), ("third", 1.0), ("middle", 2.0), ("late", 3.0)]
    assert run_virtual(main()) == expected


def test_no_time_passes_while_anything_can_be_done():
    async def main():
        for _ in range(1000):
            await asyncio.sleep(0)
        return now()

    assert run_virtual(main()) == 0.0


def test_many_small_steps_add_up():
    async def main():
        for _ in range(10_000):
            await asyncio.sleep(0.1)
        return now()

    assert run_virtual(main()) == pytest.approx(1000.0, abs=1e-6)


def test_a_timeout_ends_a_wait_at_its_virtual_moment():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.0):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == 7.0


def test_what_main_returns_or_raises_comes_out():
    async def give():
        return "result"

    async def fail():
        await asyncio.sleep(1)
        raise KeyError("ours")

    assert run_virtual(give()) == "result"
    with pytest.raises(KeyError, match="ours"):
        run_virtual(fail())


class Interruption(BaseException):
    """Raised from outside wherever the program is, as by the time limit of a test."""


async def interrupted():
    await asyncio.sleep(2)
    raise Interruption


async def gathered():
    await asyncio.gather(interrupted(), return_exceptions=True)


def in_a_callback():
    def strike():
        raise Interruption

    asyncio.get_running_loop().call_later(2, strike)


@pytest.mark.parametrize(
    "begin",
    [
        lambda: asyncio.create_task(interrupted()),
        lambda: asyncio.create_task(gathered()),
        in_a_callback,
    ],
    ids=["task", "gathered task", "callback"],
)
def test_what_interrupts_anything_ends_the_run_at_once_and_cancels_the_others(begin):
    ended = []

    async def lasting():
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(now())

    async def interrupted_while_it_ends():
        try:
            await asyncio.sleep(1e9)
        finally:
            raise Interruption

    async def main():
        others = (lasting(), interrupted_while_it_ends())
        kept = begin(), *map(asyncio.create_task, others)
        await asyncio.sleep(1e6)
        return kept

    with pytest.raises(Interruption):
        run_virtual(main())
    assert ended == [2.0]


def test_what_ended_main_is_told_though_another_task_then_hangs():
    async def hang():
        raise Deadlock  # as the loop does when a task waits on after its cancellation

    async def main():
        asyncio.get_running_loop().shutdown_asyncgens = hang
        raise Interruption

    with pytest.raises(Interruption):
        run_virtual(main())


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_and_an_exit_in_any_task_end_the_run_too(error):
    async def strike():
        raise error

    async def main():
        task = asyncio.create_task(strike())
        await asyncio.sleep(1e6)
        return task

    with pytest.raises(error):
        run_virtual(main())


def test_an_error_of_a_task_is_its_own_and_told_if_nobody_looks_at_it(caplog):
    async def fail():
        raise KeyError("ours")

    async def main():
        task = asyncio.create_task(fail())
        await asyncio.sleep(1)
        assert task.done()
        del task
        gc.collect()
        return now()

    assert run_virtual(main()) == 1.0
    assert "exception was never retrieved" in caplog.text


def test_a_wait_that_nothing_can_end_is_a_deadlock():
    async def main():
        await asyncio.sleep(1)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="no timer is set"):
        run_virtual(main())


def test_two_tasks_that_wait_for_each_other_are_a_deadlock():
    async def main():
        one, other = asyncio.Event(), asyncio.Event()

        async def after(awaited, mine):
            await awaited.wait()
            mine.set()

        await asyncio.gather(after(one, other), after(other, one))

    with pytest.raises(Deadlock):
        run_virtual(main())


def test_a_task_that_spins_without_time_passing_is_found():
    async def main():
        for _ in range(10 * STANDSTILL):
            await asyncio.sleep(0)

    with pytest.raises(Deadlock, match=f"after {STANDSTILL} turns of the loop; find the task"):
        run_virtual(main())


def test_a_task_that_takes_the_smallest_pause_does_not_count_as_spinning():
    async def main():
        for _ in range(STANDSTILL // 2 + 1000):  # each sleep is two turns
            await asyncio.sleep(1e-6)

    run_virtual(main())


def test_tasks_left_behind_are_cancelled_when_main_ends():
    ended = []

    async def lasting():
        try:
            await asyncio.sleep(1e9)
        finally:
            ended.append(now())

    async def main():
        task = asyncio.create_task(lasting())
        await asyncio.sleep(5)
        return task

    assert run_virtual(main()).cancelled()
    assert ended == [5.0]


def test_the_same_program_takes_the_same_course_each_time():
    async def main():
        course = []

        async def worker(number):
            for step in range(20):
                await asyncio.sleep((number * 7 + step * 3) % 5 / 4)
                course.append((number, step, now()))

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(worker(number))
        return course

    assert run_virtual(main()) == run_virtual(main())
