"""A member that contributes nothing to an exchange and only votes on how it ends.

In a model with stages, only a stage's members contribute to its exchanges, reduce and hold them;
the others vote, so that a stage of two members can decide when one dies. A voter has no content,
and proposes only an empty list, when no contributor is left.
"""

from farflock.swarm.protocol.exchange.close_list import decode_close_list, last_bundles
from farflock.swarm.protocol.exchange.content import Content, ExchangeContext


class Voter(Content):
    """The content of a voter: at most what it must witness."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, places=0)

    def may_accept(self, value: bytes) -> bool:
        """True if the list may be accepted; a witnessed one only once its last bundles are here.

        Missing ones are fetched. They outlive the stage, so that some peer outside it can tell what
        was decided."""
        if not self._terms.witnessed:
            return True
        bundles, held = self._terms.bundles, self.availability.held
        close = decode_close_list(value, self._terms, self._roster.contributors)
        missing = [item for item in last_bundles(close, bundles) if item.digest not in held]
        for item in missing:
            self.fetch(item.index % bundles, item.digest, item.size, self._witnesses)
        return all(item.digest in held for item in missing)

    def _witnesses(self) -> tuple[int, ...]:
        """Return the members to ask for last bundles: the live contributors, or else all.

        Any other member may have accepted the list before, and so have its last bundles."""
        members = self._roster.living or range(len(self._roster.peers))
        return tuple(member for member in sorted(members) if member != self._roster.me)
