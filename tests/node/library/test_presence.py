"""An optimizer that joins waits as long as a member is there, and no longer."""

import asyncio
from types import SimpleNamespace

import pytest
from worlds.waiting import now

from farflock.node.library.presence import while_there
from farflock.swarm.sim.virtual_time import run_virtual

SILENT_S = 30.0


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
