"""Members that have become slower than they were, and whether by their machine or their line.

Rounds are periodic, so each member's times repeat. One whose time is above its own median by more
than three deviations for three rounds in a row has changed: a late offer tells of its machine, a
slow transfer of its line. What most members do at once is this peer's own doing. Members that
always were slow are not named: a run waits for them as it is configured to.
"""

import collections
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key

Cause = Literal["machine", "line"]
CAUSES: tuple[Cause, ...] = ("machine", "line")  # a later one hides an earlier one

KEPT_ROUNDS = 16  # of ordinary times, by which others are judged
ENOUGH_ROUNDS = 5  # before anything is called unusual
DEVIATIONS = 3.0
SLOW_ROUNDS = 3  # in a row
MAX_TIMES = 1024  # of all members, those of the ones that left included
# A deviation is at least this, and this share of the median: times on a quiet line hardly vary.
STEADY_S = 0.05
STEADY_SHARE = 0.1
_MAD_TO_SIGMA = 1.4826  # of normally distributed times


@dataclass(slots=True)
class _Times:
    """One kind of time of one member: the ordinary ones, and those unusual ones that came last.

    A round has one, its longest, which counts once the next round has one."""

    round: int = -1
    longest_s: float = 0.0
    ordinary: collections.deque[float] = field(
        default_factory=lambda: collections.deque(maxlen=KEPT_ROUNDS)
    )
    unusual: list[float] = field(default_factory=list)

    def note(self, number: int, seconds: float) -> None:
        if number == self.round:
            self.longest_s = max(self.longest_s, seconds)
            return
        if self.round >= 0:
            self._judge(self.longest_s)
        self.round, self.longest_s = number, seconds

    def _judge(self, seconds: float) -> None:
        if len(self.ordinary) < ENOUGH_ROUNDS or seconds <= self._limit_s():
            self.ordinary.append(seconds)
            self.unusual.clear()
            return
        self.unusual.append(seconds)
        if len(self.unusual) >= KEPT_ROUNDS:  # it stays like this: the member's new times
            self.ordinary.clear()
            self.ordinary.extend(self.unusual)
            self.unusual.clear()

    def _limit_s(self) -> float:
        middle_s = statistics.median(self.ordinary)
        spread_s = _MAD_TO_SIGMA * statistics.median(abs(x - middle_s) for x in self.ordinary)
        steady_s = max(STEADY_S, STEADY_SHARE * middle_s)
        return middle_s + DEVIATIONS * max(spread_s, steady_s)

    @property
    def is_slow(self) -> bool:
        return len(self.unusual) >= SLOW_ROUNDS


class Slowness:
    """The times of the other members' offers and transfers, as this peer sees them."""

    def __init__(self) -> None:
        self._times: dict[tuple[PeerId, str, Cause], _Times] = {}

    def note(self, peer: PeerId, cause: Cause, key: Key, seconds: float) -> None:
        """Note one time of a member in a round: of its offer since the round began here, or of a
        transfer of its bytes. Beyond `MAX_TIMES`, who was noted longest ago is forgotten."""
        entry = peer, key.stream, cause
        times = self._times.pop(entry, None) or _Times()
        self._times[entry] = times
        times.note(key.round, seconds)
        if len(self._times) > MAX_TIMES:
            del self._times[next(iter(self._times))]

    def named(self, members: Collection[PeerId]) -> dict[PeerId, Cause]:
        """Return which of these members, those of the newest view, have become slow, each with the
        cause: the line before the machine, since what is late on the line holds up the rest."""
        for entry in [entry for entry in self._times if entry[0] not in members]:
            del self._times[entry]
        found: dict[PeerId, Cause] = {}
        for cause in CAUSES:
            seen = {peer for peer, _, kind in self._times if kind == cause}
            slow = {
                peer
                for (peer, _, kind), times in self._times.items()
                if kind == cause and times.is_slow
            }
            if len(seen) == 1 or 2 * len(slow) <= len(seen):
                found |= dict.fromkeys(sorted(slow), cause)
        return found
