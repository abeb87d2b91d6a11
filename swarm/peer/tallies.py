"""The tokens taken in by a stage's members since its last round: a full batch makes its step due.

Each member announces its count and adds up those of all members, so that all notice at nearly the
same time, without asking a coordinator. A wrong number only makes that round's steps early or late,
and that of one other member makes none due alone: contributions carry their own weights.

At the end of a run each member announces that it is done, and leaves when all have: an early leaver
could miss a round that others began, and end with a different state. In a run of whole models
(stage None), without batches, members also announce each stream's next round, so that all see
whether they have the same rounds (node/train/end_barrier.py).
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key, Tally

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
        """True if the run is over for all members of the stage that are not dead."""
        return all(report.over for report in self.reports(stream).values())

    def reports(self, stream: str) -> dict[PeerId, TallyReport]:
        """Return the last reports of the stage's members that are not dead, this peer included.

        A suspect may be there all the same, on a lossy line: whoever leaves takes with it what the
        others may still lack."""
        book = self._books[stream]
        told = self._told(book, lambda peer: self._context.life(peer) == "dead")
        return {peer: report for (peer, _), report in told.items()}

    def total(self, stream: str, max_each: int | None = None) -> int:
        """Return the sum of the living members' tokens for the stage's next round; of each other
        member, at most `max_each` count."""
        book = self._books.get(stream)
        if book is None:
            return 0
        view = self._context.views.newest
        told = self._told(book, lambda peer: self._context.gone(view, peer))
        return sum(
            each.tokens if who == self._me or max_each is None else min(each.tokens, max_each)
            for who, each in told.items()
            if each.round == book.round and not each.over
        )

    def _told(
        self, book: _Book, is_gone: Callable[[PeerId], bool]
    ) -> dict[MemberLife, TallyReport]:
        """Return the last reports of this peer and of a stage's members that have not begun another
        life, and are not gone."""
        view, lives = self._context.views.newest, self._context.lives
        members = (view.members[index] for index in view.serving(book.stage))
        there = [
            self._me if member.peer == self._context.me else (member.peer, member.incarnation)
            for member in members
            if member.peer == self._context.me
            or (
                lives.get(member.peer, member.incarnation) == member.incarnation
                and not is_gone(member.peer)
            )
        ]
        return {life: book.reports.get(life, TallyReport()) for life in there}

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
