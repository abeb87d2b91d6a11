"""The contributions that members have offered to one exchange, as far as known here."""

import collections
from collections.abc import Collection, Iterable

from farflock.swarm.messages import Offer

Input = tuple[int, float, bytes]  # (member, weight, digest) of one contribution to one shard


class Offers(dict[int, Offer]):
    """The first offer of each member, with `shards` shards; later ones do not count."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self._shards = shards

    def add(self, member: int, offer: Offer) -> bool:
        """Note an offer; return False if the member has made one or the shard count is wrong."""
        if member in self or len(offer.digests) != self._shards:
            return False
        self[member] = offer
        return True

    def includes(self, members: Collection[int]) -> bool:
        """True if all these members have made an offer."""
        return self.keys() >= set(members)

    def tokens(self, members: Iterable[int]) -> int:
        """Return the sum of the tokens on which these members' contributions were trained."""
        return sum(self[member].tokens for member in members)

    def common_state(self) -> bytes:
        """Return the hash of the state that most members started from; the smallest in a tie."""
        counts = collections.Counter(offer.state for offer in self.values())
        return min(counts, key=lambda state: (-counts[state], state), default=b"")

    def inputs(self, shard: int) -> tuple[Input, ...]:
        """Return a shard's contributions that started from the common state, in member order."""
        state = self.common_state()
        return tuple(
            (member, offer.weight, offer.digests[shard])
            for member, offer in sorted(self.items())
            if offer.state == state
        )
