"""Whose turn it is to begin a ballot: each ballot number has one owner, and opens in its turn.

A member promises a ballot only once its turn has come by the member's own clock. So no member jumps
ahead of the others, outbids them without end, or uses up the numbers, and whatever one of them does
in its turn, the next turns are others'.

Ballot 0 is the first owner's alone and needs no turn (decide.py). Ballots from 1 on go around in
the seeded order. A promise begins its owner's turn, and the next turns follow; turns of suspects
last no time. A turn lasts `TAKEOVER_S`, and twice as long after each full round of promises, so
that a ballot gets through over slow links too.

Members that were cut off from each other, or came late, have counted other turns, and would admit
none of each other's ballots. So turns last half as long where a later ballot is known than any of
which the turn has come. A liar that names such ballots does no more than that.
"""

from collections.abc import Collection, Sequence

TAKEOVER_S = 1.0  # each later member waits this much longer before it replaces a silent one
# A member promises a ballot this long before its turn: clocks differ by a little, and a message
# that comes too early is lost until it is repeated.
EARLY_S = 0.5
# Limit on doublings. Without one, a group whose links heal would wait as long again as they were
# down.
MAX_DOUBLINGS = 6
# Turns of 64 members reach this number after two years; one that names a higher ballot lies.
MAX_NUMBER = 2**32


def owner(number: int, order: Sequence[int]) -> int:
    """Return the member that owns a ballot number."""
    return order[max(number - 1, 0) % len(order)]


def next_ballot(above: int, order: Sequence[int], me: int) -> int:
    """Return my lowest ballot number above this one, and above 0."""
    return above + 1 + (order.index(me) - above) % len(order)


class BallotTurns:
    """The turns of one decision as one member counts them, from `begun_s` on."""

    def __init__(self, order: Sequence[int], begun_s: float) -> None:
        self._order, self._since_s = order, begun_s
        self._number = 0  # the ballot promised last
        self._promises = 0
        self._latest = {0.0: 1, EARLY_S: 1}
        self._heard = 0  # the latest ballot that another member is at
        self._looked_s = begun_s

    def hear(self, number: int) -> None:
        """Note a ballot that another member is at."""
        self._heard = max(self._heard, number)

    def latest(
        self, promised: int, now_s: float, suspects: Collection[int], early_s: float = 0.0
    ) -> int:
        """Return the highest ballot number whose turn has come, or comes within `early_s` (0 or
        `EARLY_S`), if `promised` is the last one promised here."""
        if self._heard > self._latest[0.0]:
            self._since_s -= max(now_s - self._looked_s, 0.0)  # time passes twice as fast
        self._looked_s = now_s
        if promised > self._number:
            # Turns that had come before give way to this one: its owner has a whole turn.
            self._number, self._since_s = promised, now_s
            self._latest = dict.fromkeys(self._latest, promised)
            self._promises += 1
        reached = self._reached(now_s + early_s, suspects)
        self._latest[early_s] = max(self._latest[early_s], reached)
        return self._latest[early_s]

    def _reached(self, now_s: float, suspects: Collection[int]) -> int:
        order, number = self._order, max(self._number, 1)
        live = sum(member not in suspects for member in order)
        doublings = min(self._promises // len(order), MAX_DOUBLINGS)
        turn_s = TAKEOVER_S * 2**doublings
        cycles, left_s = divmod(max(now_s - self._since_s, 0.0), max(live, 1) * turn_s)
        number += int(cycles) * len(order)
        for _ in order[1:]:
            left_s -= 0.0 if owner(number, order) in suspects else turn_s
            if left_s < 0:
                break
            number += 1
        return number
