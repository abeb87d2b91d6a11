"""Memory that a round has freed goes back to the system.

The allocator of Linux keeps what each thread has freed for that thread. A round's payloads are
made, received and reduced in several, so as much as they took would be missing in training.
"""

import asyncio
import ctypes
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from farflock.node.reporting import Report
from farflock.swarm.compute import Compute

TRIM_EVERY_S = 1.0  # the system takes the pages and gives new ones: 0.1 s for some hundred MB

Spawn = Callable[[Coroutine[Any, Any, None]], object]


def trim() -> None:
    """Give freed memory back, if the allocator can."""
    if sys.platform.startswith("linux"):
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if give_back is not None:
            give_back(0)


def trimmed(report: Report, worker: Compute, spawn: Spawn) -> Report:
    """Return `report`, with a trim in `worker` after each round, if the last one is not recent."""
    next_s = 0.0

    async def trimming() -> None:
        await worker(trim)

    def reported(kind: str, fields: dict[str, object]) -> None:
        nonlocal next_s
        report(kind, fields)
        if kind == "round" and (now_s := asyncio.get_running_loop().time()) >= next_s:
            next_s = now_s + TRIM_EVERY_S
            spawn(trimming())

    return reported
