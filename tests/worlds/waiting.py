"""Waiting on the clock of the running loop, whether virtual or real."""

import asyncio
import math


def now():
    return asyncio.get_running_loop().time()


async def until(condition, within_s=math.inf, what="the condition", every_s=0.05):
    """Poll until a condition holds; return the seconds that it took."""
    start_s = now()
    while not condition():
        assert now() - start_s < within_s, f"{what} did not hold within {within_s} s"
        await asyncio.sleep(every_s)
    return now() - start_s
