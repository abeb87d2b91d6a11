"""A gather: the items are the members' bundles, and every member gets all of them.

The decision depends only on the holdings and the time, so a gather has no states of its own, only
those of every exchange (`closing`). It closes with the payloads of all live members, or with those
that have arrived once half of the time is over or there are `enough` of them.
"""

import collections

from farflock.swarm.messages import Offer, Reduced
from farflock.swarm.protocol.exchange.availability import RoundItem, mask_of
from farflock.swarm.protocol.exchange.content import Content, ExchangeContext


class Gather(Content):
    """The content of a gather at a contributor."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, context.terms.bundles * len(context.roster.peers))
        self._whole_at: tuple[int, list[int]] = (-1, [])  # (version of the agreed items, members)

    def take(self, member: int, message: Offer | Reduced) -> None:
        """Note a member's offer, our own included; in a gather nothing is reduced."""
        if not isinstance(message, Offer) or not self.add_offer(member, message):
            return
        for bundle, (digest, size) in enumerate(zip(message.digests, message.sizes, strict=True)):
            item = RoundItem(member * self._terms.bundles + bundle, digest, size, mask_of([member]))
            self.announced(member, item)

    def closable(self, now_s: float) -> list[int] | None:
        """Return the places of all live members' payloads, or of those here if they suffice."""
        whole = self._whole()
        enough = 0 < self._terms.enough <= len(whole)
        quorate = len(whole) >= self._terms.min_participants
        if not enough and not (quorate and self.awaited(now_s, whole) <= set(whole)):
            return None
        bundles = self._terms.bundles
        return [member * bundles + bundle for member in whole for bundle in range(bundles)]

    def _whole(self) -> list[int]:
        """Return the members whose bundles are all agreed."""
        version, whole = self._whole_at
        if version != self.availability.version:
            bundles = self._terms.bundles
            counts = collections.Counter(index // bundles for index in self.availability.agreed)
            whole = sorted(member for member, count in counts.items() if count == bundles)
            self._whole_at = (self.availability.version, whole)
        return whole

    def _makers(self, item: RoundItem) -> tuple[int, ...]:
        return (item.index // self._terms.bundles,)
