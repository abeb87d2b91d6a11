"""The speed of a holder of chunks, and the length of the pieces to ask it for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farflock.swarm.chunk_server import MAX_PIECE_BYTES, PIECE_BYTES
from farflock.swarm.links import PeerId

PIECE_S = 0.15  # to send a piece of more than one unit
SAMPLE_BYTES = 3 * 1024 * 1024  # after which the measurement of a holder that is busy begins again
REPLACE_S = 3.0  # to deliver what was asked for, after which a slow holder is replaced
FORGET_S = 15.0  # without a request or a piece, after which a slow holder gets another chance
SLOW = 4.0  # so many times slower than the fastest holder, one is passed over


@dataclass(frozen=True, slots=True)
class Watch:
    """The watch of a caller over what is fetched gently: it ends the silence itself.

    `heard` gets the number of bytes that are new. A holder that is `slow` times slower than the
    fastest is replaced, also while it sends."""

    heard: Callable[[int], None]
    slow: float


@dataclass(slots=True)
class Pace:
    """The speed of a holder, measured from a request until nothing more is due."""

    heard_s: float = -math.inf
    bytes_per_s: float = 0.0
    lost: int = 0  # requests, one after another, that nothing came for
    _asked_s: float = -math.inf
    _busy_s: float | None = None
    _got_bytes: int = 0

    def asked(self, now_s: float) -> None:
        """Note a request."""
        if self._busy_s is None or self._is_old(now_s):
            self._busy_s, self._got_bytes = now_s, 0
        self._asked_s = now_s

    def heard(self, size: int, now_s: float, more: bool) -> None:
        """Note a piece; `more` are due."""
        self.heard_s, self.lost = now_s, 0
        if self._busy_s is not None and now_s > self._busy_s:
            self._got_bytes += size
            self.bytes_per_s = self._got_bytes / (now_s - self._busy_s)
        if not more or self._got_bytes > SAMPLE_BYTES:
            self._busy_s, self._got_bytes = now_s if more else None, 0

    def heard_nothing(self) -> None:
        """Note that a request, or its answer, seems to be lost: its time says nothing of the line,
        and the next request is given twice as long."""
        self.lost += 1
        self._busy_s, self._got_bytes = None, 0

    def rate(self, now_s: float) -> float | None:
        """Return the bytes per second of late, 0 for a holder that owes everything; None if they
        are not known, or not any more."""
        if self._is_old(now_s):
            return None
        if self._busy_s is not None and now_s - self._busy_s >= REPLACE_S:
            return self._got_bytes / (now_s - self._busy_s)
        return self.bytes_per_s or None

    def _is_old(self, now_s: float) -> bool:
        return now_s - max(self._asked_s, self.heard_s) > FORGET_S

    @property
    def piece_bytes(self) -> int:
        """The length of the pieces to ask for."""
        units = int(self.bytes_per_s * PIECE_S) // PIECE_BYTES
        return PIECE_BYTES * max(1, min(units, MAX_PIECE_BYTES // PIECE_BYTES))


def faster(
    holders: Sequence[PeerId], paces: Mapping[PeerId, Pace], now_s: float, slow: float = SLOW
) -> list[PeerId]:
    """Return the holders but for those that are `slow` times slower than the fastest."""
    rates = {peer: paces[peer].rate(now_s) for peer in holders if peer in paces}
    known = {peer: rate for peer, rate in rates.items() if rate is not None}
    least = max(known.values(), default=0.0) / slow
    return [peer for peer in holders if known.get(peer, math.inf) >= least]
