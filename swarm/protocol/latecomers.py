"""Members that brought nothing to the last rounds, although these were waited for.

One that sleeps in its own code, or sits in a debugger, goes on answering, so no link tells that it
is absent. Each of its rounds would cost the others half a deadline. After two in a row nobody here
waits for it until it offers again; it keeps its place, and is told what was decided. This is only a
wait of this peer's own, like a suspicion: which list closes a round is agreed as ever.
"""

from collections.abc import Collection

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key
from farflock.swarm.protocol.views import View

LATE_ROUNDS = 2  # in a row
# Part of a deadline that a round has lasted before a member that is missing counts as late: less
# than `content.SOFT`, since this peer may have begun the round after the others.
LATE_SHARE = 0.25
UNTIL_HEARD = 1 << 62  # a round that no run reaches


class Latecomers:
    """The members that have missed rounds in a row. One that has missed `LATE_ROUNDS` goes into
    `away` (`PeerContext.away`), as if it had said so."""

    def __init__(self, away: dict[tuple[PeerId, str], int]) -> None:
        self._away = away
        # by member and stream: rounds missed in a row, and the last of them
        self._missed: dict[tuple[PeerId, str], tuple[int, int]] = {}

    def missed(self, view: View, key: Key, absent: Collection[PeerId], stride: int) -> None:
        """Note who brought nothing to a round that was waited for."""
        for entry in [entry for entry in self._missed if not view.lists(entry[0])]:
            del self._missed[entry]
        for peer in absent:
            entry = peer, key.stream
            count, last = self._missed.get(entry, (0, -1))
            count = count + 1 if last == key.round - stride else 1
            self._missed[entry] = count, key.round
            if count >= LATE_ROUNDS:
                self._away[entry] = UNTIL_HEARD

    def heard(self, peer: PeerId, stream: str) -> None:
        """Note that a member offers again."""
        self._missed.pop((peer, stream), None)
        self._away.pop((peer, stream), None)
