"""A budget of bytes: never overdrawn, granted in order, and whole again after every
cancellation."""

import asyncio
import random

import pytest
from worlds.waiting import now

from farflock.swarm.byte_budget import ByteBudget, SharedBudget
from farflock.swarm.sim.virtual_time import run_virtual


def test_what_is_free_is_given_at_once_up_to_what_was_asked_for():
    async def main():
        window = ByteBudget(100)
        assert await window.take(10, 70) == 70
        assert await window.take(10, 70) == 30
        assert window.free_bytes == 0
        window.give(100)
        assert window.idle

    run_virtual(main())


def test_waiters_go_in_order_even_if_a_later_one_would_fit():
    async def main():
        window, order = ByteBudget(100), []

        async def user(name, size):
            taken = await window.take(size, size)
            order.append(name)
            await asyncio.sleep(1)
            window.give(taken)

        async with asyncio.TaskGroup() as group:
            for name, size in (("first", 60), ("large", 100), ("small", 10)):
                group.create_task(user(name, size))
        assert order == ["first", "large", "small"]
        assert window.idle

    run_virtual(main())


def test_a_transfer_in_progress_goes_before_waiters_and_takes_no_more_than_there_is():
    async def main():
        window, order = ByteBudget(100), []

        async def user(name, size, ahead):
            taken = await window.take(size, size, ahead=ahead)
            order.append(name)
            await asyncio.sleep(1)
            window.give(taken)

        async with asyncio.TaskGroup() as group:
            for name, size, ahead in (
                ("first", 90, False),
                ("large", 100, False),
                ("begun", 20, True),
                ("fits", 5, True),
            ):
                group.create_task(user(name, size, ahead))
        assert order == ["first", "fits", "begun", "large"]
        assert window.idle

    run_virtual(main())


def test_more_than_the_whole_window_is_a_bug():
    async def main():
        with pytest.raises(AssertionError):
            await ByteBudget(100).take(101, 101)

    run_virtual(main())


def test_under_chance_and_cancellation_it_is_never_overdrawn_and_ends_whole():
    async def main(seed):
        chance, window, most = random.Random(seed), ByteBudget(1000), 0

        async def user():
            nonlocal most
            least = chance.randrange(0, 1001)
            taken = await window.take(least, least + chance.randrange(500))
            try:
                assert least <= taken
                most = max(most, 1000 - window.free_bytes)
                await asyncio.sleep(chance.random())
            finally:
                window.give(taken)

        tasks = [asyncio.create_task(user()) for _ in range(60)]
        for task in chance.sample(tasks, 30):
            await asyncio.sleep(chance.random() / 5)
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError | None) for result in results)
        assert 0 <= window.free_bytes <= 1000
        assert most <= 1000
        assert window.idle

    for seed in range(50):
        run_virtual(main(seed))


def test_bytes_given_back_in_the_moment_of_cancellation_go_to_the_next():
    async def main():
        window = ByteBudget(10)
        await window.take(10, 10)
        waiters = [asyncio.create_task(window.take(10, 10)) for _ in range(2)]
        await asyncio.sleep(0)
        waiters[0].cancel()
        window.give(10)
        assert await waiters[1] == 10
        window.give(10)
        assert window.idle

    run_virtual(main())


def test_a_turn_that_comes_in_the_moment_of_cancellation_is_not_lost():
    async def main():
        window = ByteBudget(10)
        await window.take(10, 10)
        waiter = asyncio.create_task(window.take(10, 10))
        await asyncio.sleep(0)
        window.give(10)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert window.idle

    run_virtual(main())


def test_shared_bytes_go_to_the_user_that_has_the_least_and_each_has_at_most_its_share():
    async def main():
        budget, order = SharedBudget(100, 60), []

        async def task(user, seconds):
            await budget.take(user, 20)
            order.append((user, now()))
            await asyncio.sleep(seconds)
            budget.give(user, 20)

        async with asyncio.TaskGroup() as group:
            for user, count in (("first", 6), ("second", 4), ("third", 1)):
                for place in range(count):
                    group.create_task(task(user, 1 + place / 10))
            await asyncio.sleep(0)
            assert budget.load("first") == (3, 60)
        at_once = [("first", 0)] * 3 + [("second", 0)] * 2
        assert order[:6] == [*at_once, ("third", 1)], "the first was 40 ahead of the third"
        assert budget.idle

    run_virtual(main())


def test_a_request_beyond_a_share_is_granted_alone():
    async def main():
        budget = SharedBudget(100, 10)
        await budget.take("large", 80)
        assert budget.load("large") == (0, 80)
        with pytest.raises(AssertionError):
            await budget.take("larger", 101)

    run_virtual(main())


def test_under_chance_and_cancellation_shares_are_never_overdrawn_and_end_whole():
    async def main(seed):
        chance, budget = random.Random(seed), SharedBudget(1000, 300)

        async def task(user):
            size = chance.randint(1, 400)
            await budget.take(user, size)
            try:
                assert budget.free_bytes >= 0
                assert budget.load(user)[1] <= max(300, size)
                await asyncio.sleep(chance.random())
            finally:
                budget.give(user, size)

        tasks = [asyncio.create_task(task(chance.randrange(5))) for _ in range(200)]
        for each in chance.sample(tasks, 60):
            await asyncio.sleep(chance.random() / 10)
            each.cancel()
        await asyncio.wait(tasks)
        assert budget.idle
        assert all(budget.load(user) == (0, 0) for user in range(5))

    for seed in range(20):
        run_virtual(main(seed))
