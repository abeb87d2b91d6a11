"""The codecs that each stage server reads, as it tells all members: a payload that it could not read goes to another server.

What a server reads changes during a run, where versions of what both ends share come and go. So it is told to the members
directly, not in records of the directory, which last a minute; and again and again, for it may be lost, and newcomers have
heard nothing.
"""

from collections.abc import Callable

from farflock.swarm.links import PeerId
from farflock.swarm.messages import CodecId, Reads
from farflock.swarm.peer.context import PeerContext

REPEAT_S = 5.0

ReadableCodecs = tuple[CodecId, ...]


class CodecOffers:
    """One peer's part. `reads` says what it reads now, the preferred codec first; who serves nothing leaves it as it is."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self.reads: Callable[[], ReadableCodecs] = tuple
        self._announced: dict[PeerId, tuple[int, ReadableCodecs]] = {}  # with the life that announced it
        self._said: tuple[bytes, ReadableCodecs] = b"", ()  # the view that it was said to
        self._said_s = 0.0

    def receive(self, sender: PeerId, incarnation: int, message: Reads) -> None:
        """A member's."""
        view = self._context.views.newest
        if view.index(sender, incarnation) is None:
            self._context.drop("codecs of a stranger")
        else:
            self._announced = {peer: known for peer, known in self._announced.items() if peer in view.peers}
            self._announced[sender] = incarnation, message.codecs

    def tick(self) -> None:
        """Say what changed, to newcomers all, and all of it again after a while."""
        view, mine = self._context.views.newest, self.reads()
        is_old = self._context.now() - self._said_s >= REPEAT_S
        if mine and (self._said != (view.hash, mine) or is_old):
            self._said, self._said_s = (view.hash, mine), self._context.now()
            for peer in view.peers:
                if peer != self._context.me:
                    self._context.send(peer, Reads(mine))

    def of(self, peer: PeerId, incarnation: int) -> ReadableCodecs | None:
        """The codecs that this life of a peer reads; None if it has not said."""
        if peer == self._context.me:
            return self.reads() or None
        life, codecs = self._announced.get(peer, (incarnation, None))
        return codecs if life == incarnation else None
