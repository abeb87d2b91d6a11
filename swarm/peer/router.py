"""Which part of a peer takes in which message: the type says it, and for a vote what it decides."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from farflock.swarm.frame import Frame
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    Accepted,
    Decided,
    Forgotten,
    Holds,
    Join,
    Leave,
    LogQuery,
    Message,
    Miss,
    Offer,
    PairAccept,
    PairPropose,
    Piece,
    Ping,
    Pong,
    Prepare,
    Promise,
    Propose,
    Reduced,
    Rejected,
    StateOffer,
    ViewQuery,
    Views,
    Want,
)
from farflock.swarm.peer.context import PeerContext
from farflock.swarm.peer.membership import Membership
from farflock.swarm.peer.next_view import PaxosMessage
from farflock.swarm.peer.rounds import Rounds
from farflock.swarm.protocol.views import VIEW_STREAM

# Sender, its incarnation, and a message of one of the types that were added with this receiver.
Receive = Callable[[PeerId, int, Any], None]


class Router:
    """Hands each message to the part of a peer that was added for its kind."""

    def __init__(self, port: PeerContext, membership: Membership, rounds: Rounds) -> None:
        self._port, self._membership, self._rounds = port, membership, rounds
        # Read-only between additions: the peer is watched for tables that grow as messages come in.
        self._receivers: Mapping[type[Message], Receive] = MappingProxyType({})
        self.add(membership.receive, Join, Leave, ViewQuery, Views, Ping, Pong)
        self.add(self._receive_vote, Prepare, Promise, Propose, Accepted, Rejected, Decided)
        self.add_exchange(rounds.receive, Offer, Reduced, Holds, LogQuery, Forgotten)

    @property
    def kinds(self) -> frozenset[type[Message]]:
        """The types of the messages that some part takes in."""
        return frozenset({*self._receivers, Want, Piece, Miss})

    def add(self, receive: Receive, *kinds: type[Message]) -> None:
        """From now on messages of these types go to `receive`."""
        for kind in kinds:
            assert kind not in self._receivers, f"{kind.__name__} has a receiver already"
        self._receivers = MappingProxyType({**self._receivers, **dict.fromkeys(kinds, receive)})

    def add_exchange(self, receive: Receive, *kinds: type[Message]) -> None:
        """The same for messages about exchanges and states, which need a view to mean anything."""

        def receive_in_view(sender: PeerId, incarnation: int, message: Message) -> None:
            self._receive_in_view(receive, sender, incarnation, message)

        self.add(receive_in_view, *kinds)

    def deliver(self, sender: PeerId, frame: Frame) -> None:
        """Hand on what a frame says."""
        message = frame.message
        if isinstance(message, Want | Piece | Miss):
            self._port.chunks.receive(sender, message, frame.body)
        else:
            self._receivers[type(message)](sender, frame.incarnation, message)

    def _receive_vote(self, sender: PeerId, incarnation: int, vote: PaxosMessage) -> None:
        """A vote on the next view, or on the close list of a round."""
        if vote.key.stream == VIEW_STREAM:
            self._membership.receive(sender, incarnation, vote)
        else:
            self._receive_in_view(self._rounds.receive, sender, incarnation, vote)

    def _receive_in_view(self, receive: Receive, sender: PeerId, incarnation: int, message: Message) -> None:
        """Hand on a message; if its view is not current here, find out which side is out of date."""
        if self._port.chain is None:
            return
        stale = self._port.counters["stale view"]
        receive(sender, incarnation, message)
        view = view_named(message)
        if view is not None and self._port.counters["stale view"] > stale:
            self._membership.sync.reconcile(sender, view)


def view_named(message: Message) -> bytes | None:
    """The hash of the view that a message names, None if it names none."""
    match message:
        case PairPropose(offer=offer) | PairAccept(offer=offer):
            return offer.view
        case Offer() | Reduced() | Holds() | StateOffer():
            return message.view
        case Prepare() | Promise() | Propose() | Accepted() | Rejected() | Decided():
            return message.view
    return None
