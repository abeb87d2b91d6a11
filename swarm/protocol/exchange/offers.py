"""The contributions that members have offered to one exchange, as far as known here."""

import collections
from collections.abc import Collection, Iterable

from farflock.swarm.messages import Evaluation, Offer

Input = tuple[int, float, bytes]  # (member, weight, digest) of one contribution to one bundle


class Offers(dict[int, Offer]):
    """The first offer of each member, with `bundles` bundles; later ones do not count."""

    def __init__(self, bundles: int) -> None:
        super().__init__()
        self._bundles = bundles

    def add(self, member: int, offer: Offer) -> bool:
        """Note an offer; return False if the member has made one or the bundle count is wrong."""
        if member in self or not len(offer.digests) == len(offer.sizes) == self._bundles:
            return False
        self[member] = offer
        return True

    def includes(self, members: Collection[int]) -> bool:
        """True if all these members have made an offer."""
        return self.keys() >= set(members)

    def tokens(self, members: Iterable[int]) -> int:
        """Return the sum of the tokens on which these members' contributions were trained."""
        return sum(self[member].tokens for member in members)

    def evaluations(self, members: Iterable[int]) -> tuple[tuple[int, Evaluation], ...]:
        """Return what these members measured, those that did."""
        said = ((member, self[member].evaluation) for member in members)
        return tuple((member, value) for member, value in said if value is not None)

    def twins(self, me: int) -> list[int]:
        """Return the members whose contributions have the same bytes as this member's."""
        mine = self.get(me)
        if mine is None:
            return []
        others = sorted(at for at in self if at != me)
        return [at for at in others if self[at].digests == mine.digests]

    def common_state(self) -> bytes:
        """Return the hash of the state that most members started from; the smallest in a tie."""
        counts = collections.Counter(offer.state for offer in self.values())
        return min(counts, key=lambda state: (-counts[state], state), default=b"")

    def inputs(self, bundle: int) -> tuple[Input, ...]:
        """Return a bundle's contributions that started from the common state, in member order."""
        state = self.common_state()
        return tuple(
            (member, offer.weight, offer.digests[bundle])
            for member, offer in sorted(self.items())
            if offer.state == state
        )
