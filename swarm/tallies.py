"""How much the members of a stage have taken in since its last round: when the sum is a batch, the stage's step is due.

Everybody tells its own number and adds up what it hears, so that all notice at nearly the same time and nobody is asked. A
wrong number makes the steps of its round early or late, and no more than that: what a contribution weighs goes with it.
"""

import asyncio
from dataclasses import dataclass, field

from farflock.swarm.links import PeerId
from farflock.swarm.messages import Key, Tally
from farflock.swarm.port import Port

REPEAT_S = 1.0  # what may have been lost is told again


@dataclass(slots=True)
class _Book:
    """One stream: its stage, its next round, and who has how much for it."""

    stage: int
    round: int
    told: dict[PeerId, tuple[int, int]] = field(default_factory=dict)  # round, tokens
    sent_s: float = 0.0


class Tallies:
    """The tallies of all streams that this peer contributes to."""

    def __init__(self, port: Port) -> None:
        self._port = port
        self._books: dict[str, _Book] = {}
        self.changed = asyncio.Event()  # set whenever a number did; who waits clears it

    def say(self, stream: str, stage: int, number: int, tokens: int) -> None:
        """I have so many tokens for this round of the stream, which is its next one."""
        book = self._books.setdefault(stream, _Book(stage, number))
        mine = (number, tokens)
        if book.round != number or book.told.get(self._port.me) != mine:
            book.round = number
            book.told[self._port.me] = mine
            self._send(stream, book)
            self.changed.set()

    def total(self, stream: str) -> int:
        """What the living members of the stage have for its next round, together."""
        book = self._books.get(stream)
        if book is None:
            return 0
        view = self._port.views.newest
        peers = (view.peers[index] for index in view.serving(book.stage))
        living = (peer for peer in peers if peer == self._port.me or not self._port.gone(view, peer))
        numbers = (book.told.get(peer, (-1, 0)) for peer in living)
        return sum(tokens for number, tokens in numbers if number == book.round)

    def receive(self, sender: PeerId, incarnation: int, message: Tally) -> None:
        """A member's number."""
        book, view = self._books.get(message.key.stream), self._port.views.newest
        index = view.index(sender, incarnation)
        if book is None or index is None or index not in view.serving(book.stage):
            self._port.drop("tally of somebody else")
            return
        known = book.told.get(sender, (-1, 0))
        told = (message.key.round, message.tokens)
        if told > known:
            book.told = {peer: numbers for peer, numbers in book.told.items() if peer in view.peers}
            book.told[sender] = told
            self.changed.set()

    def tick(self) -> None:
        """Tell again."""
        for stream, book in self._books.items():
            if self._port.now() - book.sent_s >= REPEAT_S:
                self._send(stream, book)

    def _send(self, stream: str, book: _Book) -> None:
        book.sent_s = self._port.now()
        number, tokens = book.told[self._port.me]
        view = self._port.views.newest
        for index in view.serving(book.stage):
            if (peer := view.peers[index]) != self._port.me:
                self._port.send(peer, Tally(Key(stream, number), tokens))
