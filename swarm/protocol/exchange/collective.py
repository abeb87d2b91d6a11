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
from farflock.swarm.protocol.exchange.actions import Action, Actions
from farflock.swarm.protocol.exchange.availability import has
from farflock.swarm.protocol.exchange.close_list import CloseList, RoundTerms
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


class Collective:
    """One exchange as one member of its group sees it.

    `holding` returns whether the chunk store has a bundle; see `Closing` for the others."""

    def __init__(
        self,
        key: Key,
        view: bytes,
        roster: Roster,
        terms: RoundTerms,
        started_s: float,
        prior_tokens: int | None = 0,
        holding: Callable[[int, bytes], bool] = lambda bundle, digest: False,
        holds_back: Callable[[], bool] = lambda: False,
    ) -> None:
        self.key, self.view, self.roster = key, view, roster
        self._actions = Actions(roster.others)
        context = ExchangeContext(key, view, roster, terms, started_s, self._actions, holding)
        self.ends_s = context.ends_s  # the deadline, after which an empty list is proposed
        self.began_s = started_s
        self.deadline_s = terms.deadline_s  # of it, from the beginning here
        kind = Voter if not roster.contributes else Gather if terms.kind == "gather" else Mean
        self._terms, self.content = terms, kind(context)
        self.closing = Closing(context, self.content, prior_tokens, holds_back)
        changes = self.content.availability.changes
        self._holdings = Holdings(key, view, roster.others, changes, started_s, terms.deadline_s)
        self._sent_s = 0.0
        self._offer_repeats, self._offer_due_s = 0, started_s
        self._rely_on_the_living()

    # events

    def offer(self, now_s: float, offer: Offer) -> None:
        """Offer this member's contribution; only the first offer counts, as a key is used once."""
        if self.roster.me not in self.content.offers:
            self.content.take(self.roster.me, offer)
            self._actions.to_others(offer)
            wait_s = first_repeat_s(self._terms.bundles, self._terms.deadline_s)
            self._offer_due_s = now_s + min(OFFER_WAIT_S, wait_s)
        self._advance(now_s, everywhere=True)

    def twins(self) -> tuple[PeerId, ...]:
        """Return the members that are known to have offered the same bytes as this one."""
        return tuple(self.roster.peers[at] for at in self.content.offers.twins(self.roster.me))

    def receive(self, now_s: float, sender: int, message: ContentMessage | PaxosMessage) -> None:
        """Handle a member's message about this key.

        Raise `BadCloseList` if it carries a value that no correct member proposes."""
        # Checked first: no bad value may be accepted or learned.
        if isinstance(message, Propose | Promise | Decided) and message.value is not None:
            self.closing.require_list(message.value)
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
            case Offer():
                self.content.take(sender, message)
                self._holdings.answer(sender)
            case Reduced():
                self.content.take(sender, message)
            case Holds():
                self.content.availability.hear(sender, self._holdings.hear(sender, message))
            case _:
                self._actions.send(self.closing.decision.receive(sender, message))
        self._advance(now_s, everywhere=isinstance(message, Offer))

    def fetched(self, now_s: float, digest: bytes, *, intact: bool, corrupt: bool = False) -> None:
        """Handle the end of a fetch: the bundle is here (`intact`), `corrupt`, or unavailable."""
        self.content.fetched(digest, intact=intact, corrupt=corrupt)
        if intact and not corrupt:
            self._actions.send(self.closing.decision.resume())
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
        self.roster.suspect(suspects)
        if self.complete:
            return
        self._rely_on_the_living()
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

    # consequences of an event

    def _advance(self, now_s: float, *, everywhere: bool = False) -> None:
        """Take the steps that are now possible, in all bundles or those that the event affects."""
        if not self.closing.is_decided:
            self.content.work(now_s, everywhere=everywhere)
            self._report(now_s)
            self._actions.send(self.closing.put_forward(now_s))
        if self.closing.is_decided:
            self.closing.settle(now_s)

    def _rely_on_the_living(self) -> None:
        """If some members only vote, propose items that most live contributors hold.

        Otherwise an item needs a majority of all members, as the decision does anyway. A member
        that leaves proposes nothing that would be gone with it."""
        electorate = self.roster.living if self.roster.has_voters else None
        self.content.availability.rely_on(electorate, self.roster.staying)

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
            wait_s = min(2 * RESEND_S * 2.0**self._offer_repeats, collect_s(self._terms.deadline_s))
            self._offer_due_s = now_s + wait_s
            unsure = set(self.roster.others) - self._holdings.offered
            self._actions.send((member, offers[me]) for member in sorted(unsure))
        self._actions.send(self.content.repeats(now_s))
        self._actions.send(self.closing.decision.retry())
