"""The time that a newcomer needs, beside the rounds that go on.

Of a line of b bytes per second, rounds of q bytes every T seconds take the share ρ = q / (b T). A
state of S bytes comes in S / (b (1 - ρ)) seconds: what is left of the line also carries the rounds
that passed meanwhile. Members say q and T, which each has measured; the median of them counts, so
that no single one can keep a newcomer away.
"""

import collections
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

TELL_ABOVE = 0.5  # of the line, after which what would help is said
HOPELESS_ABOVE = 0.9  # after which a newcomer hardly ever catches up
HELP = "a longer period or a coarser codec"
TRAFFIC_ROUNDS = 8  # the last ones, over which a member takes the median
FEW_ROUNDS = 3  # with fewer it says that it does not know


class RoundTraffic(NamedTuple):
    """The bytes of a round and the seconds from one to the next; zeros if they are not known."""

    round_bytes: int = 0
    round_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate of the rounds; 0 if it is not known."""
        return self.round_bytes / self.round_s if self.round_s else 0.0

    def __str__(self) -> str:
        return f"rounds of {self.round_bytes / 1e6:,.2f} MB every {self.round_s:,.2g} s"


NO_TRAFFIC = RoundTraffic()


class TrafficMeter:
    """The last rounds of one stream, as a member that keeps up sees them."""

    def __init__(self) -> None:
        self._sizes: collections.deque[int] = collections.deque(maxlen=TRAFFIC_ROUNDS)
        self._gaps_s: collections.deque[float] = collections.deque(maxlen=TRAFFIC_ROUNDS)
        self._last_s: float | None = None

    def heard(self, size_bytes: int, now_s: float, *, late: bool) -> None:
        """Note a round whose content is here. Rounds that come `late`, as they are caught up with,
        follow each other faster than they were made."""
        self._sizes.append(size_bytes)
        if self._last_s is not None and not late:
            self._gaps_s.append(now_s - self._last_s)
        self._last_s = None if late else now_s

    @property
    def traffic(self) -> RoundTraffic:
        """The medians of late."""
        if len(self._gaps_s) < FEW_ROUNDS:
            return NO_TRAFFIC
        return RoundTraffic(statistics.median_low(self._sizes), statistics.median(self._gaps_s))


def together(streams: Iterable[RoundTraffic]) -> RoundTraffic:
    """Return the traffic of several streams, by the rounds of the one that has them most often."""
    known = [each for each in streams if each.round_s]
    shortest_s = min((each.round_s for each in known), default=0.0)
    return RoundTraffic(round(shortest_s * sum(each.bytes_per_s for each in known)), shortest_s)


def usual(said: Iterable[RoundTraffic]) -> RoundTraffic:
    """Return the median of what members say, the lower one of two."""
    ranked = sorted(said, key=lambda each: each.bytes_per_s)
    return ranked[(len(ranked) - 1) // 2] if ranked else NO_TRAFFIC


@dataclass(frozen=True, slots=True)
class JoinTime:
    """The sum for a state of which so many bytes are left, a line's bytes per second, and the
    rounds of the run."""

    left_bytes: int
    bytes_per_s: float
    traffic: RoundTraffic

    @property
    def rounds_share(self) -> float:
        """The share of the line that rounds take; above 1 they need more than it carries."""
        return self.traffic.bytes_per_s / self.bytes_per_s

    @property
    def alone_s(self) -> float:
        """The seconds of the download, if there were no rounds."""
        return self.left_bytes / self.bytes_per_s

    @property
    def join_s(self) -> float | None:
        """The seconds until the newcomer has caught up; None if it never does."""
        left = 1 - self.rounds_share
        return self.alone_s / left if left > 0 else None

    @property
    def is_hopeless(self) -> bool:
        """True if the newcomer would hardly ever catch up."""
        return self.rounds_share > HOPELESS_ABOVE

    @property
    def is_slow(self) -> bool:
        """True if rounds take so much of the line that a user has to know."""
        return self.rounds_share > TELL_ABOVE

    def __str__(self) -> str:
        taken = (
            f"{self.traffic} take {self.rounds_share:.0%} of this line, which carries"
            f" {self.bytes_per_s / 1e6:,.2f} MB/s"
        )
        if self.is_hopeless or self.join_s is None:
            return f"{taken}, so a newcomer would hardly ever catch up"
        return f"{taken}, so joining takes {clock(self.join_s)} in place of {clock(self.alone_s)}"


def clock(seconds: float) -> str:
    """Return `1:02:03` for 3,723 seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
