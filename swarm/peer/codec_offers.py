"""The codecs that each stage server reads, announced so that no server gets an unreadable payload.

They change during a run, as versions of shared parameters come and go, so they are sent to the
members directly: directory records last a minute. They are repeated, since messages get lost and
newcomers have heard nothing.
"""

from collections.abc import Callable

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId, Reads

REPEAT_S = 5.0  # an announcement may be lost; changes and newcomers do not wait for this

ReadableCodecs = tuple[CodecId, ...]


class CodecOffers:
    """One peer's announcements and those it received.

    `reads` returns its codecs, preferred first, or none if it serves nothing."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self.reads: Callable[[], ReadableCodecs] = tuple
        self._announced: dict[PeerId, tuple[int, ReadableCodecs]] = {}  # (incarnation, codecs)
        self._said: tuple[bytes, ReadableCodecs] = b"", ()  # (hash of the view told, codecs)
        self._said_s = 0.0

    def receive(self, sender: PeerId, incarnation: int, message: Reads) -> None:
        """Handle a member's announcement."""
        view = self._context.views.newest
        if view.index(sender, incarnation) is None:
            self._context.drop("codecs of a stranger")
        else:
            self._announced = {
                peer: known for peer, known in self._announced.items() if peer in view.peers
            }
            self._announced[sender] = incarnation, message.codecs

    def tick(self) -> None:
        """Announce changes, to newcomers everything, and everything again every `REPEAT_S`."""
        view, mine = self._context.views.newest, self.reads()
        is_old = self._context.now() - self._said_s >= REPEAT_S
        if mine and (self._said != (view.hash, mine) or is_old):
            self._said, self._said_s = (view.hash, mine), self._context.now()
            for peer in view.peers:
                if peer != self._context.me:
                    self._context.send(peer, Reads(mine))

    def of(self, peer: PeerId, incarnation: int) -> ReadableCodecs | None:
        """Return the codecs that this life of a peer reads; None if it has not announced any."""
        if peer == self._context.me:
            return self.reads() or None
        life, codecs = self._announced.get(peer, (incarnation, None))
        return codecs if life == incarnation else None
