"""A member's answers to newcomers, which know nothing of the run but an invite."""

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_MEMBERS, IntroductionMessage, Terms, TermsQuery
from farflock.swarm.peer.admission import RecordBook
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.quota import Quota, units


class Introductions:
    """Tells newcomers the run's head, once that is set, and the records of members.

    Strangers ask, so each has a quota, and it is answered in one frame."""

    def __init__(self, context: PeerContext, book: RecordBook) -> None:
        self.head = b""  # signed by the founder; empty: this peer introduces nobody
        self._context, self._book = context, book
        self._quota = Quota()

    def receive(self, sender: PeerId, incarnation: int, message: IntroductionMessage) -> None:
        """Answer a question; a peer that runs asks none, so an answer is dropped."""
        if not isinstance(message, TermsQuery):
            self._context.drop("terms that nobody asked for")
            return
        if not self.head:
            return
        records = (self._book.make(), *self._others(sender))
        cost = units(1, sum(map(len, records)))
        if not self._quota.take(sender.encode(), cost, self._context.now()):
            self._context.drop("question about the terms")
            return
        self._context.send(sender, Terms(self.head, records))

    def _others(self, sender: PeerId) -> list[bytes]:
        """Return the sealed records of other members that are not known to be dead."""
        context, sealed = self._context, self._book.sealed
        members = [peer for peer in self._book.others() if peer != sender and peer in sealed]
        here = [peer for peer in members if context.life(peer) != "dead"]
        return [sealed[peer] for peer in here[: MAX_MEMBERS - 1]]
