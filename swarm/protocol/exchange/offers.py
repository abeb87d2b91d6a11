"""The contributions that members have offered to one exchange, as far as known here."""

import collections
from collections.abc import Collection, Iterable

from farflock.swarm.messages import Offer

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

    def common_state(self, members: Collection[int] = ()) -> bytes:
        """Return the hash of the state from which most of these members started, or most of all; in
        a tie, that of the most senior.

        So of two members with a state each, the same one is followed in every stream. If different
        ones were, each would give up its state for the other's, and nobody would have either."""
        ordered = sorted(members or self)
        counts = collections.Counter(self[member].state for member in ordered)
        first = max(ordered, key=lambda member: (counts[self[member].state], -member), default=None)
        return b"" if first is None else self[first].state

    def may_name(self, state: bytes, members: Collection[int]) -> bool:
        """True if a list that counts these members may name this state: as far as their offers are
        here, no more than half of them began with another one."""
        others = sum(member in self and self[member].state != state for member in members)
        return 2 * others <= len(members)

    def inputs(self, bundle: int) -> tuple[Input, ...]:
        """Return a bundle's contributions that started from the common state, in member order."""
        state = self.common_state()
        return tuple(
            (member, offer.weight, offer.digests[bundle])
            for member, offer in sorted(self.items())
            if offer.state == state
        )
