"""Bookkeeping of a method's rounds: the next one, this peer's progress in it, and whether its
message is pending."""

from dataclasses import dataclass

from farflock.optimizers.method import Exchange, Result
from farflock.optimizers.parts.state_fields import own, shared


@dataclass(slots=True)
class RoundBook:
    """One stream's next round, which members share, and this peer's progress in it. `since` counts
    local steps since the last message was taken; `pending` is True while its result is unknown. If
    a method has several books, `suffix` follows each name in a state."""

    number: int = shared(0, "round{0.suffix}")
    since: int = own(0, "since{0.suffix}")
    pending: bool = own(False, "pending{0.suffix}")
    suffix: str = ""

    def is_due(self, period: int) -> bool:
        """True after `period` local steps, unless a message is pending."""
        return self.since >= period and not self.pending

    def leave(self) -> None:
        """Note that this round's message was taken just now."""
        self.since, self.pending = 0, True

    def close(self, exchange: Exchange, result: Result) -> None:
        """Advance to the next round. A replayed round, without tensors, ends no pending message."""
        if exchange.tensors or result.sent is not None:
            self.pending = False
        self.number = result.next_round
