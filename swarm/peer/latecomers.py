"""Members that brought nothing to the last rounds, although these were waited for.

One that sleeps in its own code, or sits in a debugger, goes on answering, so no link tells that it
is absent. Each of its rounds would cost the others half a deadline. After two in a row nobody here
waits for it until it offers again; it keeps its place, and is told what was decided. This is only a
wait of this peer's own, like a suspicion: which list closes a round is agreed as ever.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.protocol.views import View

LATE_ROUNDS = 2  # in a row
# Part of a deadline that a round has lasted before who is missing counts as late: less than
# `content.SOFT`, since this peer may have begun it after the others.
LATE_SHARE = 0.25


@dataclass(slots=True)
class Latecomers:
    """The rounds in a row that each member of a stream has missed."""

    _missed: dict[tuple[PeerId, str], int] = field(default_factory=dict)

    def closed(
        self, view: View, stream: str, absent: Collection[PeerId], lasted_share: float
    ) -> None:
        """Note who brought nothing to a round that lasted this part of its deadline."""
        for entry in [entry for entry in self._missed if not view.lists(entry[0])]:
            del self._missed[entry]
        for peer in absent if lasted_share >= LATE_SHARE else ():
            self._missed[peer, stream] = self._missed.get((peer, stream), 0) + 1

    def heard(self, peer: PeerId, stream: str) -> None:
        """Note that a member offers, or has said that it will."""
        self._missed.pop((peer, stream), None)

    def is_late(self, peer: PeerId, stream: str) -> bool:
        """True if a member is not worth waiting for until it is heard."""
        return self._missed.get((peer, stream), 0) >= LATE_ROUNDS
