"""The contributions that members have offered to one exchange, as far as they are known here."""

import collections
from collections.abc import Collection, Iterable

from farflock.swarm.messages import Offer

Input = tuple[int, float, bytes]  # (member, weight, digest) of one contribution to one shard


class Offers(dict[int, Offer]):
    """One offer a member, the first one: a key is used once. An offer has `shards` shards."""

    def __init__(self, shards: int) -> None:
        super().__init__()
        self._shards = shards

    def add(self, member: int, offer: Offer) -> bool:
        """Note an offer; False if the member has made one already or this one cannot be meant."""
        if member in self or len(offer.digests) != self._shards:
            return False
        self[member] = offer
        return True

    def includes(self, members: Collection[int]) -> bool:
        """True if all of these have offered something."""
        return self.keys() >= set(members)

    def tokens(self, members: Iterable[int]) -> int:
        """The tokens that these members' contributions were trained on."""
        return sum(self[member].tokens for member in members)

    def common_state(self) -> bytes:
        """The hash of the state that most members started from; of equals, the smallest."""
        counts = collections.Counter(offer.state for offer in self.values())
        return min(counts, key=lambda state: (-counts[state], state), default=b"")

    def inputs(self, shard: int) -> tuple[Input, ...]:
        """The contributions to a shard that started from the common state, in member order."""
        state = self.common_state()
        return tuple(
            (member, offer.weight, offer.digests[shard])
            for member, offer in sorted(self.items())
            if offer.state == state
        )
