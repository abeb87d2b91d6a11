"""The callers of a peer: members of its views only, and what is remembered of the lives of each.

A newcomer may call as soon as it is listed, one that is not yet known here as a member asks again,
and a member that the newest view no longer lists has until the view after that one to end its work.
"""

from dataclasses import dataclass, field

from farflock.swarm.context import PeerContext
from farflock.swarm.links import PeerId

FORGET_S = 600.0  # after a silence this long, no late copy of a call is still on its way
MAX_CALLERS = 256  # remembered lives of callers: more than two views list
MAX_LIVES = 4  # the same, per peer, so that one that restarts often does not crowd out others
MAX_OVER = 512  # remembered call ids of one life; older ones count as over
VIEWS_SERVED = 2  # the newest view, and the one before it

CallerLife = tuple[PeerId, int]  # (caller, incarnation)


@dataclass(slots=True)
class EndedCalls:
    """The finished calls of one life of a caller, so that a late copy is not served again."""

    heard_s: float = 0.0
    floor: int = 0  # all ids below are over, or too late
    over: dict[int, None] = field(default_factory=dict)  # oldest first

    def end(self, number: int) -> None:
        """Note that a call is over."""
        if self.is_over(number):
            return
        self.over[number] = None
        if len(self.over) > MAX_OVER:
            oldest = next(iter(self.over))
            del self.over[oldest]
            self.floor = max(self.floor, oldest + 1)

    def is_over(self, number: int) -> bool:
        """True if a call is over, or so old that it counts as over."""
        return number < self.floor or number in self.over


class Callers:
    """The lives of callers that this peer serves, and their finished calls."""

    def __init__(self, context: PeerContext) -> None:
        self._context = context
        self._ended: dict[CallerLife, EndedCalls] = {}

    @property
    def lives(self) -> tuple[CallerLife, ...]:
        """The lives that are remembered."""
        return tuple(self._ended)

    def admits(self, life: CallerLife) -> bool:
        """True if the newest view or the one before it lists a peer in this life."""
        chain = self._context.chain
        views = () if chain is None else chain.views[-VIEWS_SERVED:]
        return any(entry.view.index(*life) is not None for entry in views)

    def known(self, life: CallerLife) -> EndedCalls | None:
        """Return the finished calls of a life, or None if nothing is remembered of it."""
        return self._ended.get(life)

    def remember(self, life: CallerLife) -> EndedCalls:
        """Return the finished calls of a life that is admitted, remembered from now on.

        Lives have no order: a late message from an old life must not end calls of the next."""
        assert self.admits(life), f"{life} is no member"
        if life not in self._ended:
            same = [other for other in self._ended if other[0] == life[0]]
            if len(same) >= MAX_LIVES:
                self._forget_oldest(same)
            elif len(self._ended) >= MAX_CALLERS:
                # two views list fewer, so some of these are no longer served
                self._forget_oldest([each for each in self._ended if not self.admits(each)])
            self._ended[life] = EndedCalls()
        self._ended[life].heard_s = self._context.now()
        return self._ended[life]

    def forget_silent(self) -> None:
        """Forget the lives from which no copy of a call can still come."""
        now_s = self._context.now()
        for life, ended in list(self._ended.items()):
            if ended.heard_s + FORGET_S <= now_s:
                del self._ended[life]

    def _forget_oldest(self, lives: list[CallerLife]) -> None:
        del self._ended[min(lives, key=lambda life: self._ended[life].heard_s)]
