"""Bytes per second that may pass on a line, as time until the next frame may go."""

import math

HEADERS = 1.045  # what Ethernet, IP and TCP add: 66 bytes to each 1,448
SAVED_S = 0.2  # of unused time that counts: who is woken late on a busy machine loses nothing


class RateLimit:
    """One limit for all that is sent, or for all that is read.

    A frame passes as a whole once what passed before it has had its time: the rate holds over
    seconds, not within one. Of time that was not used no more than `SAVED_S` counts."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        """`bytes_per_s` is that on the line, headers included; raise `ValueError` unless it is
        above 0."""
        if not bytes_per_s > 0:
            raise ValueError(f"a line carries more than 0 bytes a second, got {bytes_per_s}")
        self.bytes_per_s, self._free_s = bytes_per_s, -math.inf

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until the next frame may pass; 0 if it may now."""
        return max(0.0, self._free_s - now_s)

    def spend(self, size_bytes: int, now_s: float) -> None:
        """Note a frame that passes."""
        self._free_s = max(self._free_s, now_s - SAVED_S) + HEADERS * size_bytes / self.bytes_per_s
