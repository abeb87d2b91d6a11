"""Freed memory goes back to the system after rounds, but not more often than it is worth."""

import asyncio
import sys
from pathlib import Path

import pytest

from farflock.node.process import freed
from farflock.node.process.freed import TRIM_EVERY_S, trim, trimmed
from farflock.swarm.compute import inline
from farflock.swarm.sim.virtual_time import run_virtual


def test_a_round_is_followed_by_a_trim_unless_the_last_one_is_recent(monkeypatch):
    trims, told = [], []
    monkeypatch.setattr(freed, "trim", lambda: trims.append(asyncio.get_running_loop().time()))

    async def main():
        tasks = []
        report = trimmed(
            lambda kind, fields: told.append(kind),
            inline,
            lambda work: tasks.append(asyncio.create_task(work)),
        )
        for kind in ("step", "round", "round", "step"):
            report(kind, {})
        await asyncio.sleep(TRIM_EVERY_S)
        report("round", {})
        await asyncio.gather(*tasks)

    run_virtual(main(), start_s=5.0)
    assert trims == [5.0, 5.0 + TRIM_EVERY_S]
    assert told == ["step", "round", "round", "step", "round"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other allocators keep less")
def test_what_a_trim_gives_back_is_no_longer_resident():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1])

    blocks = [bytes(100_000) for _ in range(2000)]
    last = bytes(100_000)
    del blocks
    before = resident()
    trim()
    assert resident() <= before
    assert last
