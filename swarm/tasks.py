"""Cancelling asyncio tasks."""

import asyncio
from typing import Any


async def cancel(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Cancel the tasks, wait until they have ended, and return their results or exceptions."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
