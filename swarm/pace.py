"""The speed of a holder of chunks, and the length of the pieces to ask it for."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from farflock.swarm.chunk_server import MAX_PIECE_BYTES, PIECE_BYTES
from farflock.swarm.links import PeerId

PIECE_S = 0.15  # to send a piece of more than one unit
SAMPLE_BYTES = 3 * 1024 * 1024  # after which the measurement of a holder that is busy begins again
LINE_BYTES = 256 * 1024  # in a row, after which the speed of the line is known
REPLACE_S = 3.0  # to deliver what was asked for, after which a slow holder is replaced
FORGET_S = 15.0  # without a request or a piece, after which a slow holder gets another chance
PROBE_S = 0.3  # without a piece that was asked for, after which its holder is asked about it
QUICK_PROBES = 4  # so soon; then each waits twice as long as the one before
MAX_PROBE_S = 8.0
STRAY_S = 0.3  # that a piece may come behind what was sent after it
SLOW = 4.0  # so many times slower than the fastest holder, one is passed over


@dataclass(frozen=True, slots=True)
class Watch:
    """The watch of a caller over what is fetched gently: it ends the silence itself.

    `heard` gets the number of bytes that are new. A holder that is `slow` times slower than the
    fastest is replaced, also while it sends; but what others send may come before its pieces on a
    line that carries `bytes_per_s` in all."""

    heard: Callable[[int], None]
    slow: float
    bytes_per_s: Callable[[], float] = lambda: 0.0  # 0: not known


@dataclass(slots=True)
class Probing:
    """The search for a request, or for what was sent for it, that may be lost."""

    number: int
    asked_s: float
    _heard_s: float = -math.inf  # the last piece or the last question
    _probes: int = 0  # one after the other, without a piece
    _over_s: float = math.inf  # since when nothing more should come

    def heard(self, now_s: float) -> None:
        """Note that a part of what was asked for came."""
        self._heard_s, self._probes, self._over_s = now_s, 0, math.inf

    def is_due(self, now_s: float) -> bool:
        """Return whether to ask now; the next time is later then."""
        wait_s = min(PROBE_S * 2.0 ** max(0, self._probes + 1 - QUICK_PROBES), MAX_PROBE_S)
        due = now_s - max(self.asked_s, self._heard_s) >= wait_s
        if due:
            self._heard_s, self._probes = now_s, self._probes + 1
        return due

    def is_lost(self, over: int, now_s: float) -> bool:
        """Return whether what has not come will not come, where requests up to `over` are over."""
        if self.number <= over:
            self._over_s = min(self._over_s, now_s)
        return now_s - self._over_s >= STRAY_S


@dataclass(slots=True)
class Pace:
    """The speed of a holder, measured from a request until nothing more is due."""

    heard_s: float = -math.inf
    bytes_per_s: float = 0.0
    requests: int = 0
    over: int = 0  # the last request that all pieces have left for
    _asked_s: float = -math.inf
    _busy_s: float | None = None
    _got_bytes: int = 0

    def asked(self, now_s: float) -> int:
        """Note a request, and return its number."""
        self.requests += 1
        if self._busy_s is None or self._is_old(now_s):
            self._busy_s, self._got_bytes = now_s, 0
        self._asked_s = now_s
        return self.requests

    def heard(self, size: int, now_s: float, more: bool) -> None:
        """Note a piece; `more` are due."""
        self.heard_s = now_s
        if self._busy_s is not None and now_s > self._busy_s:
            self._got_bytes += size
            self.bytes_per_s = self._got_bytes / (now_s - self._busy_s)
        if not more or self._got_bytes > SAMPLE_BYTES:
            self._busy_s, self._got_bytes = now_s if more else None, 0

    def probed(self, number: int) -> None:
        """Note that what was sent for the requests up to this one has come, or is lost."""
        if number <= self.requests:
            self.over = max(self.over, number)

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


@dataclass(slots=True)
class LineSpeed:
    """The speed of this peer's own line, measured where much comes in a row, of any holders."""

    bytes_per_s: float = 0.0  # 0: not known
    _since_s: float | None = None
    _got_bytes: int = 0

    def asked(self, now_s: float) -> None:
        """Note a request."""
        if self._since_s is None:
            self._since_s, self._got_bytes = now_s, 0

    def heard(self, size: int, now_s: float, more: bool) -> None:
        """Note a piece; `more` are due."""
        self._got_bytes += size
        if self._since_s is not None and self._got_bytes >= LINE_BYTES and now_s > self._since_s:
            rate = self._got_bytes / (now_s - self._since_s)
            self.bytes_per_s = max(rate, self.bytes_per_s / 2)
            self._since_s, self._got_bytes = now_s, 0
        if not more:
            self._since_s = None


def faster(
    holders: Sequence[PeerId], paces: Mapping[PeerId, Pace], now_s: float, slow: float = SLOW
) -> list[PeerId]:
    """Return the holders but for those that are `slow` times slower than the fastest."""
    rates = {peer: paces[peer].rate(now_s) for peer in holders if peer in paces}
    known = {peer: rate for peer, rate in rates.items() if rate is not None}
    least = max(known.values(), default=0.0) / slow
    return [peer for peer in holders if known.get(peer, math.inf) >= least]
