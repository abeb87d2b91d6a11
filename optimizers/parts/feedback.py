"""Error feedback, as plain functions and as a sender's memory: the next message carries what a
lossy codec dropped.

a = beta·e + x is sent; where it was taken, e = a - sent. Elsewhere e stays as it is, and so does
the local work x, which the replica keeps and the next message therefore contains again: e = a there
would count x twice. Settling happens when the result is known, never when the payload is encoded: a
payload that was not taken must not count.
"""

from dataclasses import dataclass

from torch import Tensor

from farflock.optimizers.method import Ranges, Tensors
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
    """One sender's feedback by tensor: the residual, what the pending message encodes, and the
    replica's parameters then. In a state: `residual.NAME`, `message.NAME`, `start.NAME`."""

    residual: dict[str, Tensor] = own(dict, stays=True)
    message: dict[str, Tensor] = own(dict)
    start: dict[str, Tensor] = own(dict)

    def compose(
        self, work: dict[str, Tensor], theta: Tensors, beta: float | None
    ) -> dict[str, Tensor]:
        """Return the message for the work of a replica at `theta`, kept until its result is known.
        If `beta` (the decay) is None, the message is the work, and nothing is kept."""
        if beta is None:
            return work
        tensors = {name: message(x, self.residual.get(name), beta) for name, x in work.items()}
        self.message.update(tensors)
        self.start.update(theta)
        return tensors

    def settle(self, name: str, sent: Tensor, taken: Ranges) -> None:
        """Keep as residual what the message held beyond `sent` in one tensor's taken ranges."""
        self.residual[name] = settle(self.message[name], sent, taken, self.residual.get(name))
