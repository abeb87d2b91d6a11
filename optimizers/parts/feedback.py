"""Error feedback, as plain functions and as a sender's memory: the next message carries what a
lossy codec dropped.

a = beta·e + x is sent; where it was taken, e = a - sent. Elsewhere e stays as it is, and so does
the local work x, which the replica keeps and the next message therefore contains again: e = a there
would count x twice. Settling happens when the result is known, never when the payload is encoded: a
payload that was not taken must not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from farflock.optimizers.method import Ranges, Replica, TensorBlock
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.state_fields import own


def message(x: Tensor, residual: Tensor | None, beta: float) -> Tensor:
    """Return the message: the new value plus the decayed residual."""
    return x.clone() if residual is None else scaled(residual, beta) + x


def settle(sent_from: Tensor, sent: Tensor, taken: Ranges, residual: Tensor | None) -> Tensor:
    """Return the new residual: `sent_from` - `sent` (the message minus its decoded form) in the
    flat ranges `taken`, the old residual (None: zeros) elsewhere."""
    return choose(
        taken,
        sent_from - sent,
        sent_from.new_zeros(sent_from.shape) if residual is None else residual,
    )


def choose(ranges: Ranges, inside: Tensor, outside: Tensor) -> Tensor:
    """Return `inside` in these flat ranges, `outside` elsewhere; no copy if one covers all."""
    if list(ranges) == [(0, inside.numel())]:
        return inside
    if not ranges:
        return outside
    mixed = outside.clone().reshape(-1)
    flat = inside.reshape(-1)
    for start, stop in ranges:
        mixed[start:stop] = flat[start:stop]
    return mixed.reshape(inside.shape)


@dataclass(slots=True)
class SenderFeedback:
    """One sender's feedback by tensor, `residual.NAME` in a state: what its messages did not bring
    to the others."""

    residual: dict[str, Tensor] = own(dict, stays=True)

    def message(self, block: TensorBlock, work: Tensor, beta: float) -> Tensor:
        """Return one block of the message for this work; `beta` is the residual's decay."""
        residual = self.residual.get(block.name)
        return message(work, None if residual is None else block.of(residual), beta)

    def begin(self, replica: Replica, names: Sequence[str]) -> None:
        """Begin with residuals of zero for these parameters, unless there are some."""
        if not self.residual:
            self.residual = {name: replica.allocate(replica.shapes[name]) for name in names}

    def settle(self, block: TensorBlock, sent_from: Tensor, sent: Tensor, taken: Ranges) -> None:
        """Keep what a message held beyond `sent` in the ranges `taken` of one block."""
        residual = block.of(self.residual[block.name])
        residual.copy_(settle(sent_from, sent, taken, residual))
