"""A member that contributes nothing to an exchange and only votes on how it ends.

In a model with stages, only a stage's members contribute to its exchanges, reduce and hold them;
the others vote, so that a stage of two members can decide when one dies. A voter has no content,
and proposes only an empty list, when no contributor is left.
"""

from farflock.swarm.protocol.exchange.availability import RoundItem
from farflock.swarm.protocol.exchange.close_list import decode_close_list, last_bundles
from farflock.swarm.protocol.exchange.content import Content, ExchangeContext


class Voter(Content):
    """The content of a voter: at most what it must witness."""

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context, places=0)

    def _vouches_for(self, value: bytes) -> list[RoundItem]:
        """Return a witnessed list's last bundles, which outlive the stage, so that some peer
        outside it can tell what was decided; nothing of other lists."""
        if not self._terms.witnessed:
            return []
        close = decode_close_list(value, self._terms, self._roster.contributors)
        return last_bundles(close, self._terms.bundles)

    def _fetch_lacking(self, items: list[RoundItem]) -> None:
        for item in items:
            bundle = item.index % self._terms.bundles
            self.fetch(bundle, item.digest, item.size, self._witnesses)

    def _witnesses(self) -> tuple[int, ...]:
        """Return the members to ask for last bundles: the live contributors, or else all.

        Any other member may have accepted the list before, and so have its last bundles."""
        members = self._roster.living or range(len(self._roster.peers))
        return tuple(member for member in sorted(members) if member != self._roster.me)
