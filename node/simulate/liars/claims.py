"""Liars that claim what they have not done, or do not hand out what they claim to have."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from farflock.node.simulate.liars import values
from farflock.node.simulate.liars.liar import Liar
from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    MAX_OFFERED_TOKENS,
    Decided,
    Message,
    Offer,
    StateOffer,
    StateQuery,
    Want,
)

CLAIMED_WEIGHT = 1e18  # the most that an offer can say
AHEAD = 1000  # rounds


class Claimant(Liar):
    """Trains on, and claims in each of its offers what nobody can have done: each offer is sent
    once with each of the `claims`."""

    needs_lists, replaced = True, (b"offer",)
    claims: ClassVar[Sequence[Mapping[str, Any]]] = ()

    def instead(self, message: Message) -> Sequence[Message]:
        """Return the offers in place of one."""
        assert isinstance(message, Offer), "nothing else is replaced"
        return [msgspec.structs.replace(message, **claim) for claim in self.claims]


class ClaimsTokens(Claimant):
    """Claims more tokens than an offer can say, and the most that it can."""

    claims = ({"tokens": 2**62}, {"tokens": MAX_OFFERED_TOKENS})


class ClaimsWeight(Claimant):
    """Claims the largest weight."""

    claims = ({"weight": CLAIMED_WEIGHT},)


class FalseStart(Claimant):
    """Says of each offer that it began from another state."""

    claims = ({"state": hashlib.sha256(b"another state").digest()},)


class Withholds(Liar):
    """Offers what it then sends to nobody."""

    only_answers = True

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Keep all requests for chunks."""
        return isinstance(message, Want)


class HidesOffers(Liar):
    """Shows its offers to nobody, and reduces what the others offer together with its own."""

    needs_lists, replaced = True, (b"offer",)

    def instead(self, message: Message) -> Sequence[Message]:
        """Return nothing to say in place of an offer."""
        self.said["hidden offer"] += 1
        return ()


class ForgedDecisions(Liar):
    """Says of each open round that it was decided on content that nobody has; no other member's
    signature is in it."""

    needs_lists = True

    def act(self) -> None:
        """Tell all members."""
        for key in self.open_keys():
            members = range(len(self.view.members))
            unsigned = tuple((member, b"") for member in members)
            value = values.void(self, key)
            self.say(Decided(key, self.view_of(key).hash, value, (0, 0), unsigned))


class FalseStates(Liar):
    """Offers each peer that asks a state of a later round, which nobody has."""

    only_answers = True

    def keeps(self, sender: PeerId, message: Message) -> bool:
        """Answer in its peer's place."""
        if not isinstance(message, StateQuery):
            return False
        state, digest = (hashlib.sha256(text).digest() for text in (b"no state", b"no listing"))
        number, name = self.next_round + AHEAD, message.stream
        self.send(sender, StateOffer(name, self.view.hash, number, state, digest, 100, 10))
        return True
