"""A member of an exchange that brings nothing to it and only votes on how it ends.

Of a model that is cut into stages, only a stage's members contribute to its exchanges, reduce and
hold them; the others vote, so that a stage of two members can decide when one of them dies. A voter
has no content. It can put forward one thing alone, an empty list, when nobody is left to bring
anything.
"""

from farflock.swarm.protocol.exchange.close_list import decode_close_list, last_shards
from farflock.swarm.protocol.exchange.content import Content, ExchangeContext


class Voter(Content):
    """The content of a member that only votes: at most what it must witness."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, places=0)

    def may_accept(self, value: bytes) -> bool:
        """True if I may accept a list; of a witnessed one, fetch the last shards that I lack.

        What they say outlives the stage: whatever is decided, some peer outside it can tell what it was
        about.
        """
        if not self._terms.witnessed:
            return True
        shards, held = self._terms.shards, self.availability.held
        close = decode_close_list(value, self._terms, self._roster.contributors)
        missing = [item for item in last_shards(close, shards) if item.digest not in held]
        for item in missing:
            self.fetch(item.index % shards, item.digest, item.size, self._witnesses)
        return all(item.digest in held for item in missing)

    def _witnesses(self) -> tuple[int, ...]:
        """The members to ask for what I am to accept: the living contributors, or else all.

        Any other member may have accepted the list, and so fetched its last shards, before me.
        """
        members = self._roster.living or range(len(self._roster.peers))
        return tuple(member for member in sorted(members) if member != self._roster.me)
