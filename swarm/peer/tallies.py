"""The tokens taken in by a stage's members since its last round: a full batch makes its step due.

Each member announces its count and adds up those of all members, so that all notice at nearly the
same time, without asking a coordinator. A wrong number only makes that round's steps early or late:
contributions carry their own weights.

At the end of a run each member announces that it is done, and leaves when all have: an early leaver
could miss a round that others began, and end with a different state. In a run of whole models
(stage None), without batches, members also announce each stream's next round, so that all see
whether they have the same rounds (node/train/end_barrier.py).
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key, Tally
from farflock.swarm.peer.context import PeerContext

REPEAT_S = 1.0  # announcements are repeated, as they may be lost

# A peer in one of its lives: what one life announced does not count for the next.
MemberLife = tuple[PeerId, int]


class TallyReport(NamedTuple):
    """A member's report; the greater of two is the later one."""

    over: bool = False
    round: int = -1
    tokens: int = 0


@dataclass(slots=True)
class _Book:
    """One stream: its stage, its next round, and each member's report for it."""

    stage: int | None  # None: the whole model
    round: int
    reports: dict[MemberLife, TallyReport] = field(default_factory=dict)
    sent_s: float = 0.0


class Tallies:
    """The tallies of all streams that this peer contributes to."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._me: MemberLife = (context.me, context.incarnation)
        self._books: dict[str, _Book] = {}
        self.changed = asyncio.Event()  # set on every change; the waiter clears it

    def say(self, stream: str, stage: int, number: int, tokens: int) -> None:
        """Announce this peer's tokens for this round of the stream, its next one."""
        book = self._books.setdefault(stream, _Book(stage, number))
        known = book.reports.get(self._me)
        mine = TallyReport(known is not None and known.over, number, tokens)
        if mine != known:
            book.round = number
            self._report(stream, book, mine)

    def end(self, stream: str, stage: int | None, number: int = 0) -> None:
        """Announce that the run is over for this peer; round `number` would be the stream's next.

        It begins no more rounds of the stream, but takes part in those that others begin."""
        book = self._books.setdefault(stream, _Book(stage, number))
        known = book.reports.get(self._me, TallyReport(round=book.round))
        mine = known._replace(over=True, round=max(number, known.round))
        if mine != known:
            self._report(stream, book, mine)

    def is_over(self, stream: str) -> bool:
        """True if the run is over for all living members of the stage."""
        return all(report.over for report in self.reports(stream).values())

    def reports(self, stream: str) -> dict[PeerId, TallyReport]:
        """Return the last reports of the stage's living members, this peer included."""
        book = self._books[stream]
        return {
            peer: book.reports.get((peer, life), TallyReport()) for peer, life in self._living(book)
        }

    def total(self, stream: str) -> int:
        """Return the sum of the living members' tokens for the stage's next round."""
        book = self._books.get(stream)
        if book is None:
            return 0
        reports = (book.reports.get(who, TallyReport()) for who in self._living(book))
        return sum(each.tokens for each in reports if each.round == book.round and not each.over)

    def _living(self, book: _Book) -> Iterator[MemberLife]:
        view = self._context.views.newest
        for member in (view.members[index] for index in view.serving(book.stage)):
            if member.peer == self._context.me:
                yield self._me
            elif not self._context.gone(view, member.peer):
                yield member.peer, member.incarnation

    def receive(self, sender: PeerId, incarnation: int, message: Tally) -> None:
        """Handle a member's report."""
        book, view = self._books.get(message.key.stream), self._context.views.newest
        index = view.index(sender, incarnation)
        if book is None or index is None or index not in view.serving(book.stage):
            self._context.drop("tally of somebody else")
            return
        who = (sender, incarnation)
        report = TallyReport(message.over, message.key.round, message.tokens)
        if report > book.reports.get(who, TallyReport()):
            members = {(member.peer, member.incarnation) for member in view.members}
            members.add(self._me)  # even after it left the view
            book.reports = {
                each: numbers for each, numbers in book.reports.items() if each in members
            }
            book.reports[who] = report
            self.changed.set()

    def tick(self) -> None:
        """Repeat the reports."""
        for stream, book in self._books.items():
            if self._context.now() - book.sent_s >= REPEAT_S:
                self._send(stream, book)

    def _report(self, stream: str, book: _Book, mine: TallyReport) -> None:
        """Send this peer's new report to the others."""
        book.reports[self._me] = mine
        self._send(stream, book)
        self.changed.set()

    def _send(self, stream: str, book: _Book) -> None:
        book.sent_s = self._context.now()
        mine = book.reports[self._me]
        view = self._context.views.newest
        for index in view.serving(book.stage):
            if (peer := view.peers[index]) != self._context.me:
                self._context.send(peer, Tally(Key(stream, mine.round), mine.tokens, mine.over))
