"""Reports that a round is gone from the members' logs, and whether enough members made one.

One report means little: its sender may lie, or have a short log because it joined late. So more
than half of the live members must report: a decision is known to a quorum, and members that are
further on can answer.
"""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Forgotten

ANSWER_TIMEOUT_S = 3.0  # time for members that have a round to answer


@dataclass(slots=True)
class LogTruncation:
    """Reports that the one round needed next is gone; a report about another round replaces all."""

    round: int = -1
    since_s: float = 0.0  # of the first report
    said: dict[PeerId, Forgotten] = field(default_factory=dict)

    def note(
        self, sender: PeerId, message: Forgotten, members: Collection[PeerId], now_s: float
    ) -> bool:
        """Note a member's report, drop those of former members, and return True if it is new."""
        if message.key.round != self.round:
            self.round, self.since_s, self.said = message.key.round, now_s, {}
        known = sender in self.said
        self.said = {peer: each for peer, each in self.said.items() if peer in members} | {
            sender: message
        }
        return not known

    def by(self, number: int, peer: PeerId) -> Forgotten | None:
        """Return this peer's report about the round, or None."""
        return self.said.get(peer) if number == self.round else None

    def agreed(self, number: int, living: Sequence[PeerId]) -> list[Forgotten]:
        """Return the reports about the round if most of `living` made one, else an empty list."""
        said = [word for peer in living if (word := self.by(number, peer))]
        # Plain majority of the live members, not a quorum: nothing is decided by it.
        return said if 2 * len(said) > len(living) else []

    def unopposed(self, number: int, living: Sequence[PeerId], now_s: float) -> list[Forgotten]:
        """Return the reports about the round if most made one, or the others had time to answer."""
        if now_s - self.since_s < ANSWER_TIMEOUT_S:
            return self.agreed(number, living)
        return [word for peer in living if (word := self.by(number, peer))]


def newest_of(said: Sequence[Forgotten]) -> int:
    """Return the median newest round, which no minority can move past the majority's reports."""
    return statistics.median_low(max(word.oldest, word.newest) for word in said)


def oldest_of(said: Sequence[Forgotten]) -> int:
    """Return the median of the oldest rounds that the others still have."""
    return statistics.median_low(word.oldest for word in said)
