"""The share of a peer's upload that readers of its state have: all of it while nothing else waits,
and a small one while content of rounds does, so that joins cost the others next to nothing."""

import asyncio
from collections.abc import Callable

SHARE = 0.1  # bytes of states for each other byte, while other bulk waits
WAIT_S = 2.0  # for other bulk, at most: that may wait for one partner's line, and for long
LOOK_S = 0.005  # between two looks whether it still waits
AHEAD_BYTES = 64 * 1024  # that may wait for the line before the next piece: it is never idle
MAX_CREDIT_BYTES = 1024 * 1024


class UplinkShare:
    """The turns of pieces of states: one leaves at a time, of each reader in turn."""

    def __init__(self, queued_bytes: Callable[[], int]) -> None:
        self._queued_bytes, self._one = queued_bytes, asyncio.Lock()
        self._credit_bytes = 0.0

    def others_sent(self, size: int) -> None:
        """Note a piece of something else, which earns states their share."""
        self._credit_bytes = min(self._credit_bytes + SHARE * size, MAX_CREDIT_BYTES)

    async def turn(self, size: int, others_wait: Callable[[], bool]) -> None:
        """Wait until a piece of a state may leave."""
        now = asyncio.get_running_loop().time
        async with self._one:
            until_s = now() + WAIT_S
            while others_wait() or self._queued_bytes() > AHEAD_BYTES:
                if self._credit_bytes >= size:
                    self._credit_bytes -= size
                    return
                if now() >= until_s:
                    return
                await asyncio.sleep(LOOK_S)
