"""Accusations: statements that no honest peer makes, by the peer that made them.

Only statements that no slow, restarted or cut-off peer makes belong here: a busy machine must
accuse nobody. Anything else is counted without a name (`PeerContext.drop`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from farflock.swarm.links import PeerId

MAX_ACCUSED = 256  # peers; identities are free, so strangers could name themselves without end
MAX_KINDS = 16  # different ones of one peer


@dataclass(slots=True)
class Accusation:
    """A kind of false statement of one peer: how often, and when first and last, locally."""

    peer: PeerId
    what: str
    times: int
    first_s: float
    last_s: float


class Accusations:
    """This peer's accusations; `on_new` hears the first of each kind and peer."""

    def __init__(self) -> None:
        self.on_new: Callable[[Accusation], None] = lambda accusation: None
        self._by_peer: dict[PeerId, dict[str, Accusation]] = {}

    def __iter__(self) -> Iterator[Accusation]:
        for kinds in self._by_peer.values():
            yield from kinds.values()

    def note(self, peer: PeerId, what: str, now_s: float) -> None:
        """Note an accusation; of too many peers, or too many kinds, further ones are not kept."""
        if peer not in self._by_peer and len(self._by_peer) >= MAX_ACCUSED:
            return
        known = self._by_peer.setdefault(peer, {})
        if (accusation := known.get(what)) is not None:
            accusation.times, accusation.last_s = accusation.times + 1, now_s
        elif len(known) < MAX_KINDS:
            known[what] = Accusation(peer, what, 1, now_s, now_s)
            self.on_new(known[what])
