"""Bookkeeping of a method's rounds: the next one, this peer's progress in it, and whether its
message is pending."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from farflock.optimizers.method import Exchange, Replica, Result, TensorBlock, Tensors
from farflock.optimizers.parts.blocks import LazyTensors, parameters
from farflock.optimizers.parts.state_fields import own, shared


@dataclass(slots=True)
class RoundBook:
    """One stream's next round, which members share, and this peer's progress in it. `since` counts
    local steps since the last message was taken; `pending` is True while its result is unknown. If
    a method has several books, `suffix` follows each name in a state.

    `start` holds the parameters from which the pending message was computed, for a method that
    needs them later. They are copied before the first local step that changes the replica, so that
    a peer that waits for its result copies nothing."""

    number: int = shared(0, "round{0.suffix}")
    since: int = own(0, "since{0.suffix}")
    pending: bool = own(False, "pending{0.suffix}")
    suffix: str = ""
    start: dict[str, Tensor] = own(dict)
    message: Tensors | None = None

    def is_due(self, period: int) -> bool:
        """True after `period` local steps, unless a message is pending."""
        return self.since >= period and not self.pending

    def leave(self, message: Tensors | None = None) -> None:
        """Note that this round's message was taken just now."""
        self.since, self.pending, self.message = 0, True, message

    def hold(self, replica: Replica, names: Sequence[str] = ()) -> None:
        """Prepare for a local step while a message is pending: keep its values, unless they were
        dropped, and where these parameters stood."""
        if self.pending and isinstance(self.message, LazyTensors):
            self.message.hold()
        if self.pending and names and not self.start:
            self.start = parameters(replica, names)

    def started(self, block: TensorBlock, theta: Tensor) -> Tensor:
        """Return one block of the parameters from which the message was computed; `theta` is what
        they are now."""
        return block.of(self.start[block.name]) if self.start else theta

    def close(self, exchange: Exchange, result: Result) -> None:
        """Advance to the next round. A replayed round, without tensors, ends no pending message."""
        if exchange.tensors or result.sent is not None:
            self.pending, self.message = False, None
        self.number = result.next_round

    def settled(self) -> None:
        """Forget where the parameters stood, once the message's result is applied."""
        if not self.pending:
            self.start = {}
