"""The end of an exchange: one list is decided, its content is fetched, and it can be applied.

A member proposes only items that are held by a quorum (if some members only vote, by most of the
live contributors), so that the decided content survives its proposer. The kind of exchange
determines the list (`Content.closable`); Paxos ensures that only one is decided
(`swarm/protocol/decide.py`). Proposers take turns: a member proposes once all live ones before it
have had time to, and gives each ballot more time than the last, so that one gets through even over
slow links. At the deadline, or once nothing can come of it, members propose the empty list: the
exchange has failed, and all agree that it has. No member is ever left to guess.

The table has the states of one member, by its role in the exchange. A contributor must hold the
decided content before it is complete ("held"); a voter does not need it and is complete at once.

- *open*: contributions, and reductions of them, are arriving.
- *ready*: there is a list to propose ("closable"); the member waits for its turn.
- *proposing*: it has proposed one, and proposes again if nothing comes of it.
- *fetching*: a list is decided, and some of its content is not here.
- *complete*: the list can be applied.

No transition leads back and none is a timeout: a decision may come at any time.
"""

import math
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from farflock.swarm.messages import Message
from farflock.swarm.protocol.decide import TAKEOVER_S, Decision, Sends
from farflock.swarm.protocol.exchange.availability import RoundItem, has
from farflock.swarm.protocol.exchange.close_list import CloseList, decode_close_list
from farflock.swarm.protocol.exchange.content import Content, ExchangeContext
from farflock.swarm.protocol.exchange.reminders import Reminders, calls_for_decision
from farflock.swarm.protocol.transitions import after

# Limit on doublings of the time between a proposer's ballots. Without one, a group whose links heal
# would wait as long again as they were down.
MAX_DOUBLINGS = 6

ClosingRole = Literal["contributor", "voter"]
ClosingState = Literal["open", "ready", "proposing", "fetching", "complete"]
ClosingEvent = Literal["closable", "proposed", "decided", "held"]

CLOSING_TABLES: dict[ClosingRole, dict[tuple[ClosingState, ClosingEvent], ClosingState]] = {
    "contributor": {
        ("open", "closable"): "ready",
        ("open", "decided"): "fetching",
        ("ready", "proposed"): "proposing",
        ("ready", "decided"): "fetching",
        ("proposing", "proposed"): "proposing",
        ("proposing", "decided"): "fetching",
        ("fetching", "held"): "complete",
    },
    "voter": {
        ("open", "closable"): "ready",
        ("open", "decided"): "complete",
        ("ready", "proposed"): "proposing",
        ("ready", "decided"): "complete",
        ("proposing", "proposed"): "proposing",
        ("proposing", "decided"): "complete",
    },
}


class Closing:
    """One member's part in how an exchange ends.

    `prior_tokens` are the run's agreed tokens before the exchange; a voter that does not know them
    (None) proposes nothing. While `holds_back` returns True, a next view may take the round over,
    and this member accepts nothing."""

    def __init__(
        self,
        context: ExchangeContext,
        content: Content,
        prior_tokens: int | None,
        holds_back: Callable[[], bool],
    ) -> None:
        self._context, self._content, self.prior_tokens = context, content, prior_tokens
        roster = self._roster = context.roster
        self.decision = Decision(
            context.key,
            context.view,
            roster.me,
            roster.ordered,
            holds_back=holds_back,
            ready=content.may_accept,
        )
        self.state: ClosingState = "open"
        self.close: CloseList | None = None
        self._table = CLOSING_TABLES["contributor" if roster.contributes else "voter"]
        self._ready_s = self._proposed_s = 0.0
        self._proposals = 0
        self.reminders = Reminders(math.inf)

    @property
    def is_decided(self) -> bool:
        """True if one list is known here to be decided."""
        return self.decision.decided is not None

    def require_list(self, value: bytes) -> CloseList:
        """Decode a proposed value; raise `BadCloseList` if no correct member proposes it."""
        return decode_close_list(value, self._context.terms, self._roster.contributors)

    def put_forward(self, now_s: float) -> Sends:
        """Propose a close list if there is one and it is our turn."""
        places = self._places(now_s)
        if places is None:
            return []
        if self.state == "open":
            self._move("closable")
            self._ready_s = now_s
        if now_s < self._turn_s() or (value := self._proposal(places, now_s)) is None:
            return []
        self._move("proposed")
        self._proposed_s, self._proposals = now_s, self._proposals + 1
        return self.decision.propose(value)

    def settle(self, now_s: float) -> None:
        """Fetch what is missing of the decided list, until it can be applied."""
        if self.close is None:
            assert self.decision.decided is not None
            self.close = self.require_list(self.decision.decided)
            self._move("decided")
            self.reminders = Reminders(now_s)
        if self.state == "fetching":
            held = self._content.availability.held
            missing = [item for item in self.close.items if item.digest not in held]
            self._content.collect_decided(missing)
            # That marks as held what the chunk store already has.
            if all(item.digest in held for item in missing):
                self._move("held")

    def remind(self, now_s: float, sender: int, message: Message) -> Sends:
        """Answer a member that does not know yet that the exchange is decided."""
        answer = self.decision.receive(sender, message)
        if answer or not calls_for_decision(message):
            return answer
        roster = self._roster
        is_due = self.reminders.is_due(now_s, sender, roster.me, len(roster.peers))
        return [(sender, self.decision.announcement())] if is_due else []

    def _move(self, event: ClosingEvent) -> None:
        self.state = after(self._table, self.state, event)

    def _places(self, now_s: float) -> Iterable[int] | None:
        """Return the places that could be decided now; None to keep waiting.

        Empty after the deadline, once no contributor is alive, or if what the living bring has no
        weight: the exchange has failed."""
        # A list states the run's tokens, which this voter could only guess.
        if self.prior_tokens is None and not self._roster.contributes:
            return None
        places = self._content.closable(now_s)
        is_over = now_s >= self._context.ends_s or not self._roster.living
        return () if places is None and is_over else places

    def _turn_s(self) -> float:
        """Return the time of our turn to propose, or to propose again."""
        # One after the other: two proposers at once would only outbid each other.
        turn_s = self._ready_s + TAKEOVER_S * self._roster.live_before_me
        if self.state == "ready":
            return turn_s
        # Longer each time, and different for each place, so that some ballot has enough time.
        doublings = min(self._proposals - 1, MAX_DOUBLINGS)
        again_s = self._proposed_s + TAKEOVER_S * (2 + self._roster.place) * float(2**doublings)
        return max(turn_s, again_s)

    def _proposal(self, places: Iterable[int], now_s: float) -> bytes | None:
        """Return the close list of the agreed items at these places, or None to keep waiting."""
        offers, agreed = self._content.offers, self._content.availability.agreed
        items = tuple(agreed[place] for place in places)
        if not offers.includes(self._included(items)):
            if now_s < self._context.ends_s:
                # A reducer knew an offer that is missing here: a member that has it proposes.
                return None
            items = ()
        included = self._included(items)
        members = tuple((member, offers[member].weight) for member in included)
        tokens = (self.prior_tokens or 0) + offers.tokens(included)
        return msgspec.msgpack.encode(
            CloseList(items, members, tokens, offers.common_state(), offers.evaluations(included))
        )

    def _included(self, items: tuple[RoundItem, ...]) -> list[int]:
        members = range(len(self._roster.peers))
        return [member for member in members if any(has(item, member) for item in items)]
