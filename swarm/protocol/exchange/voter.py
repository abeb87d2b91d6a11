"""A member of an exchange that brings nothing to it and only votes on how it ends.

Of a model that is cut into stages, only a stage's members contribute to its exchanges, reduce and
hold them; the others vote, so that a stage of two members can decide when one of them dies. A voter
has no content. It can put forward one thing alone, an empty list, when nobody is left to bring
anything.
"""

from collections.abc import Callable, Iterable

from farflock.swarm.messages import Message, Offer, Reduced
from farflock.swarm.protocol.exchange.actions import Actions
from farflock.swarm.protocol.exchange.availability import Availability
from farflock.swarm.protocol.exchange.close_list import RoundTerms, decode_close_list, told
from farflock.swarm.protocol.exchange.fetches import Fetches
from farflock.swarm.protocol.exchange.offers import Offers
from farflock.swarm.protocol.exchange.roster import Roster


class Voter:
    """What a member that only votes holds: at most what it must witness."""

    def __init__(
        self,
        roster: Roster,
        terms: RoundTerms,
        actions: Actions,
        holding: Callable[[bytes], bool],
    ) -> None:
        self._roster, self._terms = roster, terms
        self.offers = Offers(terms.shards)
        self.availability = Availability(0, len(roster.peers), roster.me)
        self.fetches = Fetches(roster, self.availability, actions, terms.shards, holding)

    def take(self, member: int, message: Offer | Reduced) -> None:
        """Content does not concern a member that only votes."""

    def fetched(self, digest: bytes) -> None:
        """A witnessed chunk has come, or could not be had: the decision goes on by itself."""

    def work(self, now_s: float, *, everywhere: bool = False) -> None:
        """There is nothing to compute."""

    @property
    def repeated(self) -> list[Message]:
        """A voter says nothing that it would have to repeat."""
        return []

    def closable(self, now_s: float) -> Iterable[int] | None:
        """A voter knows of no content that could be decided."""
        return None

    def may_accept(self, value: bytes) -> bool:
        """True if I may accept a list; of a witnessed one, fetch the last shards that I lack.

        What they say outlives the stage: whatever is decided, some peer outside it can tell what it was
        about.
        """
        if not self._terms.witnessed:
            return True
        shards, held = self._terms.shards, self.availability.held
        close = decode_close_list(value, self._terms, self._roster.contributors)
        missing = [item for item in told(close, shards) if item.digest not in held]
        for item in missing:
            self.fetches.fetch(item.index % shards, item.digest, item.size, self._witnesses)
        return all(item.digest in held for item in missing)

    def _witnesses(self) -> tuple[int, ...]:
        """The members to ask for what I am to accept: the living contributors, or else all.

        Any other member may have accepted the list, and so fetched its last shards, before me.
        """
        members = self._roster.living or range(len(self._roster.peers))
        return tuple(member for member in sorted(members) if member != self._roster.me)
