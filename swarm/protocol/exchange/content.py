"""The content of one exchange: the part that all kinds of exchanges share.

A member runs one fetch per digest at a time, from members that announced the item or hold it. Items
are numbered so that `index % bundles` is their bundle.
"""

import functools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from farflock.swarm.messages import Key, Message, Offer, Reduced
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.exchange.actions import Actions, Fetch
from farflock.swarm.protocol.exchange.availability import Availability, RoundItem
from farflock.swarm.protocol.exchange.close_list import RoundTerms, decode_close_list
from farflock.swarm.protocol.exchange.offers import Offers
from farflock.swarm.protocol.exchange.roster import Roster

# Fraction of the deadline for which the group waits for slow live members. The rest is for the
# reduction and the decision.
SOFT = 0.5
# Laggards are waited for this much longer than all others needed.
GRACE = 0.25

Holders = Callable[[], tuple[int, ...]]  # returns the members to ask now


@dataclass(frozen=True, slots=True)
class ExchangeContext:
    """The context of all parts of one exchange, which begins at `started_s` on the local clock.

    `holding` returns whether the bundle with a number and a digest is in the chunk store."""

    key: Key
    electorate: Electorate
    roster: Roster
    terms: RoundTerms
    started_s: float
    actions: Actions
    holding: Callable[[int, bytes], bool]

    @property
    def view(self) -> bytes:
        """The hash by which messages name the electorate."""
        return self.electorate.hash

    @property
    def soft_s(self) -> float:
        """The time after which members stop waiting for live ones that have contributed nothing."""
        return self.started_s + SOFT * self.terms.deadline_s

    @property
    def ends_s(self) -> float:
        """The deadline, after which an empty list is proposed."""
        return self.started_s + self.terms.deadline_s


class Content:
    """The offers and items of one exchange at one member, with `places` places for items.

    `Mean`, `Gather` and `Voter` define what can be decided. Law: what `closable` names is agreed in
    `availability` until it is proposed; `work` requests things by actions and never waits."""

    def __init__(self, context: ExchangeContext, places: int, *, fewest: bool = False) -> None:
        self._context, self._roster, self._terms = context, context.roster, context.terms
        self.offers = Offers(context.terms.bundles)
        self.availability = Availability(
            places, context.electorate, context.roster.me, fewest=fewest
        )
        self._fetching: set[bytes] = set()
        # By digest, the members that announced the item, and so hold it.
        self._announcers: dict[bytes, set[int]] = {}
        # Once a list is decided, the digests of its items that are missing here. All other fetches
        # end: members drop what the list does not name, and would refuse it until the deadline.
        self._decided: frozenset[bytes] | None = None
        self._prompt_s: float | None = None  # when all but laggards had brought what they bring
        # The list last proposed here, and what is missing of it.
        self._vouched, self._lacking = b"", list[RoundItem]()

    # defined by each kind of exchange

    def take(self, member: int, message: Offer | Reduced) -> None:
        """Note a member's offer or reduction, our own included."""

    def work(self, now_s: float, *, everywhere: bool = False) -> None:
        """Take the steps that are now possible, in all bundles or those that the event affects."""

    def closable(self, now_s: float) -> Iterable[int] | None:
        """Return the places of the items that could be decided now; None to keep waiting."""
        return None

    def may_accept(self, value: bytes) -> bool:
        """Return True if this member holds what it vouches for; otherwise fetch what it lacks.

        So a decided list has its content at a quorum, whatever its proposer holds."""
        if value != self._vouched:
            self._vouched, self._lacking = value, self._vouches_for(value)
        held = self.availability.held
        self._lacking = [item for item in self._lacking if item.digest not in held]
        self._fetch_lacking(self._lacking)
        return all(item.digest in held for item in self._lacking)

    def _vouches_for(self, value: bytes) -> list[RoundItem]:
        """Return the items of a list that this member must hold before it accepts the list."""
        return list(decode_close_list(value, self._terms, self._roster.contributors).items)

    def _fetch_lacking(self, items: list[RoundItem]) -> None:
        """Fetch the items that a proposed list names and this member lacks."""
        self.collect(items)

    def repeats(self, now_s: float) -> list[tuple[int, Message]]:
        """Return the announcements to repeat now, and the members that may have missed them."""
        return []

    def _makers(self, item: RoundItem) -> tuple[int, ...]:
        """Return the members that should have an item even if they did not announce it."""
        return ()

    # common to all kinds

    def awaited(self, now_s: float, here: Collection[int]) -> frozenset[int]:
        """Return the contributors that are waited for, of which those `here` have brought what they
        bring."""
        context, roster = self._context, self._roster
        if now_s >= context.soft_s:
            return frozenset()
        if not roster.prompt <= frozenset(here):
            self._prompt_s = None
            return roster.living
        self._prompt_s = now_s if self._prompt_s is None else self._prompt_s
        needed_s = self._prompt_s - context.started_s
        return roster.living if now_s < self._prompt_s + GRACE * needed_s else roster.prompt

    def add_offer(self, member: int, offer: Offer) -> bool:
        """Note an offer, and hold our own chunks; return False if it does not count."""
        is_new = self.offers.add(member, offer)
        if is_new:
            self.availability.know_offer(member)
        if is_new and member == self._roster.me:
            self.availability.hold(*offer.digests)
        return is_new

    def announced(self, member: int, item: RoundItem) -> None:
        """Note an item announced by a member, and fetch it if it is new here."""
        if self.availability.add(item):
            self._announcers.setdefault(item.digest, set()).add(member)
            self.collect([item])
        elif item.digest in self._announcers:
            self._announcers[item.digest].add(member)

    def collect(self, items: Iterable[RoundItem]) -> None:
        """Fetch those items that are not here yet."""
        for item in items:
            holders = functools.partial(self._holders, item)
            self.fetch(item.index % self._terms.bundles, item.digest, item.size, holders)

    def collect_decided(self, items: Iterable[RoundItem]) -> None:
        """Fetch the items of a decided list that are not here yet, from any member.

        Most members hold them, even if none has said so to this one, and those that have may have
        been restarted since."""
        missing = list(items)
        self._decided = frozenset(item.digest for item in missing)
        self.collect(missing)

    def fetch(self, bundle: int, digest: bytes, size: int, holders: Holders) -> None:
        """Fetch a bundle unless it is here, corrupt, or being fetched."""
        held, corrupt = self.availability.held, self.availability.corrupt
        if digest in self._fetching or digest in held or digest in corrupt:
            return
        if self._context.holding(bundle, digest):
            self.availability.hold(digest)
        else:
            self._fetching.add(digest)
            self._context.actions.add(Fetch(bundle, digest, size, holders))

    def fetched(self, digest: bytes, *, intact: bool, corrupt: bool) -> None:
        """Handle the end of a fetch; a bundle that was unavailable may be requested again."""
        self._fetching.discard(digest)
        if corrupt:
            self.availability.spoil(digest)
        elif intact:
            self.availability.hold(digest)

    def _holders(self, item: RoundItem) -> tuple[int, ...]:
        """Return the members that announced or hold an item; if none is live, its makers too; once
        it is decided, all, and none for what the decided list does not need.

        The chunk store asks the least busy of these, so a member that cannot have the item yet must
        not be among them: its refusal would cost a round trip."""
        if self._decided is not None and item.digest not in self._decided:
            return ()
        me = self._roster.me
        known = {*self._announcers.get(item.digest, ()), *self.availability.said(item)} - {me}
        if known - self._roster.suspects and self._decided is None:
            return tuple(sorted(known))
        makers = (member for member in self._makers(item) if member != me)
        others = () if self._decided is None else self._roster.others
        return tuple(dict.fromkeys((*sorted(known), *makers, *others)))
