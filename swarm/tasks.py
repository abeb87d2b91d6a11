"""Cancelling asyncio tasks, and restarting those that a peer can do without for a while."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

RESTART_S = 1.0  # before a helper that failed begins again, doubling
MAX_RESTART_S = 60.0

SAYS = "%s failed (%s); training goes on, and it begins again in %.0f s"

log = logging.getLogger(__name__)


async def cancel(*tasks: asyncio.Task[Any]) -> list[Any]:
    """Cancel the tasks, wait until they have ended, and return their results or exceptions."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def kept_up(name: str, work: Callable[[], Awaitable[None]]) -> None:
    """Run a helper task until it returns; if it fails, say so at once and begin it again.

    It is one without which the peer still trains: status, directory, announcements. Otherwise each
    exception that nobody foresaw would be a switch by which strangers end peers. The pauses start
    anew after a helper has run for longer than the longest of them. The first failure of a row has
    its traceback in the log."""
    pause_s, loop = RESTART_S, asyncio.get_running_loop()
    while True:
        begun_s = loop.time()
        try:
            return await work()
        except Exception as error:
            if loop.time() - begun_s > MAX_RESTART_S:
                pause_s = RESTART_S
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            trace = error if pause_s == RESTART_S else None
            log.error(SAYS, name, cause, pause_s, exc_info=trace)
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_RESTART_S)
