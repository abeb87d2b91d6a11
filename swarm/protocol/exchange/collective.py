"""One exchange of a whole group, as one machine: offers in, one close list out.

Sans I/O: events come in (`offer`, `receive`, `fetched`, `reduced`, `unreduced`, `tick`), actions go
out (`take`). Each part can be read alone:

    roster.py     contributors, voters, suspects
    offers.py     members' offers             availability.py   items here, and the holders of each
    actions.py    actions to carry out        content.py        the content, and fetches in progress
    mean.py, gather.py, voter.py              the use of the content, by kind and role
    closing.py    when a list is proposed, which one is decided, when it can be applied

Members fetch items and announce their holdings; items that a quorum holds can be proposed; a
decided list is applied by every member that holds its content, and fetched by every other. The same
code runs for a member that is still computing: without an offer yet, it reduces, holds and votes.

If only a stage's members contribute, content is proposed once most of the live ones hold it: in a
stage with one live member, no other member could hold it.
"""

from collections.abc import Callable

import msgspec

from farflock.swarm.links import PeerId
from farflock.swarm.messages import (
    ContentMessage,
    Decided,
    Holds,
    Key,
    Offer,
    PaxosMessage,
    Promise,
    Propose,
    Reduced,
)
from farflock.swarm.protocol.agreement.electorate import Electorate
from farflock.swarm.protocol.agreement.rules import AcceptanceRules
from farflock.swarm.protocol.entitlement import BEGINNING, MAX_CLAIMED_ROUNDS, Precedent
from farflock.swarm.protocol.exchange.actions import Action, Actions
from farflock.swarm.protocol.exchange.availability import has
from farflock.swarm.protocol.exchange.close_list import (
    BadCloseList,
    CloseList,
    NotEntitled,
    RoundTerms,
)
from farflock.swarm.protocol.exchange.closing import Closing
from farflock.swarm.protocol.exchange.content import ExchangeContext
from farflock.swarm.protocol.exchange.gather import Gather
from farflock.swarm.protocol.exchange.holdings import (
    OFFER_WAIT_S,
    RESEND_S,
    Holdings,
    collect_s,
    first_repeat_s,
)
from farflock.swarm.protocol.exchange.mean import Mean
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.exchange.voter import Voter

# An offer to a round that stays open for hours is repeated at a bounded pace anyway.
MAX_REPEAT_DOUBLINGS = 16


class Collective:
    """One exchange as one member of its group sees it.

    `holding` returns whether the chunk store has a bundle; see `Closing` for the others."""

    def __init__(
        self,
        key: Key,
        electorate: Electorate,
        roster: Roster,
        terms: RoundTerms,
        started_s: float,
        prior: Precedent | None = BEGINNING,
        holding: Callable[[int, bytes], bool] = lambda bundle, digest: False,
        rules: AcceptanceRules | None = None,
    ) -> None:
        view = electorate.hash
        self.key, self.view, self.roster = key, view, roster
        self._actions = Actions(roster.others)
        context = ExchangeContext(key, electorate, roster, terms, started_s, self._actions, holding)
        self.ends_s = context.ends_s  # the deadline, after which an empty list is proposed
        kind = Voter if not roster.contributes else Gather if terms.kind == "gather" else Mean
        self._terms, self.content = terms, kind(context)
        self.closing = Closing(context, self.content, prior, rules)
        changes = self.content.availability.changes
        self._holdings = Holdings(key, view, roster.others, changes, started_s, terms.deadline_s)
        self._liars: frozenset[int] = frozenset()  # members that claimed more than they may
        self._sent_s = 0.0
        self._offer_repeats, self._offer_due_s = 0, started_s
        self._rely_on_the_living()

    # events

    def offer(self, now_s: float, offer: Offer) -> None:
        """Offer this member's contribution; only the first offer counts, as a key is used once.

        Tokens and weight that it has saved up beyond what it may claim are left out."""
        if self.roster.me not in self.content.offers:
            offer = self._entitled(offer)
            self.content.take(self.roster.me, offer)
            self._actions.to_others(offer)
            wait_s = first_repeat_s(self._terms.bundles, self._terms.deadline_s)
            self._offer_due_s = now_s + min(OFFER_WAIT_S, wait_s)
        self._advance(now_s, everywhere=True)

    def receive(self, now_s: float, sender: int, message: ContentMessage | PaxosMessage) -> None:
        """Handle a member's message about this key.

        Raise `BadCloseList` if it carries a value that no correct member proposes, and
        `NotEntitled` if the sender claims more than it may, or has proposed such a list."""
        self._require_good(message)
        if self.closing.is_decided and not isinstance(message, Decided):
            self._actions.send(self.closing.remind(now_s, sender, message))
            return
        match message:
            # Content concerns contributors only; a voter would wait for what it never fetches.
            case Offer() | Reduced() | Holds() if not self.roster.brings(sender):
                return
            case Offer() if sender in self.content.offers:
                self._holdings.answer(sender)  # it did not hear that its offer is here
                return
            case Offer() if not self._is_entitled(sender, message):
                # No honest member takes it, so none has to wait for its sender.
                self._liars |= {sender}
                raise NotEntitled("offer above its entitlement")
            case Offer():
                self.content.take(sender, message)
                self._holdings.answer(sender)
            case Reduced():
                self.content.take(sender, message)
            case Holds():
                self.content.availability.hear(sender, self._holdings.hear(sender, message))
            case _:
                self.closing.keep_time(now_s)
                self._actions.send(self.closing.decision.receive(sender, message))
        self._advance(now_s, everywhere=isinstance(message, Offer))

    def fetched(self, now_s: float, digest: bytes, *, intact: bool, corrupt: bool = False) -> None:
        """Handle the end of a fetch: the bundle is here (`intact`), `corrupt`, or unavailable."""
        self.content.fetched(digest, intact=intact, corrupt=corrupt)
        self._advance(now_s)

    def reduced(
        self, now_s: float, bundle: int, digest: bytes, size: int, rejected: tuple[int, ...]
    ) -> None:
        """Note that a bundle's reduction, without `rejected` members, is in the chunk store."""
        assert isinstance(self.content, Mean), f"{self.key}: nothing is reduced here"
        self.content.reduced(bundle, digest, size, rejected)
        self._advance(now_s)

    def unreduced(self, now_s: float, bundle: int) -> None:
        """Note that no payload of a reduction was usable; other payloads may still come."""
        assert isinstance(self.content, Mean), f"{self.key}: nothing is reduced here"
        self.content.unreduced(bundle)
        self._advance(now_s)

    def tick(self, now_s: float, suspects: frozenset[int]) -> None:
        """Let time pass: update suspects, repeat messages, take over for others."""
        self.roster.suspect(suspects | self._liars)
        if self.complete:
            return
        self._rely_on_the_living()
        self.closing.keep_time(now_s)
        if now_s - self._sent_s >= RESEND_S and not self.closing.is_decided:
            self._sent_s = now_s
            self._repeat(now_s)
        self.content.collect(self.content.availability.wanted())
        self._advance(now_s, everywhere=True)

    def take(self) -> list[Action]:
        """Return the actions since the last call, in order."""
        return self._actions.take()

    # what is known

    @property
    def close(self) -> CloseList | None:
        """The decided list; None until it is known here."""
        return self.closing.close

    @property
    def complete(self) -> bool:
        """True if a list is decided and all its content is here."""
        return self.closing.state == "complete"

    def awaited(self) -> tuple[PeerId, ...]:
        """Return the live contributors whose offers are missing."""
        roster, offers = self.roster, self.content.offers
        living = sorted(roster.living - {roster.me})
        return tuple(roster.peers[member] for member in living if member not in offers)

    def taken(self) -> tuple[bool, ...]:
        """Return for each bundle whether our contribution is in the result."""
        assert self.close is not None, f"{self.key} is not decided"
        me, bundles = self.roster.me, self._terms.bundles
        mine = {item.index % bundles for item in self.close.items if has(item, me)}
        return tuple(bundle in mine and me in self.content.offers for bundle in range(bundles))

    # what a message may say

    def _require_good(self, message: ContentMessage | PaxosMessage) -> None:
        """Raise `BadCloseList` for a value that may not be accepted or learned."""
        match message:
            case Propose(value=value):
                self.closing.require_entitled(value)
            case Promise(value=bytes(value)):
                try:
                    self.closing.require_entitled(value)
                except NotEntitled as error:  # it may have accepted it without the list before
                    raise BadCloseList(str(error)) from None
            case Decided(value=value):  # a quorum has signed it
                self.closing.require_list(value)

    def _is_entitled(self, member: int, offer: Offer) -> bool:
        prior, peer = self.closing.prior, self.roster.peers[member]
        rounds = MAX_CLAIMED_ROUNDS if prior is None else prior.rounds(peer)
        return self._terms.entitlement.allows(offer.tokens, offer.weight, rounds)

    def _entitled(self, offer: Offer) -> Offer:
        """Return our offer with at most what all others will allow us."""
        prior, entitlement = self.closing.prior, self._terms.entitlement
        rounds = 1 if prior is None else prior.sure_rounds(self.roster.peers[self.roster.me])
        tokens = min(offer.tokens, entitlement.max_tokens(rounds))
        weight = min(offer.weight, entitlement.max_weight(rounds))
        return msgspec.structs.replace(offer, tokens=tokens, weight=weight)

    # consequences of an event

    def _advance(self, now_s: float, *, everywhere: bool = False) -> None:
        """Take the steps that are now possible, in all bundles or those that the event affects."""
        if not self.closing.is_decided:
            self.content.work(now_s, everywhere=everywhere)
            self._report(now_s)
            self._actions.send(self.closing.decision.resume())
            self._actions.send(self.closing.put_forward(now_s))
        if self.closing.is_decided:
            self.closing.settle(now_s)

    def _rely_on_the_living(self) -> None:
        """If some members only vote, propose items that most live contributors hold.

        Otherwise an item needs a majority of all members, as the decision does anyway. A member
        that leaves proposes nothing that would be gone with it."""
        relied = self.roster.living if self.roster.has_voters else None
        self.content.availability.rely_on(relied, self.roster.staying)

    def _report(self, now_s: float) -> None:
        """Report our holdings: at once when they are complete, now and then while they grow."""
        if not self.roster.contributes:
            return
        availability = self.content.availability
        is_all = availability.whole and (availability.filled or self._terms.kind == "gather")
        self._actions.send(self._holdings.reports(now_s, self.content.offers, at_once=is_all))

    def _repeat(self, now_s: float) -> None:
        """Repeat messages that may have been lost."""
        me, offers = self.roster.me, self.content.offers
        if me in offers and now_s >= self._offer_due_s:
            # An answer may be late behind content, and an offer is long.
            self._offer_repeats += 1
            doubled = 2.0 ** min(self._offer_repeats, MAX_REPEAT_DOUBLINGS)
            wait_s = min(2 * RESEND_S * doubled, collect_s(self._terms.deadline_s))
            self._offer_due_s = now_s + wait_s
            unsure = set(self.roster.others) - self._holdings.offered
            self._actions.send((member, offers[me]) for member in sorted(unsure))
        self._actions.send(self.content.repeats(now_s))
        self._actions.send(self.closing.decision.retry())
