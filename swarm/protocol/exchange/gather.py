"""A gather: each member's shards are the items, and everybody gets everybody's.

What could be decided is a function of what is held and of the hour, so a gather has no states
beside those of every exchange (`closing`): the payloads of all living members close it; when half
of the time is over, or once there are `enough`, whichever there are.
"""

import collections
from collections.abc import Callable

from farflock.swarm.messages import Message, Offer, Reduced
from farflock.swarm.protocol.exchange.actions import Actions
from farflock.swarm.protocol.exchange.availability import Availability, RoundItem, mask_of
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.fetches import Fetches
from farflock.swarm.protocol.exchange.offers import Offers
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.exchange.timing import Timing


class Gather:
    """The content of a gather at a member that contributes to it."""

    def __init__(
        self,
        roster: Roster,
        terms: RoundTerms,
        timing: Timing,
        actions: Actions,
        holding: Callable[[bytes], bool],
    ) -> None:
        self._roster, self._terms, self._timing = roster, terms, timing
        size = len(roster.peers)
        self.offers = Offers(terms.shards)
        self.availability = Availability(terms.shards * size, size, roster.me)
        self.fetches = Fetches(roster, self.availability, actions, terms.shards, holding, self._owner)
        self._whole_at: tuple[int, list[int]] = (-1, [])  # as of a version of the holdings

    def take(self, member: int, message: Offer | Reduced) -> None:
        """Note what a member brings, mine included; in a gather nothing is reduced."""
        if not isinstance(message, Offer) or not self.offers.add(member, message):
            return
        if member == self._roster.me:
            self.availability.hold_all(message.digests)
        for shard, (digest, size) in enumerate(zip(message.digests, message.sizes, strict=True)):
            item = RoundItem(member * self._terms.shards + shard, digest, size, mask_of([member]))
            self.fetches.announced(member, item)

    def fetched(self, digest: bytes) -> None:
        """A chunk has come, or could not be had: nothing waits for a single one."""

    def work(self, now_s: float, *, everywhere: bool = False) -> None:
        """There is nothing to compute."""

    @property
    def repeated(self) -> list[Message]:
        """My offer."""
        me = self._roster.me
        return [self.offers[me]] if me in self.offers else []

    def closable(self, now_s: float) -> list[int] | None:
        """The places of all live members' payloads, or of whichever there are if that is enough."""
        whole = self._whole()
        enough = 0 < self._terms.enough <= len(whole)
        late = now_s >= self._timing.soft_s
        quorate = len(whole) >= self._terms.min_participants
        if not enough and not (quorate and (late or self._roster.living <= set(whole))):
            return None
        shards = self._terms.shards
        return [member * shards + shard for member in whole for shard in range(shards)]

    def may_accept(self, value: bytes) -> bool:
        """A contributor accepts any list that could be applied: it gets the content afterwards."""
        return True

    def _whole(self) -> list[int]:
        """The members all of whose shards are agreed."""
        version, whole = self._whole_at
        if version != self.availability.version:
            shards = self._terms.shards
            counts = collections.Counter(index // shards for index in self.availability.agreed)
            whole = sorted(member for member, count in counts.items() if count == shards)
            self._whole_at = (self.availability.version, whole)
        return whole

    def _owner(self, item: RoundItem) -> tuple[int, ...]:
        return (item.index // self._terms.shards,)
