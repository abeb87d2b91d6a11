"""The most that a member may claim in a round, from the run's terms and certified lists alone.

A member's tokens count for the run's end and its learning rate, and its weight decides how much its
update moves the mean. Both are the member's own word, so each is bounded by the rounds since the
member was last counted. Every close list carries these numbers, and the hash of the list before it,
so that all who know one list compute the same bounds for the next round, and no clock is in them.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.messages import MAX_OFFERED_TOKENS

# Rounds for which a member may claim at once. A member that was away or on a slow line brings the
# work of some rounds; one that saves up more loses the count of the rest.
MAX_CLAIMED_ROUNDS = 8
MAX_COUNTED = 255  # rounds that a list says a member was counted in: one byte


@dataclass(frozen=True, slots=True)
class Entitlement:
    """The most that a member may claim for each round since it was last counted.

    `weight` is 0 for a method that counts each update once, whatever it took; then none weighs more
    than 1."""

    tokens: int = MAX_OFFERED_TOKENS
    weight: float = 0.0

    def max_tokens(self, rounds: int) -> int:
        """Return the most tokens that a member may claim for so many rounds."""
        return min(self.tokens * rounds, MAX_OFFERED_TOKENS)

    def max_weight(self, rounds: int) -> float:
        """Return the largest weight of an update that took so many rounds."""
        return max(1.0, self.weight * rounds)

    def allows(self, tokens: int, weight: float, rounds: int) -> bool:
        """True if a member that was not counted for so many rounds may claim this."""
        return tokens <= self.max_tokens(rounds) and weight <= self.max_weight(rounds)


UNBOUNDED = Entitlement()  # but for what a message can say, and weights that count updates


@dataclass(frozen=True, slots=True)
class Precedent:
    """The numbers of a stream's newest list: the run's agreed tokens after it, for how many rounds
    up to it each member of its view was not counted, and in how many it was.

    `hash` is that of the list, empty before the first round, and None where the list is not known
    here: then `idle` and `counted` are empty, and the tokens are this peer's own."""

    tokens: int = 0
    idle: Mapping[PeerId, int] = field(default_factory=dict)
    hash: bytes | None = b""
    counted: Mapping[PeerId, int] = field(default_factory=dict)

    def rounds(self, peer: PeerId) -> int:
        """Return the rounds for which a member may claim in the next round.

        All of them for a newcomer, which has trained since it took its state, and where no list is
        known."""
        return min(self.idle.get(peer, MAX_CLAIMED_ROUNDS) + 1, MAX_CLAIMED_ROUNDS)

    def sure_rounds(self, peer: PeerId) -> int:
        """Return the rounds for which a member may claim whatever list the others know."""
        return 1 if self.hash is None else self.rounds(peer)

    def idle_after(self, peers: Sequence[PeerId], counted: Collection[int]) -> bytes:
        """Return, for each of these members, the rounds up to the next one without it."""
        return bytes(
            0 if member in counted else self.rounds(peer) for member, peer in enumerate(peers)
        )

    def counted_after(self, peers: Sequence[PeerId], counted: Collection[int]) -> bytes:
        """Return, for each of these members, the rounds up to the next one that counted it."""
        return bytes(
            min(self.counted.get(peer, 0) + (member in counted), MAX_COUNTED)
            for member, peer in enumerate(peers)
        )


BEGINNING = Precedent()  # before a stream's first round


def list_hash(value: bytes) -> bytes:
    """Return the hash by which the next list names this one."""
    return hashlib.sha256(value).digest()


def precedent_after(
    value: bytes, tokens: int, idle: bytes, counted: bytes, peers: Sequence[PeerId]
) -> Precedent:
    """Return the precedent after a decided list, whose view has these members.

    Whatever the list says is taken: a quorum has signed it."""
    each = (dict(zip(peers, rounds, strict=False)) for rounds in (idle, counted))
    return Precedent(tokens, next(each), list_hash(value), next(each))
