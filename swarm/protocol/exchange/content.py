"""The content of one exchange, as far as all kinds of exchanges have it in common.

A member fetches each digest once at a time, and asks the members that announced an item or say to
hold it. Items are numbered so that `index % shards` is their shard.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from farflock.swarm.messages import Key, Message, Offer, Reduced
from farflock.swarm.protocol.exchange.actions import Actions, Fetch
from farflock.swarm.protocol.exchange.availability import Availability, RoundItem
from farflock.swarm.protocol.exchange.close_list import RoundTerms
from farflock.swarm.protocol.exchange.offers import Offers
from farflock.swarm.protocol.exchange.roster import Roster

SOFT = 0.5  # of the deadline: until then the live but slow are waited for

Holders = Callable[[], tuple[int, ...]]  # the members to ask now


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """The context of all parts of one exchange; `holding` says whether the chunk store has a digest.

    It begins at `started_s`, on the local clock.
    """

    key: Key
    view: bytes
    roster: Roster
    terms: RoundTerms
    started_s: float
    actions: Actions
    holding: Callable[[bytes], bool]

    @property
    def soft_s(self) -> float:
        """From then on nobody waits for a member that lives and has brought nothing."""
        return self.started_s + SOFT * self.terms.deadline_s

    @property
    def ends_s(self) -> float:
        """The deadline: from then on an empty list is put forward."""
        return self.started_s + self.terms.deadline_s


class Content:
    """The offers and items of one exchange at one member, which has `places` places for items.

    `Mean`, `Gather` and `Voter` say what can be decided. Law: what `closable` names is agreed in
    `availability` and stays so until it is put forward; `work` asks for things by actions and waits
    for nothing.
    """

    def __init__(self, context: ExchangeContext, places: int, *, fewest: bool = False) -> None:
        self._context, self._roster, self._terms = context, context.roster, context.terms
        self.offers = Offers(context.terms.shards)
        self.availability = Availability(places, len(context.roster.peers), context.roster.me, fewest=fewest)
        self._fetching: set[bytes] = set()
        # By item, the members that announced it: what a member announces it holds.
        self._announcers: dict[bytes, set[int]] = {}

    # what the kinds of exchanges make of it

    def take(self, member: int, message: Offer | Reduced) -> None:
        """Note what a member brings, mine included."""

    def work(self, now_s: float, *, everywhere: bool = False) -> None:
        """Do what has become possible: in all shards, or where the last event concerned them."""

    def closable(self, now_s: float) -> Iterable[int] | None:
        """The places of the items that could be decided now; None to wait on."""
        return None

    def may_accept(self, value: bytes) -> bool:
        """Return True if I may accept this list now; otherwise fetch what that takes.

        A contributor accepts any list that could be applied: it gets the content afterwards.
        """
        return True

    @property
    def repeated(self) -> list[Message]:
        """My messages about content that others may have missed."""
        me = self._roster.me
        return [self.offers[me]] if me in self.offers else []

    def _makers(self, item: RoundItem) -> tuple[int, ...]:
        """The members that ought to have an item whether or not they said so."""
        return ()

    # what all do alike

    def add_offer(self, member: int, offer: Offer) -> bool:
        """Note an offer; my own chunks are here. False if it does not count."""
        is_new = self.offers.add(member, offer)
        if is_new and member == self._roster.me:
            self.availability.hold(*offer.digests)
        return is_new

    def announced(self, member: int, item: RoundItem) -> None:
        """Note an item that a member announces, and fetch it if it is new here."""
        if self.availability.add(item):
            self._announcers.setdefault(item.digest, set()).add(member)
            self.collect([item])
        elif item.digest in self._announcers:
            self._announcers[item.digest].add(member)

    def collect(self, items: Iterable[RoundItem]) -> None:
        """Fetch those of these items that are not here yet."""
        for item in items:
            holders = functools.partial(self._holders, item)
            self.fetch(item.index % self._terms.shards, item.digest, item.size, holders)

    def fetch(self, shard: int, digest: bytes, size: int, holders: Holders) -> None:
        """Fetch a chunk that is neither here, nor corrupt, nor on its way."""
        held, corrupt = self.availability.held, self.availability.corrupt
        if digest in self._fetching or digest in held or digest in corrupt:
            return
        if self._context.holding(digest):
            self.availability.hold(digest)
        else:
            self._fetching.add(digest)
            self._context.actions.add(Fetch(shard, digest, size, holders))

    def fetched(self, digest: bytes, *, intact: bool, corrupt: bool) -> None:
        """A fetch is over; what could not be had now may be asked for again."""
        self._fetching.discard(digest)
        if corrupt:
            self.availability.spoil(digest)
        elif intact:
            self.availability.hold(digest)

    def _holders(self, item: RoundItem) -> tuple[int, ...]:
        """The members that announced an item or hold it; while none of them lives, its makers too.

        The chunk store asks the least busy of these, so no member that cannot have the item yet may
        be among them: it would only answer, a round trip later, that it does not.
        """
        me = self._roster.me
        known = {*self._announcers.get(item.digest, ()), *self.availability.said(item)} - {me}
        if known - self._roster.suspects:
            return tuple(sorted(known))
        makers = (member for member in self._makers(item) if member != me)
        return tuple(dict.fromkeys((*sorted(known), *makers)))
