"""A mean: for each bundle, one member reduces all contributions.

The reduced bundles are the items. Bundle b is reduced by the first live member of a rotation that
is the same in all rounds. A reducer fetches the contributions to its bundles as they are offered,
reduces once no more are expected, and announces the result; the others fetch it. If the reducer
dies or stays silent, the next in line takes over, and one bundle may have rival results: the close
list names one of each. If nothing that is expected has any weight, there is no mean: the exchange
fails at once, and its members go on to the next round.

The table has the states of one bundle at a member that reduces it. "spoilt": no contribution was
usable. "narrowed": in a uniform mean, the result has contributions that another bundle is missing.
A bundle that another member reduces stays idle here.
"""

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from farflock.swarm.messages import MAX_MEMBERS, Message, Offer, Reduced
from farflock.swarm.protocol.decide import TAKEOVER_S
from farflock.swarm.protocol.exchange.actions import Reduce
from farflock.swarm.protocol.exchange.availability import RoundItem, contributions, mask_of
from farflock.swarm.protocol.exchange.content import Content, ExchangeContext
from farflock.swarm.protocol.exchange.holdings import RESEND_S, first_repeat_s
from farflock.swarm.protocol.exchange.offers import Input
from farflock.swarm.protocol.transitions import after

# Fraction of the deadline after which a live but silent reducer is replaced: after `SOFT`, when it
# should have begun, and early enough for another to reduce and be heard.
LATE_REDUCER = 0.7

BundleState = Literal["idle", "reducing", "announced"]
BundleEvent = Literal["begun", "reduced", "spoilt", "narrowed"]

BUNDLE_TABLE: dict[tuple[BundleState, BundleEvent], BundleState] = {
    ("idle", "begun"): "reducing",
    ("reducing", "reduced"): "announced",
    ("reducing", "spoilt"): "idle",
    ("announced", "narrowed"): "reducing",
}


class Mean(Content):
    """The content of a mean at a contributor.

    In a `uniform` mean each contribution is in all bundles or in none: if one bundle was reduced
    without a member, because it died while others fetched from it, the reducers of the other
    bundles reduce again without it."""

    def __init__(self, context: ExchangeContext) -> None:
        bundles, uniform = context.terms.bundles, context.terms.uniform
        super().__init__(context, bundles, fewest=uniform)
        roster = context.roster
        # The bundles of which this member is the first reducer, and the time after which others of
        # them may be its own, too.
        self._firsts = [b for b in range(bundles) if roster.reducers(b)[0] == roster.me]
        self._late_s = context.started_s + context.terms.deadline_s * LATE_REDUCER
        # Bit mask of members that may be in all bundles; if not uniform, all.
        self._common = (1 << MAX_MEMBERS) - 1
        self._may_narrow = False  # a reduction was announced since the last `_narrow`
        self._states: list[BundleState] = ["idle"] * bundles
        # By bundle, for those that this member reduces or has reduced.
        self._inputs: dict[int, tuple[Input, ...]] = {}
        self._results: dict[int, Reduced] = {}  # in order of announcement
        self._first_repeat_s = first_repeat_s(bundles, context.terms.deadline_s)
        # By bundle, when to repeat the announcement next, and how often it was repeated.
        self._repeats: dict[int, tuple[float, int]] = {}
        # By missing contribution, the bundles that need it.
        self._waiting: dict[bytes, set[int]] = {}
        self._concerned: set[int] = set()  # bundles that may have become reducible
        # Bundles of which all contributions that are expected are here, and none has any weight.
        self._weightless: set[int] = set()

    # events

    def take(self, member: int, message: Offer | Reduced) -> None:
        """Note a member's offer or reduction, our own included."""
        if isinstance(message, Reduced):
            self._take_reduced(member, message)
        else:
            self.add_offer(member, message)

    def fetched(self, digest: bytes, *, intact: bool, corrupt: bool) -> None:
        """Handle the end of a contribution's fetch, and reconsider the bundles that need it."""
        super().fetched(digest, intact=intact, corrupt=corrupt)
        self._concerned |= self._waiting.pop(digest, set())

    def reduced(self, bundle: int, digest: bytes, size: int, rejected: Collection[int]) -> None:
        """Announce our reduction of a bundle, without the corrupt content of `rejected` members."""
        self._move(bundle, "reduced")
        context, inputs = self._context, self._inputs[bundle]
        self.availability.spoil(*(entry for member, _, entry in inputs if member in rejected))
        self.availability.hold(digest)
        mask = mask_of(member for member, _, _ in inputs if member not in rejected)
        self._repeats.pop(bundle, None)
        message = self._results[bundle] = Reduced(
            context.key, context.view, bundle, digest, size, mask
        )
        self._take_reduced(self._roster.me, message)
        context.actions.to_others(message)

    def unreduced(self, bundle: int) -> None:
        """Mark a reduction's payloads as corrupt, as none was usable; new ones may still come."""
        self._move(bundle, "spoilt")
        self.availability.spoil(*(digest for _, _, digest in self._inputs.pop(bundle)))
        self._concerned.add(bundle)

    def _take_reduced(self, member: int, message: Reduced) -> None:
        known = 0 < int.from_bytes(message.mask, "little") < 1 << len(self._roster.peers)
        if message.bundle < self._terms.bundles and known:
            if self._terms.uniform:
                self._common &= int.from_bytes(message.mask, "little")
                self._may_narrow = True
            self.announced(member, item_of(message))

    # consequences of events

    def work(self, now_s: float, *, everywhere: bool = False) -> None:
        """Reduce what can be reduced now, in all bundles or in those of the last event."""
        bundles = self._possible(now_s) if everywhere else sorted(self._concerned)
        self._concerned.clear()
        if everywhere:
            self._weightless.clear()
        for bundle in bundles:
            if self._states[bundle] == "idle" and self._is_mine(bundle, now_s):
                self._try(bundle, now_s)
        if self._may_narrow:
            self._may_narrow = False
            self._narrow()

    def repeats(self, now_s: float) -> list[tuple[int, Message]]:
        """Return our reductions, to the members that do not hold them.

        Less and less often, for a member may know of a bundle and still be fetching it: after an
        outage, the next repeat comes at the latest when it has been over for as long as it
        lasted."""
        sends: list[tuple[int, Message]] = []
        wait_s = max(RESEND_S, self._first_repeat_s)
        for bundle, message in self._results.items():
            due_s, count = self._repeats.setdefault(bundle, (now_s + self._first_repeat_s, 0))
            if now_s >= due_s:
                self._repeats[bundle] = (now_s + wait_s * 2.0**count, count + 1)
                holders = {self._roster.me, *self.availability.said(item_of(message))}
                sends += [(other, message) for other in self._roster.others if other not in holders]
        return sends

    def closable(self, now_s: float) -> Iterable[int] | None:
        """Return the places of all bundles once one result of each is agreed, none if a bundle has
        no mean."""
        agreed, bundles = self.availability.agreed, self._terms.bundles
        if len(agreed) < bundles:
            return () if self._weightless else None
        masks = {item.mask for item in agreed.values()}
        return None if self._terms.uniform and len(masks) > 1 else range(bundles)

    def _move(self, bundle: int, event: BundleEvent) -> None:
        self._states[bundle] = after(BUNDLE_TABLE, self._states[bundle], event)

    def _begin(self, bundle: int, event: BundleEvent, inputs: tuple[Input, ...]) -> None:
        self._move(bundle, event)
        self._inputs[bundle] = inputs
        self._context.actions.add(Reduce(bundle, inputs))

    def _try(self, bundle: int, now_s: float) -> None:
        """Fetch the contributions to one of our bundles; reduce once no more are expected, unless
        they have no weight."""
        inputs = self._usable(bundle)
        held = self.availability.held
        missing = [(member, digest) for member, _, digest in inputs if digest not in held]
        for member, digest in missing:
            self._waiting.setdefault(digest, set()).add(bundle)
            size = self.offers[member].sizes[bundle]
            self.fetch(bundle, digest, size, functools.partial(self._contributor, member))
        here = tuple(entry for entry in inputs if entry[2] in held)
        all_here = self._is_all_here({member for member, _ in missing})
        weighs = any(weight for _, weight, _ in here)
        if all_here and not weighs:
            self._weightless.add(bundle)
        enough = weighs and len(here) >= self._terms.min_participants
        if enough and (all_here or now_s >= self._context.soft_s):
            self._begin(bundle, "begun", here)

    def _narrow(self) -> None:
        """Reduce again the bundles with contributions that another bundle is missing."""
        for bundle in list(self._results):
            fewer = tuple(entry for entry in self._inputs[bundle] if self._common >> entry[0] & 1)
            has = contributions(item_of(self._results[bundle]))
            # A narrowed reduction has the same lower bound as any other (`_try`).
            if max(self._terms.min_participants, 1) <= len(fewer) < has:
                del self._results[bundle]  # until it is replaced
                self._begin(bundle, "narrowed", fewer)

    def _possible(self, now_s: float) -> Sequence[int]:
        """Return the bundles that this member may have to reduce: before anybody is late or
        suspect, those that it is the first to reduce."""
        if now_s >= self._late_s or self._roster.suspects:
            return range(self._terms.bundles)
        return self._firsts

    def _is_mine(self, bundle: int, now_s: float) -> bool:
        """True if this member reduces the bundle: it is first in line, or those before it are gone.

        A live but silent reducer is replaced late in the round, if no usable result exists."""
        order = self._roster.reducers(bundle)
        rank = order.index(self._roster.me)
        if rank == 0:
            return True
        if now_s < self._late_s and order[0] not in self._roster.suspects:
            return False  # the common case
        # In a uniform mean, results with contributions that another bundle lacks do not count.
        rivals = [
            item.digest
            for item in self.availability.rivals[bundle].values()
            if not int.from_bytes(item.mask, "little") & ~self._common
        ]
        if any(digest in self.availability.held for digest in rivals):
            return False
        if all(member in self._roster.suspects for member in order[:rank]):
            return True
        # Staggered by rank, so that one member at a time takes over.
        return not rivals and now_s >= self._late_s + TAKEOVER_S * rank

    def _usable(self, bundle: int) -> tuple[Input, ...]:
        """Return the contributions to a bundle that may be in its result, in member order."""
        return tuple(
            (member, weight, digest)
            for member, weight, digest in self.offers.inputs(bundle)
            if digest not in self.availability.corrupt and self._common >> member & 1
        )

    def _is_all_here(self, missing: set[int]) -> bool:
        """True if no more contributions are expected than those that are here.

        Suspects may never deliver, so their payloads hold nothing up."""
        return self.offers.includes(self._roster.living) and not missing - self._roster.suspects

    def _contributor(self, member: int) -> tuple[int, ...]:
        return (member,) if self._decided is None else ()

    def _makers(self, item: RoundItem) -> tuple[int, ...]:
        return self._roster.reducers(item.index)


def item_of(message: Reduced) -> RoundItem:
    """Return the item of a reduced bundle."""
    return RoundItem(message.bundle, message.digest, message.size, message.mask)
