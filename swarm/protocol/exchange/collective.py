"""One exchange of a whole group, as one machine: offers in, one close list out.

Sans I/O: events come in (`offer`, `receive`, `fetched`, `reduced`, `unreduced`, `tick`), actions go
out (`take`). The parts, each readable alone:

    roster.py     who contributes, who only votes, who is suspect
    offers.py     what members offered        availability.py   which items are here, and who holds what
    actions.py    what is to be done          content.py        the content, and what of it is on its way
    mean.py, gather.py, voter.py              what a member makes of the content, by kind and part
    closing.py    when a list is put forward, which one is decided, when it can be applied

Members fetch items and say what they hold; what a quorum holds can be put forward; what is decided
is applied by every member that holds its content, and fetched by every other. The same code runs
for a member that is still computing: it has no offer yet, but reduces, holds and votes.

Where a stage's members alone contribute, content is put forward as soon as most of the living ones
hold it: of a stage that has one living member left nobody else could.
"""

from collections.abc import Callable

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Decided, Holds, Key, Offer, PaxosMessage, Promise, Propose, Reduced, ShardMessage
from farflock.swarm.protocol.exchange.actions import Action, Actions
from farflock.swarm.protocol.exchange.availability import has
from farflock.swarm.protocol.exchange.close_list import CloseList, RoundTerms
from farflock.swarm.protocol.exchange.closing import Closing
from farflock.swarm.protocol.exchange.content import ExchangeContext
from farflock.swarm.protocol.exchange.gather import Gather
from farflock.swarm.protocol.exchange.mean import Mean
from farflock.swarm.protocol.exchange.roster import Roster
from farflock.swarm.protocol.exchange.voter import Voter

RESEND_S = 0.5


class Collective:
    """One exchange as one member of its group sees it.

    `holding` says whether the chunk store has a digest; `prior_tokens` and `holds_back` are
    `Closing`'s.
    """

    def __init__(
        self,
        key: Key,
        view: bytes,
        roster: Roster,
        terms: RoundTerms,
        started_s: float,
        prior_tokens: int | None = 0,
        holding: Callable[[bytes], bool] = lambda digest: False,
        holds_back: Callable[[], bool] = lambda: False,
    ) -> None:
        self.key, self.view, self.roster = key, view, roster
        self._actions = Actions(roster.others)
        context = ExchangeContext(key, view, roster, terms, started_s, self._actions, holding)
        self.ends_s = context.ends_s  # the deadline: from then on an empty list is put forward
        kind = Voter if not roster.contributes else Gather if terms.kind == "gather" else Mean
        self._terms, self.content = terms, kind(context)
        self.closing = Closing(context, self.content, prior_tokens, holds_back)
        self._reported = b""
        self._sent_s = 0.0
        self._rely_on_the_living()

    # events

    def offer(self, now_s: float, offer: Offer) -> None:
        """Bring my own contribution; only the first one counts, for a key is used once."""
        if self.roster.me not in self.content.offers:
            self.content.take(self.roster.me, offer)
            self._actions.to_others(offer)
        self._advance(now_s, everywhere=True)

    def receive(self, now_s: float, sender: int, message: ShardMessage | PaxosMessage) -> None:
        """Take in a member's message about this key.

        `BadCloseList` if it carries a value that no correct member puts forward.
        """
        if isinstance(message, Propose | Promise | Decided) and message.value is not None:
            self.closing.require_list(message.value)
        if self.closing.is_decided and not isinstance(message, Decided):
            self._actions.send(self.closing.remind(sender, message))
            return
        match message:
            case Offer() | Reduced() | Holds() if not self.roster.brings(sender):
                return
            case Offer() | Reduced():
                self.content.take(sender, message)
            case Holds(prefixes=prefixes):
                self.content.availability.hear(sender, prefixes)
            case _:
                self._actions.send(self.closing.decision.receive(sender, message))
        self._advance(now_s, everywhere=isinstance(message, Offer))

    def fetched(self, now_s: float, digest: bytes, *, intact: bool, corrupt: bool = False) -> None:
        """A fetch is over: the chunk is here (`intact`), is `corrupt`, or could not be had now."""
        self.content.fetched(digest, intact=intact, corrupt=corrupt)
        if intact and not corrupt:
            self._actions.send(self.closing.decision.resume())
        self._advance(now_s)

    def reduced(self, now_s: float, shard: int, digest: bytes, size: int, rejected: tuple[int, ...]) -> None:
        """My reduction of a shard is in the chunk store, without what `rejected` members sent."""
        assert isinstance(self.content, Mean), f"{self.key}: nothing is reduced here"
        self.content.reduced(shard, digest, size, rejected)
        self._advance(now_s)

    def unreduced(self, now_s: float, shard: int) -> None:
        """No payload of a reduction was usable; try again with whatever else comes."""
        assert isinstance(self.content, Mean), f"{self.key}: nothing is reduced here"
        self.content.unreduced(shard)
        self._advance(now_s)

    def tick(self, now_s: float, suspects: frozenset[int]) -> None:
        """Time passes: who is suspect, what to repeat, what to take over."""
        self.roster.suspect(suspects)
        if self.complete:
            return
        self._rely_on_the_living()
        if now_s - self._sent_s >= RESEND_S:
            self._sent_s = now_s
            self._repeat()
        self.content.collect(self.content.availability.wanted())
        self._advance(now_s, everywhere=True)

    def take(self) -> list[Action]:
        """The actions since the last call, in order."""
        return self._actions.take()

    # what is known

    @property
    def close(self) -> CloseList | None:
        """The decided list; None before that is known here."""
        return self.closing.close

    @property
    def complete(self) -> bool:
        """True if it is decided, and all its content is here."""
        return self.closing.state == "complete"

    def awaited(self) -> tuple[PeerId, ...]:
        """The peers that this exchange waits for now: live contributors whose offer is missing."""
        roster, offers = self.roster, self.content.offers
        living = sorted(roster.living - {roster.me})
        return tuple(roster.peers[member] for member in living if member not in offers)

    def taken(self) -> tuple[bool, ...]:
        """By shard: is my contribution in the result?"""
        assert self.close is not None, f"{self.key} is not decided"
        me, shards = self.roster.me, self._terms.shards
        mine = {item.index % shards for item in self.close.items if has(item, me)}
        return tuple(shard in mine and me in self.content.offers for shard in range(shards))

    # what follows from an event

    def _advance(self, now_s: float, *, everywhere: bool = False) -> None:
        """Do what has become possible, in all shards or in those that the last event concerned."""
        if not self.closing.is_decided:
            self.content.work(now_s, everywhere=everywhere)
            self._report()
            self._actions.send(self.closing.put_forward(now_s))
        if self.closing.is_decided:
            self.closing.settle()

    def _rely_on_the_living(self) -> None:
        """Where some only vote, what is put forward is held by most of the living contributors.

        Where all contribute it is a majority of all, which a decision needs anyway.
        """
        if self.roster.has_voters:
            self.content.availability.rely_on(self.roster.living)

    def _report(self) -> None:
        """Tell the others what I hold once I hold all there is; until then `_repeat` tells them."""
        availability = self.content.availability
        is_all = availability.whole and (availability.filled or self._terms.kind == "gather")
        if is_all and availability.report != self._reported:
            self._say_holdings()

    def _say_holdings(self) -> None:
        report = self.content.availability.report
        if any(report):
            self._reported = report
            self._actions.to_others(Holds(self.key, self.view, report))

    def _repeat(self) -> None:
        """Say once more what may have been lost."""
        for message in self.content.repeated:
            self._actions.to_others(message)
        self._say_holdings()
        self._actions.send(self.closing.decision.retry())
