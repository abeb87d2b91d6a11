"""Error feedback, as plain functions and as one sender's memory: what a lossy codec did not deliver goes with the next
message.

a = beta·e + x is sent; where it was taken, e = a - sent. Elsewhere e stays as it is, and so does the local work x, which
the replica keeps and the next message therefore contains again: e = a there would count x twice. Settling happens when
the result is known, never when the payload is encoded: a payload that nobody took must not count.
"""

from dataclasses import dataclass

from torch import Tensor

from farflock.optimizers.method import Ranges, Tensors
from farflock.optimizers.parts.outer import scaled
from farflock.optimizers.parts.state_fields import own


def message(x: Tensor, residual: Tensor | None, beta: float) -> Tensor:
    """What to send: the new value plus the decayed residual."""
    return x.clone() if residual is None else scaled(residual, beta) + x


def settle(sent_from: Tensor, sent: Tensor, taken: Ranges, residual: Tensor | None) -> Tensor:
    """The new residual: what the message `sent_from` held beyond `sent` (as others decoded it) in the `taken` flat ranges,
    the old residual (None: zeros) elsewhere."""
    return choose(taken, sent_from - sent, sent_from.new_zeros(sent_from.shape) if residual is None else residual)


def choose(ranges: Ranges, inside: Tensor, outside: Tensor) -> Tensor:
    """`inside` in these flat ranges, `outside` elsewhere; same shape, copied unless one covers everything."""
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
    """One sender's error feedback, by tensor: the residual, what the pending message was encoded from, and where the replica
    stood then. In a state they are `residual.NAME`, `message.NAME` and `start.NAME`."""

    residual: dict[str, Tensor] = own(dict, stays=True)
    message: dict[str, Tensor] = own(dict)
    start: dict[str, Tensor] = own(dict)

    def compose(self, work: dict[str, Tensor], theta: Tensors, beta: float | None) -> dict[str, Tensor]:
        """The message for this work of a replica at `theta`: it is kept until its result is known. Without a decay `beta` there
        is no feedback: the message is the work, and nothing is kept."""
        if beta is None:
            return work
        tensors = {name: message(x, self.residual.get(name), beta) for name, x in work.items()}
        self.message.update(tensors)
        self.start.update(theta)
        return tensors

    def settle(self, name: str, sent: Tensor, taken: Ranges) -> None:
        """Keep what the message held beyond `sent` in the taken ranges of one tensor."""
        self.residual[name] = settle(self.message[name], sent, taken, self.residual.get(name))
