"""Rounds that are gone: the members that said so, and whether they are enough.

One member's word is little. It may lie, and whoever came in late has a short log although others have the round still. So most
of those who live have to say it: whatever was decided is known to a quorum, and who is further than a round answers for it.
"""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Forgotten

ANSWER_TIMEOUT_S = 3.0  # in which whoever has a round can tell it


@dataclass(slots=True)
class LogTruncation:
    """The words of members on the one round that a peer wants next; a word about another round takes the place of all."""

    round: int = -1
    since_s: float = 0.0  # of the first word
    said: dict[PeerId, Forgotten] = field(default_factory=dict)

    def note(self, sender: PeerId, message: Forgotten, members: Collection[PeerId], now_s: float) -> bool:
        """A member says so; those who are none any more are dropped. Whether it is news."""
        if message.key.round != self.round:
            self.round, self.since_s, self.said = message.key.round, now_s, {}
        known = sender in self.said
        self.said = {peer: each for peer, each in self.said.items() if peer in members} | {sender: message}
        return not known

    def by(self, number: int, peer: PeerId) -> Forgotten | None:
        """The word of this peer on the round; None if it has said nothing."""
        return self.said.get(peer) if number == self.round else None

    def agreed(self, number: int, living: Sequence[PeerId]) -> list[Forgotten]:
        """The words on the round if most of these say something, else nothing."""
        said = [word for peer in living if (word := self.by(number, peer))]
        return said if 2 * len(said) > len(living) else []

    def unopposed(self, number: int, living: Sequence[PeerId], now_s: float) -> list[Forgotten]:
        """The words on the round if most say something, or the others had time to tell it and did not."""
        patient = now_s - self.since_s >= ANSWER_TIMEOUT_S
        return [word for peer in living if (word := self.by(number, peer))] if patient else self.agreed(number, living)


def newest_of(said: Sequence[Forgotten]) -> int:
    """The round that the others are at: what no minority among them can put higher, or lower, than one of the rest has it."""
    return statistics.median_low(max(word.oldest, word.newest) for word in said)


def oldest_of(said: Sequence[Forgotten]) -> int:
    """From which round on the others can tell, likewise."""
    return statistics.median_low(word.oldest for word in said)
