"""A program hears how much of the run's state is here, while its optimizer joins; that waits as
long as a member is there."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from worlds.virtual_optimizer import train_together
from worlds.waiting import now

import farflock
from farflock.node.assembly.coming_back import while_there
from farflock.swarm.sim.virtual_time import run_virtual

SILENT_S = 30.0


def model_of(rank):
    with torch.random.fork_rng():
        torch.manual_seed(rank)  # or a newcomer would have the run's state already
        return nn.Linear(8, 1)


async def nothing(member):
    pass


def joined(count=2):
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    train_together(count, "diloco", model_of, nothing, sgd)


def test_a_newcomer_s_listener_hears_of_the_state_until_it_is_whole():
    heard, later = [], []
    with farflock.join_progress(heard.append):
        joined()
    with farflock.join_progress(later.append):
        joined(count=1)
    joined()
    assert [coming.here_bytes for coming in heard] == sorted({c.here_bytes for c in heard})
    assert heard[-1].here_bytes == heard[-1].total_bytes > 0
    assert str(heard[-1]).startswith("0.0 of 0.0 MB")
    assert not later, "who starts a run downloads nothing"


def test_a_listener_that_fails_ends_the_joining():
    def fails(coming):
        raise LookupError("no bar")

    with farflock.join_progress(fails), pytest.raises(LookupError, match="no bar"):
        joined()


@pytest.mark.net
def test_an_optimizer_with_a_thread_of_its_own_tells_the_listener_of_its_program():
    heard = {0: [], 1: []}

    def work(rank, optimize):
        with farflock.join_progress(heard[rank].append):
            return optimize(model_of(rank)).last_round

    with farflock.local_swarm(2, "diloco", period=5, view_s=1.0) as swarm:
        swarm.train(work)
    assert not heard[0]
    assert heard[1][-1].here_bytes == heard[1][-1].total_bytes > 0


def peer(lives):
    """A peer that knows members, which live until these times."""
    context = SimpleNamespace(life=lambda name: "alive" if now() < lives[name] else "suspect")
    book = SimpleNamespace(others=lambda: list(lives))
    return SimpleNamespace(context=context, membership=SimpleNamespace(book=book))


@pytest.mark.parametrize(("lives", "ends_s"), [({"a": 200.0, "b": 10.0}, 230.0), ({}, 30.0)])
def test_the_wait_ends_half_a_minute_after_the_last_member_was_there(lives, ends_s):
    async def main():
        with pytest.raises(TimeoutError):
            async with while_there(peer(lives), SILENT_S):
                await asyncio.sleep(10_000)
        assert now() == pytest.approx(ends_s, abs=1.1)

    run_virtual(main())


def test_what_comes_in_time_comes_however_late_it_is():
    async def main():
        async with while_there(peer({"a": 10_000.0}), SILENT_S):
            await asyncio.sleep(1000)
        assert now() == pytest.approx(1000.0)
        assert len(asyncio.all_tasks()) == 1

    run_virtual(main())
