"""The bookkeeping of a method's rounds: which one is next, how far this peer is in it, and whether its message is on the
way."""

from dataclasses import dataclass

from farflock.optimizers.method import Exchange, Result
from farflock.optimizers.parts.state_fields import own, shared


@dataclass(slots=True)
class RoundBook:
    """One stream's next round, which the members share, and this peer's own place in it.

    `since` counts the local steps since the last message was taken, `pending` says whether its result is still out.
    Where a method keeps several books, `suffix` follows each name in a state.
    """

    number: int = shared(0, "round{0.suffix}")
    since: int = own(0, "since{0.suffix}")
    pending: bool = own(False, "pending{0.suffix}")
    suffix: str = ""

    def is_due(self, period: int) -> bool:
        """True after `period` local steps, unless a message is still on its way."""
        return self.since >= period and not self.pending

    def leave(self) -> None:
        """Note that this round's message was taken just now."""
        self.since, self.pending = 0, True

    def close(self, exchange: Exchange, result: Result) -> None:
        """Go on to the next round. A replayed round has no tensors, and leaves a pending message of this peer's alone."""
        if exchange.tensors or result.sent is not None:
            self.pending = False
        self.number = result.next_round
