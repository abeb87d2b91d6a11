"""A contribution that is not finite, after a batch that gave NaN: it is never sent.

The peer offers zeros of no weight in its place, so that the others' round closes at once and
without it, and then adopts the group's state. A peer to whom this happens again and again ends.
"""

from dataclasses import dataclass, replace

from farflock.compression.codec import UnencodableTensor
from farflock.node.train.driver import Claim
from farflock.optimizers.method import Exchange
from farflock.optimizers.parts.blocks import shapes_of
from farflock.optimizers.parts.state import zeros

MAX_IN_A_ROW = 3


@dataclass(slots=True)
class Withheld:
    """One peer's contributions that were withheld, since the last one that was not."""

    in_a_row: int = 0

    def instead(
        self, exchange: Exchange, claim: Claim, error: UnencodableTensor
    ) -> tuple[Exchange, Claim]:
        """Return the empty contribution; raise `UnencodableTensor` the third time in a row."""
        self.in_a_row += 1
        if self.in_a_row >= MAX_IN_A_ROW:
            raise UnencodableTensor(
                f"the training diverges here, with NaN or infinity in {self.in_a_row} rounds in a"
                " row; lower the learning rate, or look for bad batches in this peer's data"
            ) from error
        empty = replace(exchange, tensors=zeros(shapes_of(exchange.tensors)), weight=0.0)
        return empty, replace(claim, tokens=0)


def reason(exchange: Exchange) -> str:
    """Return why this peer adopts the group's state."""
    return (
        f"what it would have sent in round {exchange.key.round} of {exchange.key.stream} had NaN or"
        " infinity, so the others' round went on without it"
    )
