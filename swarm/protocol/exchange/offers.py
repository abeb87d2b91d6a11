"""The contributions that members have offered to one exchange, as far as they are known here."""

import collections
from collections.abc import Collection, Iterable, Iterator

from farflock.swarm.messages import Offer

Input = tuple[int, float, bytes]  # (member, weight, digest) of one contribution to one shard


class Offers:
    """One offer a member, the first one: a key is used once. An offer has `shards` shards."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._of: dict[int, Offer] = {}

    def add(self, member: int, offer: Offer) -> bool:
        """Note an offer; False if the member has made one already or this one cannot be meant."""
        if member in self._of or len(offer.digests) != self._shards:
            return False
        self._of[member] = offer
        return True

    def __getitem__(self, member: int) -> Offer:
        return self._of[member]

    def __contains__(self, member: int) -> bool:
        return member in self._of

    def __iter__(self) -> Iterator[int]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def includes(self, members: Collection[int]) -> bool:
        """Whether all of these have offered something."""
        return self._of.keys() >= set(members)

    def tokens(self, members: Iterable[int]) -> int:
        """The tokens that these members' contributions were trained on."""
        return sum(self._of[member].tokens for member in members)

    def common_state(self) -> bytes:
        """The hash of the state that most members started from; of equals, the smallest."""
        counts = collections.Counter(offer.state for offer in self._of.values())
        return min(counts, key=lambda state: (-counts[state], state), default=b"")

    def inputs(self, shard: int) -> tuple[Input, ...]:
        """The contributions to a shard that started from the common state, in member order."""
        state = self.common_state()
        return tuple(
            (member, offer.weight, offer.digests[shard])
            for member, offer in sorted(self._of.items())
            if offer.state == state
        )
